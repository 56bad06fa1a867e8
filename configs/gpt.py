# SPDX-License-Identifier: Apache-2.0
"""GPT: a causal language model on the same stack, in the shapes of GPT-1 and GPT-2.

Radford et al. 2018 (GPT-1, ARG gpt1): 12 layers of 768, post-LN, 512 tokens, batch 64,
Adam 2.5e-4 with a cosine to 0 after 2,000 steps, decay 0.01, dropout 0.1, BPE of 40,000
merges. Radford et al. 2019 (GPT-2, ARG base, medium, large, xl): pre-LN, 1,024 tokens,
batch 512, byte-level BPE, 50,257 pieces. Rate, decay and length of GPT-2's training are
unpublished: 6e-4, 0.1 and 600,000 steps are those of karpathy/nanoGPT. Further ARGs:
tiny, mini (not published), smoke.

Differences: a row begins with [CLS], its documents end with [SEP]; matrices before a
residual sum are drawn like all others.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="gpt2")
    first = size == "gpt1"
    config = c.base()
    config.objective = "clm"
    config.batch_size = 64 if first else 512
    config.total = c.duration(steps=1_500_000 if first else 600_000)
    config.model.family = "gpt2"
    config.model.size = size
    config.data.length = 512 if first else 1024
    config.data.plan = "full_sentences"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 40_478 if first else 50_257
    config.optim.lr = 2.5e-4 if first else 6e-4
    config.optim.wd = 0.01 if first else 0.1
    config.optim.b2 = 0.999 if first else 0.95
    config.optim.schedule = "cosine"
    config.optim.warmup = c.duration(steps=2_000)
    return c.make_smoke(config) if smoke else config

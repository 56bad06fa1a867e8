# SPDX-License-Identifier: Apache-2.0
"""ALBERT: all layers share parameters, small embeddings, sentence order, LAMB.

Lan et al. 2020 (arXiv 1909.11942), section 4.1, and google-research/albert: masked
LM and sentence-order prediction; n-grams of up to 3 words are masked, p(n) ~ 1/n;
batch 4,096 of 512 tokens, 125k steps, LAMB 1.76e-3 (0.9, 0.999), eps 1e-6, decay
0.01, warm-up 3,125 steps, clipping at 1; SentencePiece unigram, 30,000 pieces,
lower-cased. This is version 2, without dropout. ARG: tiny, mini (not published),
base, large, xlarge, xxlarge, smoke.

Differences: all of the 15% are predicted (there at most 20 per sequence;
data.max_predictions), chunks of one sentence form no pair with another
document, and LAMB corrects its bias.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="albert")
    config = c.base()
    config.objective = "mlm+sop"
    config.batch_size = 4096
    config.total = c.duration(steps=125_000)
    config.model.family = "albert"
    config.model.size = size
    config.model.hidden_act = "gelu_new"
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0
    config.data.length = 512
    config.data.plan = "pairs"
    config.data.masking = "albert"
    config.data.tokenizer = "unigram"
    config.data.vocab_size = 30_000
    config.data.lower_case = True
    config.optim.name = "lamb"
    config.optim.lr = 1.76e-3
    config.optim.wd = 0.01
    config.optim.warmup = c.duration(percent=2.5)  # 3,125 steps
    if smoke:
        config = c.make_smoke(config)
        # LAMB moves each layer by this share of its norm per step, in few steps
        config.optim.lr = 1e-2
    return config

# SPDX-License-Identifier: Apache-2.0
"""T5: an encoder reads a text without some spans, a decoder writes the spans.

Raffel et al. 2020 (arXiv 1910.10683), section 3.7: 15% of the tokens in spans of 3 on
average, 568 tokens of text in 512 slots and their spans in 114, 1M steps of 2,048 rows,
Adafactor, dropout 0.1; SentencePiece, 32,000 pieces and 100 sentinels. T5 1.1
(v1_1_SIZE): a gated MLP, a separate matrix before the softmax, no dropout. ARG: small,
base, large, v1_1_base, v1_1_large, v1_1_xl, v1_1_xxl; tiny, mini, v1_1_mini (not
published: 128 rows, 100,000 steps, a rate of 3e-2); smoke.

Differences: the rate falls linearly from 1e-2, after a warm-up of 1% (there it is 1e-2
for 10,000 steps, then 1 over the root of the step); a z-loss of 1e-4, as in T5X; the
vocabulary is trained on the training text and has [CLS] and [MASK], which no row uses.

UL2's seven denoisers: objective=
denoise:target=spans,density=0.15/0.15/0.5/0.5/0.15/0.5/0.25,mean=3/8/3/8/64/64/9999
"""

from bertjax import config as c

OURS = "tiny", "mini", "v1_1_mini"


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="t5")
    config = c.base()
    config.objective = "denoise:target=spans,z_loss=1e-4"
    config.batch_size = 2048
    config.total = c.duration(steps=1_000_000)
    config.model.family = "t5"
    config.model.size = size
    dropout = 0.0 if size.startswith("v1_1") else 0.1
    config.model.hidden_dropout_prob = dropout
    config.model.attention_probs_dropout_prob = dropout
    config.data.length = 512
    config.data.plan = "full_sentences"
    config.data.tokenizer = "unigram"
    config.data.vocab_size = 32_000
    config.data.extra_ids = 100
    config.data.lower_case = False
    config.optim.name = "adafactor"
    config.optim.lr = 1e-2
    config.optim.wd = 0.0
    config.optim.warmup = c.duration(percent=1)
    if size in OURS:
        config.batch_size = 128
        config.total = c.duration(steps=100_000)
        config.optim.lr = 3e-2
    if smoke:
        config = c.make_smoke(config)
        config.optim.name = "adamw"  # faster than Adafactor in a few steps
        # the tied embeddings are scaled down before the softmax
        config.optim.rates = "embeddings:10"
    return config

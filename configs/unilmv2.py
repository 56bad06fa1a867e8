# SPDX-License-Identifier: Apache-2.0
"""UniLMv2: a pseudo-masked language model, base size.

Bao et al. 2020 (arXiv 2002.12804), section 4: 12 layers of 768, 512 tokens, batch
7,680, 500k steps, Adam 6e-4 (0.9, 0.98), eps 1e-6, warm-up 24k, decay 0.01, dropout
0.1; uncased WordPiece, 30,522 pieces; 15% of the tokens in blocks, 40% of which have 2
to 6 tokens. The code of its pretraining is unpublished. ARG: a size, or smoke.

Differences: data.length counts all slots of a row, including copies. Of 640 slots
492 are for text; 512 tokens of text would need 666 slots, which is not a multiple
of 128, as TPU kernels want. The position table has one row per slot, and text uses
the first 492. A row is full sentences of one or several texts. Theirs adds
bucketed relative positions to the scores; model.relative_attention_num_buckets=32
does so, without the fused kernel.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "pmlm"
    config.batch_size = 7680
    config.total = c.duration(steps=500_000)
    config.model.size = size
    config.model.max_position_embeddings = 640
    config.data.length = 640
    config.data.plan = "full_sentences"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.data.lower_case = True
    config.optim.lr = 6e-4
    config.optim.wd = 0.01
    config.optim.b2 = 0.98
    config.optim.eps = 1e-6
    config.optim.warmup = c.duration(steps=24_000)
    return c.make_smoke(config) if smoke else config

# SPDX-License-Identifier: Apache-2.0
"""BERT as published: masked LM and next-sentence prediction, the 128-token phase.

Devlin et al. 2019 (arXiv 1810.04805), appendix A.2: batch 256, 1M steps, the
first 90% of them at 128 tokens; Adam 1e-4 (0.9, 0.999), decay 0.01, warm-up
10,000 steps, dropout 0.1; WordPiece, 30,522 pieces, lower-cased. ARG: tiny, mini,
small, medium, base, large, smoke.

Differences: AdamW corrects its bias; the rate falls from its peak to 0 at the end of
this phase; gelu is the exact one (google-research/bert: gelu_tanh).
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "mlm+nsp"
    config.batch_size = 256
    config.total = c.duration(steps=900_000)
    config.model.size = size
    config.data.length = 128
    config.data.plan = "pairs"
    config.data.masking = "bert"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.optim.lr = 1e-4
    config.optim.wd = 0.01
    config.optim.warmup = c.duration(percent=10 / 9)  # 10,000 steps
    return c.make_smoke(config) if smoke else config

# SPDX-License-Identifier: Apache-2.0
"""A small BERT on text that every installation has, in minutes on two CPU cores.

2 layers, 128 wide, 4,096 SentencePiece pieces, masked LM on full sentences. Small
batches of short rows: what so small a model lacks longest is updates, since it begins
to look at its neighbours (and so to beat a copy-or-guess) only after some 2,000.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="tiny")
    config = c.base()
    config.objective = "mlm"
    config.batch_size = 16
    config.dtype = "float32"
    config.total = c.duration(steps=10_000)
    config.model.size = size
    config.model.initializer_range = 0.05
    config.model.hidden_act = "gelu_tanh"  # the cheaper one on a CPU
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0
    config.data.train = config.data.valid = "builtin:docs"
    config.data.vocab_size = 4_096
    config.data.lower_case = True
    config.data.length = 64
    config.data.plan = "full_sentences"
    config.data.engine = "python"
    config.optim.lr = 1e-3
    config.optim.b2 = 0.98
    config.optim.warmup = c.duration(percent=5)
    config.log.every = c.duration(steps=50)
    config.eval.every = c.duration(percent=25)
    return c.make_smoke(config) if smoke else config

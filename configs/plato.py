# SPDX-License-Identifier: Apache-2.0
"""PLATO-XL: dialogue with a bidirectional context, a causal answer, and speaker roles.

Bao et al. 2021 (arXiv 2109.09519), section 3: ARG xl has 72 layers of 3,072, 32 heads,
an MLP of 18,432, 8,001 pieces (English), contexts of 896 tokens and answers of 128;
pre-LN, roles for any number of speakers, positions counted from the answer. The rate,
batch and steps are ours, and so are the other sizes: tiny, mini, small, medium, base,
large; their rows are shorter and also have turn embeddings. ARG smoke runs a tiny one
in seconds. The text is conversations in JSON lines (docs/dialogue.md).
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="plato")
    published = size == "xl"
    config = c.base()
    config.objective = "dialogue"
    config.batch_size = 2048 if published else 256
    config.total = c.duration(steps=100_000)
    config.model.family = "plato"
    config.model.size = size
    config.model.max_position_embeddings = 1024 if published else 576
    config.model.id_streams = "role:128" if published else "role:32,turn:32"
    config.data.plan = "turns"
    config.data.packed = True
    config.data.length = 1024 if published else 512
    config.data.target_length = 128 if published else 64
    config.data.tokenizer = "unigram"
    config.data.vocab_size = 8001
    config.data.lower_case = True
    config.optim.lr = 1e-4 if published else 3e-4
    config.optim.b2 = 0.98
    config.optim.warmup = c.duration(percent=2)
    if published:  # 22 GB of bfloat16 weights do not fit on one chip
        config.model.remat = "full"
        config.mesh.fsdp = 16
    if smoke:
        c.make_smoke(config)
        config.data.train = config.data.valid = ""
        config.data.length, config.data.target_length = 96, 32
    return config

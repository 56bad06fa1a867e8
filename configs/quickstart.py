# SPDX-License-Identifier: Apache-2.0
"""A small encoder for minutes on two CPU cores, with text every installation has.

The recipe of modern.py at its smallest size: 4 layers of 128, 4,096 SentencePiece
pieces, masked LM on full sentences. Batches are small and rows short, because so small
a model needs many updates most. ARG: tiny, mini, small, smoke.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP
    "tiny": (4, 128, 2, 256),
    "mini": (6, 256, 4, 512),
    "small": (12, 384, 6, 768),
}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="tiny", sizes=SIZES)
    layers, width, heads, mlp = SIZES[size]
    config = c.base()
    config.objective = "mlm"
    config.batch_size = 32
    config.dtype = "fast"
    config.total = c.duration(steps=5_000)
    config.model.family = "modernbert"
    config.model.num_hidden_layers = layers
    config.model.hidden_size = width
    config.model.num_attention_heads = heads
    config.model.intermediate_size = mlp
    config.model.hidden_act = "relu2"
    config.model.max_position_embeddings = 512
    # All layers attend globally. Hugging Face's files need a window, which none uses.
    config.model.local_rope_theta = 10_000.0
    config.model.global_attn_every_n_layers = 1
    config.model.rope_theta = 10_000.0
    config.model.zero_init_outputs = True
    # With the first token, finetuning is far worse on STS-B (docs/results.md).
    config.model.classifier_pooling = "mean"
    config.data.train = config.data.valid = "builtin:docs"
    config.data.vocab_size = 4_096
    config.data.lower_case = True
    config.data.length = 64
    config.data.plan = "full_sentences"
    config.data.engine = "python"
    config.data.mask_rate = "0.3:0.15"
    config.optim.name = "muon"
    config.optim.ns_dtype = "fast"
    config.optim.lr = 4e-3
    config.optim.wd = 0.05
    config.optim.b2 = 0.98
    config.optim.schedule = "wsd"
    config.optim.decay = c.duration(percent=40)
    config.optim.warmup = c.duration(percent=3)
    config.log.every = c.duration(steps=50)
    config.eval.every = c.duration(percent=25)
    return c.make_smoke(config) if smoke else config

# SPDX-License-Identifier: Apache-2.0
"""A modern encoder for a few minutes of training, as far as tried (docs/speedrun.md).

Masked LM whose mask rate falls from 30% to 15%; ModernBERT's layers without its
windows (pre-norm, rotary positions, no biases), a gated MLP of relu squared,
output projections that start at 0; Muon at a constant rate that falls in the last
40% of the run; small batches of short rows; lower-cased WordPiece; bfloat16 on
devices that multiply in it. ARG: tiny (2 M parameters), mini (6 M), small (21 M),
medium (40 M), base (150 M), smoke.

At size tiny, the rate, relu squared and the objective were compared with alternatives;
the rest was not. Of the larger sizes only medium was run, and mini with a width of 192
(the speedrun's model of three hours), at the rates below.
transformers opens an export as ModernBERT.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP, pieces
    "tiny": (4, 128, 2, 256, 8_192),
    "mini": (6, 256, 4, 512, 8_192),
    "small": (12, 384, 6, 768, 8_192),
    "medium": (12, 512, 8, 1024, 16_384),
    "base": (22, 768, 12, 1152, 50_368),
}
RATES = {"tiny": 4e-3, "mini": 4e-3, "small": 3e-3, "medium": 2e-3, "base": 1e-3}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="mini", sizes=SIZES)
    layers, width, heads, mlp, pieces = SIZES[size]
    short = size in ("tiny", "mini")
    config = c.base()
    config.objective = "mlm"
    config.dtype = "fast"
    config.batch_size = 32 if short else 128
    config.total = c.duration(steps=20_000)
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
    config.data.length = 64 if short else 128
    config.data.plan = "document"
    config.data.mask_rate = "0.3:0.15"
    config.data.engine = "python" if short else "tf"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = pieces
    config.data.lower_case = True
    config.optim.name = "muon"
    config.optim.ns_dtype = "fast"
    config.optim.lr = RATES[size]
    config.optim.wd = 0.05
    config.optim.b2 = 0.98
    config.optim.schedule = "wsd"
    config.optim.decay = c.duration(percent=40)
    config.optim.warmup = c.duration(percent=3)
    return c.make_smoke(config) if smoke else config

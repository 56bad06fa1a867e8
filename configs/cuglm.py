# SPDX-License-Identifier: Apache-2.0
"""CugLM: code completion, with names predicted by their types.

Liu et al. 2020 (ASE, doi 10.1145/3324884.3416591) and LiuFang816/CugLM: 6 layers of
516, 6 heads, MLP 3,072, 128 tokens of text, batch 48, Adam 5e-5, warm-up 1,000 steps;
600,000 steps of masked names, their types, next tokens and next code segments; then
300,000 of finetuning, in which masked names are also read from left to right and
segments are not predicted; 50,000 tokens and types. ARG: base (theirs), tiny, mini
(ours), smoke. Set data.train to files of Java or TypeScript (docs/code.md).

Differences: byte-level BPE, so names have several pieces and none is unknown, where
theirs has whole tokens; tree-sitter finds declared types; the 256 slots of a row hold
both copies of 128 tokens.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "base": (6, 516, 6, 3072),
}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", sizes=SIZES)
    layers, width, heads, mlp = SIZES[size]
    config = c.base()
    config.objective = "cuglm:causal=1"
    config.phases = "percent=66.7 objective=cuglm; "
    config.batch_size = 48
    config.total = c.duration(steps=900_000)
    config.model.size = ""
    config.model.num_hidden_layers = layers
    config.model.hidden_size = width
    config.model.num_attention_heads = heads
    config.model.intermediate_size = mlp
    config.model.max_position_embeddings = 256
    config.data.length = 256
    config.data.plan = "pairs"
    config.data.streams = "type:50000"
    config.data.code_field = "path"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 50_000 if size == "base" else 8_192
    config.data.lower_case = False
    config.optim.lr = 5e-5 if size == "base" else 1e-3
    config.optim.warmup = c.duration(steps=1_000)
    if smoke:
        config = c.make_smoke(config)
    config.data.train = config.data.valid = ""
    return config

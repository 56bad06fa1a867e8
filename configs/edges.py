# SPDX-License-Identifier: Apache-2.0
"""Edges of a knowledge graph: predict a relation from the graph around it.

The relation of one edge is masked in a small subgraph, whose tokens attend only
along edges (bertjax/tasks/types/edges.py). Shape and rates are ours, as in coke.py's
small sizes. Rows have up to 256 tokens; only attention by xla supports such masks.
ARG: tiny, mini, small, smoke.

  --config.data.train=train.tsv --config.data.valid=dev.tsv: head, relation, tail
[--config.data.entities=FILE], their names (docs/graphs.md)
"""

from bertjax import config as c

SIZES = {"tiny": (2, 64, 2), "mini": (3, 128, 4), "small": (4, 256, 4)}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="small", sizes=SIZES)
    layers, width, heads = SIZES[size]
    config = c.finetuning(smoke, lr=5e-4, batch_size=64, epochs=10, length=64)
    config.objective = "edges"
    config.model.num_hidden_layers = layers
    config.model.hidden_size = width
    config.model.num_attention_heads = heads
    config.model.intermediate_size = 2 * width
    config.model.type_vocab_size = 3
    config.model.position_embedding_type = "none"
    config.model.attention = "xla"
    return config

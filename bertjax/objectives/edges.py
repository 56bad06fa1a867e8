# SPDX-License-Identifier: Apache-2.0
"""Which relation an edge has that is masked, by what is around it in its graph.

A row is a small subgraph (tasks/types/edges.py): who sees whom are its edges,
`attention_edges` i8 [B, L, L]. The hidden state at the masked edge meets the embeddings
of the relations, as that of an entity does in complete.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Head
from bertjax.objectives.complete import make_candidate_head


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name what a batch of subgraphs holds beside tokens."""
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    return {
        "attention_edges": jax.ShapeDtypeStruct((rows, length, length), jnp.int8),
        "edges_positions": one,
        "edges_ids": one,
        "edges_weights": jax.ShapeDtypeStruct((rows, 1), jnp.float32),
    }


def make_head(gold: float = 1.0, top: int = 10, candidates: Any = None) -> Head:
    """Make the head: `edges_loss`, `edges_accuracy`; options as complete.py has them.

    candidates: which tokens are relations.
    """
    return make_candidate_head("edges", labels, gold, top, candidates)

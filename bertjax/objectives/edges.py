# SPDX-License-Identifier: Apache-2.0
"""Predict the relation of a masked edge from the subgraph around it.

A row is a small subgraph (tasks/types/edges.py): tokens attend along its edges,
`attention_edges` i8 [B, L, L]. The hidden state at the masked edge is multiplied with
the embeddings of the relations, as complete.py does with entities.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Head
from bertjax.objectives.complete import make_candidate_head


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch of subgraphs, beside tokens."""
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    return {
        "attention_edges": jax.ShapeDtypeStruct((rows, length, length), jnp.int8),
        "edges_positions": one,
        "edges_ids": one,
        "edges_weights": jax.ShapeDtypeStruct((rows, 1), jnp.float32),
    }


def make_head(gold: float = 1.0, top: int = 10, candidates: Any = None) -> Head:
    """Make the head: `edges_loss`, `edges_accuracy`; gold, top: see complete.make_head.

    candidates: which tokens are relations.
    """
    return make_candidate_head("edges", labels, gold, top, candidates)

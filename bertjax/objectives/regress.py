# SPDX-License-Identifier: Apache-2.0
"""Regress a row's score from its pooled vector (google-research/bert)."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.task_head import arrays, make_task_head, row_weights


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Return the squared error of logits [B, 1] from the labels, f32 [B]."""
    scores = logits[:, 0]
    rows = row_weights(batch)
    error = jnp.square(scores - batch["labels"])
    return Sum(jnp.sum(rows * error), jnp.sum(rows))


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores`, f32 [B]."""
    return {"scores": logits[:, 0]}


def make_head() -> Head:
    labels = arrays(labels=("B", jnp.float32))
    return make_task_head("regress", 1, loss, outputs, labels)

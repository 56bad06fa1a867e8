# SPDX-License-Identifier: Apache-2.0
"""Classification of a row by its pooled vector (Devlin et al. 2019, section 4.1)."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.task_head import arrays, make_task_head, row_weights


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Score the labels i32 [B] by logits [B, C]."""
    return cross_entropy(logits, batch["labels"], row_weights(batch))


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores` f32 [B, C] of the classes."""
    return {"scores": logits}


def make_head(classes: int = 2) -> Head:
    labels = arrays(labels=("B", jnp.int32))
    return make_task_head("classify", classes, loss, outputs, labels)

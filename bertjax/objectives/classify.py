# SPDX-License-Identifier: Apache-2.0
"""Classify a row by its pooled vector (Devlin et al. 2019, section 4.1)."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy, kl_divergence
from bertjax.objectives.task_head import arrays, make_task_head, row_weights
from bertjax.objectives.teacher import Soft, Teacher


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Return the cross-entropy of the labels, i32 [B], given logits [B, C]."""
    return cross_entropy(logits, batch["labels"], row_weights(batch))


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores` of the classes, f32 [B, C]."""
    return {"scores": logits}


def soft_loss(own: jax.Array, known: jax.Array, batch: Batch, t: float) -> Sum:
    """Return KL(teacher || student) at temperature t.

    own: the student's logits, [B, C]; known: the teacher's.
    """
    return kl_divergence(own, known, row_weights(batch), t)


def make_head(
    classes: int = 2,
    teacher_weight: float = 0.5,
    teacher_temperature: float = 2.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make the head; teacher_weight is the weight of the teacher's term (Soft)."""
    labels = arrays(labels=("B", jnp.int32))
    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    return make_task_head("classify", classes, loss, outputs, labels, soft=soft)

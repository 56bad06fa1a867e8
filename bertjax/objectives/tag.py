# SPDX-License-Identifier: Apache-2.0
"""Tagging: predict a class for each word, at its first piece.

Devlin et al. 2019, section 5.3. `labels` i32 [B, L] count where `label_weights` f32
[B, L] are 1. The host sets these weights at the first piece of each word.
"""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy, kl_divergence
from bertjax.objectives.task_head import arrays, make_task_head, weights_of
from bertjax.objectives.teacher import Soft, Teacher


def word_weights(batch: Batch) -> jax.Array:
    """Return 1 for each word with a label, f32 [B, L]."""
    return weights_of("label_weights", batch)


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Return the cross-entropy of the words' labels, given logits [B, L, C]."""
    return cross_entropy(logits, batch["labels"], word_weights(batch))


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the best class per position, `tags` i32 [B, L], and its `probability`.

    The probability, f32 [B, L], is NaN if the logits are.
    """
    tags = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return {"tags": tags, "probability": jnp.max(jax.nn.softmax(logits), axis=-1)}


def soft_loss(own: jax.Array, known: jax.Array, batch: Batch, t: float) -> Sum:
    """Return KL(teacher || student) over words at temperature t.

    own: the student's logits, [B, L, C]; known: the teacher's.
    """
    return kl_divergence(own, known, word_weights(batch), t)


def make_head(
    classes: int = 2,
    teacher_weight: float = 0.5,
    teacher_temperature: float = 2.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make the head; teacher_weight is the weight of the teacher's term (Soft)."""
    labels = arrays(labels=("BL", jnp.int32), label_weights=("BL", jnp.float32))
    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    how = dict(weights=word_weights, of_tokens=True, soft=soft)
    return make_task_head("tag", classes, loss, outputs, labels, **how)

# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering: predict the answer's span, by its start and its end.

Devlin et al. 2019, section 4.2. In a row without an answer, start and end are the first
token, [CLS] (section 4.3).
"""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy, kl_divergence
from bertjax.objectives.task_head import arrays, make_task_head, row_weights
from bertjax.objectives.teacher import Soft, Teacher

HIDDEN = -1e9  # the logit of padding


def mask_padding(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Split logits [B, L, 2] into start and end logits [B, L], HIDDEN at padding."""
    real = batch["attention_mask"][..., None] > 0
    logits = jnp.where(real, logits, HIDDEN)
    return logits[..., 0], logits[..., 1]


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Return the mean of the losses of start_positions and end_positions, i32 [B]."""
    starts, ends = mask_padding(logits, batch)
    rows = row_weights(batch)
    start = cross_entropy(starts, batch["start_positions"], rows)
    end = cross_entropy(ends, batch["end_positions"], rows)
    return Sum((start.value + end.value) / 2, start.weight)


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return `start_logits` and `end_logits` f32 [B, L], for tasks/types/span.py."""
    starts, ends = mask_padding(logits, batch)
    return {"start_logits": starts, "end_logits": ends}


def soft_loss(own: jax.Array, known: jax.Array, batch: Batch, t: float) -> Sum:
    """Return the mean of KL(teacher || student) of starts and of ends."""
    pairs = zip(*(mask_padding(logits, batch) for logits in (own, known)), strict=True)
    start, end = (kl_divergence(*pair, row_weights(batch), t) for pair in pairs)
    return Sum((start.value + end.value) / 2, start.weight)


def make_head(
    teacher_weight: float = 0.5,
    teacher_temperature: float = 2.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make the head; teacher_weight is the weight of the teacher's term (Soft)."""
    place = "B", jnp.int32
    labels = arrays(start_positions=place, end_positions=place)
    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    how = dict(of_tokens=True, dropout=False, soft=soft)
    return make_task_head("span", 2, loss, outputs, labels, **how)

# SPDX-License-Identifier: Apache-2.0
"""The span of a row that answers it: a start and an end (Devlin et al. 2019, section
4.2). A row without an answer points at its first token, [CLS], twice (section 4.3)."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.task_head import arrays, make_task_head, row_weights

HIDDEN = -1e9  # the logit of padding


def mask_padding(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Part logits [B, L, 2] into those of starts and ends [B, L], low at padding."""
    real = batch["attention_mask"][..., None] > 0
    logits = jnp.where(real, logits, HIDDEN)
    return logits[..., 0], logits[..., 1]


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Score start_positions and end_positions i32 [B]: the mean of both losses."""
    starts, ends = mask_padding(logits, batch)
    rows = row_weights(batch)
    start = cross_entropy(starts, batch["start_positions"], rows)
    end = cross_entropy(ends, batch["end_positions"], rows)
    return Sum((start.value + end.value) / 2, start.weight)


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return `start_logits` and `end_logits` f32 [B, L], for tasks/types/span.py."""
    starts, ends = mask_padding(logits, batch)
    return {"start_logits": starts, "end_logits": ends}


def make_head() -> Head:
    place = "B", jnp.int32
    labels = arrays(start_positions=place, end_positions=place)
    how = dict(of_tokens=True, dropout=False)
    return make_task_head("span", 2, loss, outputs, labels, **how)

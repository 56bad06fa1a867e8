# SPDX-License-Identifier: Apache-2.0
"""The span of a row that answers it: a start and an end (Devlin et al. 2019, section
4.2). A row without an answer points at its first token, [CLS], twice (section 4.3)."""

import functools

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.classify import row_weights
from bertjax.objectives.losses import cross_entropy

HIDDEN = -1e9  # the logit of padding


def logits(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return f32 logits of starts and of ends, each [B, L], over the real tokens."""
    scores = heads.task_logits(params["span"], cfg, encoded.hidden)  # [B, L, 2]
    real = batch["attention_mask"][..., None] > 0
    scores = jnp.where(real, scores, HIDDEN)
    return scores[..., 0], scores[..., 1]


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of rows, f32 []."""
    return {"span_loss": jnp.sum(row_weights(batch))}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score start_positions and end_positions i32 [B]: the mean of both losses."""
    starts, ends = logits(params, cfg, encoded, batch)
    rows = row_weights(batch)
    start = cross_entropy(starts, batch["start_positions"], rows)
    end = cross_entropy(ends, batch["end_positions"], rows)
    return {"span_loss": Sum((start.value + end.value) / 2, start.weight)}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return `start_logits` and `end_logits` f32 [B, L], for tasks/answer_spans.py."""
    starts, ends = logits(params, cfg, encoded, batch)
    return {"start_logits": starts, "end_logits": ends}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name the start_positions and end_positions [B] of a batch."""
    place = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return {"start_positions": place, "end_positions": place}


def make_head() -> Head:
    return Head(
        "span",
        functools.partial(heads.init_task, classes=2),
        weights,
        sums,
        reads=EVERYWHERE,
        task_type="span",
        outputs=outputs,
        labels=labels,
    )

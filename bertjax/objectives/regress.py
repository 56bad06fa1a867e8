# SPDX-License-Identifier: Apache-2.0
"""A score of a row by its pooled vector: squared error (google-research/bert)."""

import functools

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import NOWHERE, Batch, Head, Sum
from bertjax.objectives.classify import logits, row_weights


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of rows, f32 []."""
    return {"regress_loss": jnp.sum(row_weights(batch))}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score the labels f32 [B]."""
    scores = logits("regress", params, cfg, encoded, rng)[:, 0]
    rows = row_weights(batch)
    error = jnp.square(scores - batch["labels"])
    return {"regress_loss": Sum(jnp.sum(rows * error), jnp.sum(rows))}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return the `scores` f32 [B]."""
    return {"scores": logits("regress", params, cfg, encoded)[:, 0]}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name the labels [B] of a batch."""
    return {"labels": jax.ShapeDtypeStruct((rows,), jnp.float32)}


def make_head() -> Head:
    return Head(
        "regress",
        functools.partial(heads.init_task, classes=1),
        weights,
        sums,
        task_type="regress",
        reads=NOWHERE,
        pooled=True,
        outputs=outputs,
        labels=labels,
    )

# SPDX-License-Identifier: Apache-2.0
"""Classification of a row by its pooled vector (Devlin et al. 2019, section 4.1)."""

import functools

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params, fold_in
from bertjax.objectives.base import NOWHERE, Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy

KEY = 2**20  # of the head's dropout: no layer has that number


def row_weights(batch: Batch) -> jax.Array:
    """Return 1 for each row, f32 [B]; rows that fill up a last batch weigh 0."""
    rows = batch["input_ids"].shape[:1]
    return batch.get("example_weights", jnp.ones(rows, jnp.float32))


def logits(
    name: str,
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Return f32 logits [B, C] of the pooled vector."""
    return heads.task_logits(params[name], cfg, encoded.pooled, fold_in(rng, KEY))


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of rows, f32 []."""
    return {"classify_loss": jnp.sum(row_weights(batch))}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score the labels i32 [B]."""
    scores = logits("classify", params, cfg, encoded, rng)
    return {"classify_loss": cross_entropy(scores, batch["labels"], row_weights(batch))}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return the `scores` f32 [B, C] of the classes."""
    return {"scores": logits("classify", params, cfg, encoded)}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name the labels [B] of a batch."""
    return {"labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}


def make_head(classes: int = 2) -> Head:
    return Head(
        "classify",
        functools.partial(heads.init_task, classes=classes),
        weights,
        sums,
        task_type="classify",
        reads=NOWHERE,
        pooled=True,
        outputs=outputs,
        labels=labels,
    )

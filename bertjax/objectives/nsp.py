# SPDX-License-Identifier: Apache-2.0
"""Next-sentence prediction: does B follow A (0) or not (1); Devlin et al. 2019."""

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy


def row_weights(batch: Batch) -> jax.Array:
    """Return 1 for each real row, f32 [B]; evaluation pads with rows of weight 0."""
    labels = batch["nsp_labels"]
    return batch.get("example_weights", jnp.ones(labels.shape, jnp.float32))


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of pairs, f32 []."""
    return {"nsp_loss": jnp.sum(row_weights(batch))}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score nsp_labels i32 [B] by the pooled vector."""
    logits = heads.pair_logits(params["nsp"], encoded.pooled)
    args = (logits, batch["nsp_labels"], row_weights(batch))
    return {"nsp_loss": cross_entropy(*args), "nsp_accuracy": accuracy(*args)}


def make_head() -> Head:
    return Head(
        "nsp", heads.init_pair, weights, sums, needs=frozenset({"nsp"}), pooled=True
    )

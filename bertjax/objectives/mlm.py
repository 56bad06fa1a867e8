# SPDX-License-Identifier: Apache-2.0
"""Masked language modelling at the predicted positions only (Devlin et al. 2019)."""

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of predicted positions, f32 []."""
    return {"mlm_loss": jnp.sum(batch["mlm_weights"])}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score mlm_ids at mlm_positions [B, P]; rows of weight 0 count for nothing."""
    logits = heads.mlm_logits(
        params["mlm"],
        params["encoder"]["embeddings"]["word"],
        cfg,
        encoded.hidden,
        batch["mlm_positions"],
    )
    with jax.named_scope("mlm_loss"):
        return {
            "mlm_loss": cross_entropy(logits, batch["mlm_ids"], batch["mlm_weights"]),
            "mlm_accuracy": accuracy(logits, batch["mlm_ids"], batch["mlm_weights"]),
        }


def make_head() -> Head:
    return Head("mlm", heads.init_mlm, weights, sums, needs=frozenset({"mlm"}))

# SPDX-License-Identifier: Apache-2.0
"""A two-way head on the pooled vector: is a pair of segments in order (0) or not (1)?

The host makes the pairs (sequences/sentence_pairs.py). A pair that is not in order has
a random partner (next-sentence prediction) or swapped segments (sentence-order
prediction).
"""

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.objectives.base import NOWHERE, Batch, Head
from bertjax.objectives.metrics import loss_and_accuracy


def pair_weights(name: str, batch: Batch) -> jax.Array:
    """Return 1 for each pair, f32 [B], or [B, S] in packed rows.

    Rows that pad the last batch of an evaluation, and unused slots, have weight 0.
    """
    labels = batch[f"{name}_labels"]
    weights = batch.get("cls_weights", jnp.ones(labels.shape, jnp.float32))
    if "example_weights" in batch:
        rows = batch["example_weights"]
        weights = weights * rows.reshape(-1, *(1,) * (labels.ndim - 1))
    return weights


def make_pair_head(name: str) -> Head:
    """Make the head of a pair rule, "nsp" or "sop".

    It predicts `<name>_labels` i32 [B] or [B, S] from the pooled vectors [B, D] or
    [B, S, D].
    """

    def sums(params, cfg, encoded, batch, rng):
        logits = heads.class_logits(params[name], encoded.pooled)
        args = logits, batch[f"{name}_labels"], pair_weights(name, batch)
        return loss_and_accuracy(name, *args)

    return Head(
        name,
        heads.init_classes,
        lambda batch: {f"{name}_loss": jnp.sum(pair_weights(name, batch))},
        sums,
        reads=NOWHERE,
        needs=frozenset({name}),
        pooled=True,
    )

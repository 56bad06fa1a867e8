# SPDX-License-Identifier: Apache-2.0
"""Metrics as (sum, weight), like losses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Sum
from bertjax.objectives.losses import check_shapes, cross_entropy, logits_of
from bertjax.parallel.sharding import constrain

# The number and width of the bins that count logits; the outermost bins also count the
# logits beyond them.
BINS, WIDTH = 200, 0.1


def accuracy(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> Sum:
    """Sum the weights of right predictions; shapes as in losses.cross_entropy.

    A prediction is right if no logit is above the true token's; this saves the argmax
    over V. Exact ties count as right.
    """
    check_shapes(logits, ids, weights)
    right = logits_of(logits, ids) >= jnp.max(logits, axis=-1)
    return Sum(jnp.sum(weights * right), jnp.sum(weights))


def loss_and_accuracy(
    name: str, logits: jax.Array, ids: jax.Array, weights: jax.Array
) -> dict[str, Sum]:
    """Return `<name>_loss`, in nats, and `<name>_accuracy`."""
    args = logits, ids, weights
    return {f"{name}_loss": cross_entropy(*args), f"{name}_accuracy": accuracy(*args)}


def nats_and_right(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return -ln p of each id, f32 [...], and whether its logit is the largest, bool.

    logits f32 [..., V], ids i32 [...].
    """
    true = logits_of(logits, ids)
    return jax.nn.logsumexp(logits, axis=-1) - true, true >= jnp.max(logits, axis=-1)


class Ranking(NamedTuple):
    """The numbers of positive and negative examples per bin of logits, f32 [BINS].

    The lowest bin is first. Like a Sum, it adds up over devices, micro-batches and
    batches.
    """

    positive: jax.Array
    negative: jax.Array

    def mean(self) -> Any:
        """Return the AUC: the share of (positive, negative) pairs in the right order.

        A pair within one bin counts one half, so the error is at most half the share of
        such pairs. The AUC is 0 without pairs. Works for jax and numpy arrays.
        """
        below = self.negative.cumsum() - self.negative
        ordered = (self.positive * (below + 0.5 * self.negative)).sum()
        pairs = self.positive.sum() * self.negative.sum()
        return ordered / (pairs + (pairs == 0))


class Share(NamedTuple):
    """A sum and its weight, f32 [] each, like Sum; the mean is 0 if the weight is 0."""

    value: jax.Array
    weight: jax.Array

    def mean(self) -> Any:
        """Return the quotient. Works for jax and numpy arrays."""
        return self.value / (self.weight + (self.weight == 0))


def binary_metrics(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, Sum | Ranking | Share]:
    """Measure predictions (logit > 0) of boolean labels; all arrays have one shape.

    Returns accuracy; precision, 0 if nothing is predicted positive; recall, 0 if no
    label is positive; auc, which needs no threshold; positive, the share of positive
    labels.
    """
    guessed, true = logits > 0, labels
    with jax.named_scope("auc"):
        at = jnp.floor(logits / WIDTH) + BINS // 2
        is_in_bin = jnp.clip(at, 0, BINS - 1)[..., None] == jnp.arange(BINS)
        axes = tuple(range(logits.ndim))

        def count(chosen: jax.Array) -> jax.Array:
            counted = jnp.where(is_in_bin, (weights * chosen)[..., None], 0.0)
            return constrain(jnp.sum(counted, axis=axes), "bins")

        ranking = Ranking(count(true), count(~true))

    def share(part: jax.Array, whole: jax.Array) -> Sum:
        return Sum(jnp.sum(weights * (part & whole)), jnp.sum(weights * whole))

    return {
        "accuracy": share(guessed == true, jnp.full_like(true, True)),
        "precision": Share(*share(true, guessed)),
        "recall": Share(*share(guessed, true)),
        "auc": ranking,
        "positive": share(true, jnp.full_like(true, True)),
    }

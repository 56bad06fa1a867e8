# SPDX-License-Identifier: Apache-2.0
"""Metrics as (sum, weight), like losses."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Sum
from bertjax.objectives.losses import check_shapes


def accuracy(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> Sum:
    """Sum the weights of right first guesses; shapes as in losses.cross_entropy.

    A guess is right when no logit is above the true one's, which spares the argmax
    over V; exact ties count as right.
    """
    check_shapes(logits, ids, weights)
    true = jnp.take_along_axis(logits, ids[..., None], axis=-1, mode="clip")[..., 0]
    right = true >= jnp.max(logits, axis=-1)
    return Sum(jnp.sum(weights * right), jnp.sum(weights))

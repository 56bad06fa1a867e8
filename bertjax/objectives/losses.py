# SPDX-License-Identifier: Apache-2.0
"""Losses as (sum, weight): the division by the global weight happens once, later."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Sum


def cross_entropy(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> Sum:
    """Sum weighted negative log-likelihoods, in nats.

    logits f32 [..., V]; ids i32 [...]; weights f32 [...]. Ids must be in range where
    the weight is not 0.
    """
    check_shapes(logits, ids, weights)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    norm = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
    true = jnp.take_along_axis(logits, ids[..., None], axis=-1, mode="clip")[..., 0]
    return Sum(jnp.sum(weights * (norm - true)), jnp.sum(weights))


def z_loss_of(logits: jax.Array, weights: jax.Array) -> Sum:
    """Sum the weighted squares of ln of the sum of exp(logits), which keeps it near 0.

    Shapes as in `cross_entropy`. (Chowdhery et al. 2022, PaLM, section 5.)
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    return Sum(jnp.sum(weights * norm**2), jnp.sum(weights))


def binary_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> Sum:
    """Sum weighted negative log-likelihoods of labels 0 and 1, in nats.

    logits, weights f32, labels of any type, all of one shape.
    """
    y = labels.astype(logits.dtype)
    # log(1 + exp(x)) - x y, without overflow
    loss = jnp.maximum(logits, 0) - logits * y + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    check_shapes(logits[..., None], labels, weights)
    return Sum(jnp.sum(weights * loss), jnp.sum(weights))


def check_shapes(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> None:
    """Refuse shapes that would only fit by broadcasting."""
    if not logits.shape[:-1] == ids.shape == weights.shape:
        raise ValueError(f"shapes {logits.shape}, {ids.shape}, {weights.shape} differ")

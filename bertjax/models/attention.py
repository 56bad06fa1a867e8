# SPDX-License-Identifier: Apache-2.0
"""Attention and its mask; every backend sees the mask through one seam."""

import jax
import jax.numpy as jnp

from bertjax.models.layers import dropout


def attention_mask(attention_mask: jax.Array) -> jax.Array:
    """Turn [B, L] real-token flags into a boolean mask that broadcasts to [B, H, L, L].

    True where a query may look at a key. Queries that are padding look at the real
    keys too, so no row has every key hidden (their results are never used).
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {attention_mask.shape}, not [B, L]")
    return (attention_mask > 0)[:, None, None, :]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    rate: float,
    rng: jax.Array | None,
) -> jax.Array:
    """Mix values by scaled dot products (Vaswani et al. 2017, equation 1).

    q, k, v: [B, L, H, K]; mask: boolean, broadcasts to [B, H, L, L]; result
    [B, L, H, K]. Softmax in f32 whatever the dtype of q. The division by its sum
    happens on the result, which is smaller than the scores: dropout and the product
    with v are linear.
    """
    with jax.named_scope("scores"):
        q = q * (q.shape[-1] ** -0.5)
        scores = jnp.einsum("BQHK,BTHK->BHQT", q, k).astype(jnp.float32)
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
        peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1).swapaxes(1, 2)[..., None]  # [B, L, H, 1]
    with jax.named_scope("context"):
        weights = dropout(weights.astype(q.dtype), rate, rng)
        y = jnp.einsum("BHQT,BTHK->BQHK", weights, v)
        return (y / total).astype(q.dtype)

# SPDX-License-Identifier: Apache-2.0
"""Attention and its mask; every backend sees the mask through one seam."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.layers import dropout


def attention_mask(
    attention_mask: jax.Array, segment_ids: jax.Array | None = None, window: int = 0
) -> jax.Array:
    """Say where a query may look at a key: boolean, broadcasts to [B, H, L, L].

    attention_mask i32 [B, L], 1 = real. Queries that are padding look at the real keys
    too, so no row has every key hidden (their results are never used).
    With segment_ids i32 [B, L] (packed rows; 0 = padding) a query sees the keys of its
    own sequence alone, and padding sees padding. With a window a query sees the keys
    at most window // 2 places away, and itself, padding or not.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {attention_mask.shape}, not [B, L]")
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    else:
        mask = (attention_mask > 0)[:, None, None, :]
    if not window:
        return mask
    at = np.arange(attention_mask.shape[1])
    away = np.abs(at[:, None] - at)
    return (mask & (away <= window // 2)) | (away == 0)


Rotation = tuple[jax.Array, jax.Array]


def rotation(positions: jax.Array, width: int, theta: float) -> Rotation:
    """Return cosine and sine, f32 [..., L, 1, width / 2], of rotary positions.

    positions i32 [..., L]; position m turns pair i by m theta^(-2i / width) (Su et al.
    2021, RoFormer, section 3.2.2).
    """
    rates = 1.0 / (theta ** (np.arange(0, width, 2) / width)).astype(np.float32)
    angles = positions[..., None, None].astype(jnp.float32) * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Turn the pairs (i, i + K/2) of x [B, L, H, K] by the angles of `turn`."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


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

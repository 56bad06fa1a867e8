# SPDX-License-Identifier: Apache-2.0
"""Which token looks at which: the attention's weights, to be looked at."""

import jax
import jax.numpy as jnp

from bertjax.models import encoder, stacked_layers
from bertjax.models.attention import AttentionMask, attend, rotate
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, linear


def weights(q: jax.Array, k: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return the weights of `attend`, f32 [B, H, L, L]; each row sums to 1.

    q, k: [B, L, H, K]. They are what it makes of values that are a one, each at its
    own place.
    """
    b, length, heads, _ = q.shape
    own = jnp.broadcast_to(jnp.eye(length)[:, None], (b, length, heads, length))
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    return attend(q, k, own, mask, 0.0, None).swapaxes(1, 2)


def attention_maps(
    params: Params, cfg: EncoderConfig, batch: dict[str, jax.Array]
) -> jax.Array:
    """Return the weights in all layers, f32 [N, B, H, L, L], without dropout.

    params: the encoder's, layers stacked; batch: as `encoder.apply` takes it.
    """
    params = stacked_layers.unstack(params, cfg)
    x = encoder.embed(params["embeddings"], cfg, batch).astype(cfg.dtype)
    if cfg.embedding_size:
        x = linear(params["embeddings"]["projection"], x)
    b, length, d = x.shape
    views = encoder.make_views(cfg, batch)
    maps = []
    for group, every in zip(cfg.groups, cfg.is_global, strict=True):
        layer, view = params["layers"][group], views[0 if every else -1]
        flat = x.reshape(b * length, d)
        q, k, _ = (
            y.reshape(b, length, cfg.num_attention_heads, cfg.head_dim)
            for y in encoder.queries_keys_values(layer["attention"], cfg, flat, {})
        )
        if view.turn is not None:
            q, k = rotate(q, view.turn), rotate(k, view.turn)
        maps.append(weights(q, k, view.mask))
        x = encoder.apply_layer(layer, cfg, x, (view,), None, {})
    return jnp.stack(maps)

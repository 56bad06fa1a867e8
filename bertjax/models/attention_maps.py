# SPDX-License-Identifier: Apache-2.0
"""Attention maps: the weights by which each token attends to the others."""

import jax
import jax.numpy as jnp

from bertjax.models.attention import attend
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import apply_rope, embed
from bertjax.models.layers import Params
from bertjax.models.skips import Earlier, result_for
from bertjax.models.stacked_layers import unstack
from bertjax.models.transformer_layer import (
    apply_layer,
    first_values,
    layer_vectors,
    make_attention_inputs,
)


def weights(q: jax.Array, k: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return the attention weights of `attend`, f32 [B, H, L, L]; each row sums to 1.

    q, k: [B, L, H, K]. `attend` returns the weights themselves if the values are the
    identity matrix.
    """
    b, length, heads, _ = q.shape
    own = jnp.broadcast_to(jnp.eye(length)[:, None], (b, length, heads, length))
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    return attend(q, k, own, mask, 0.0, None).swapaxes(1, 2)


def attention_maps(
    params: Params, cfg: EncoderConfig, batch: dict[str, jax.Array]
) -> jax.Array:
    """Return the weights of all layers, f32 [N, B, H, L, L], without dropout.

    params: the encoder's, layers stacked; batch: as for `encoder.apply`.
    """
    params = unstack(params, cfg)
    x = embed(params["embeddings"], cfg, batch)
    shape = (*x.shape[:2], cfg.num_attention_heads, cfg.head_dim)
    inputs = make_attention_inputs(params["embeddings"], cfg, batch)
    values = first_values(params["layers"][0], cfg, x) if cfg.value_skip else None
    shared = Earlier(x if cfg.embedding_skip else None, values)
    maps, results = [], []
    for i, (group, is_global) in enumerate(zip(cfg.groups, cfg.is_global, strict=True)):
        layer, own = params["layers"][group], inputs[0 if is_global else -1]
        earlier = shared._replace(result=result_for(cfg, i, results))
        vectors = layer_vectors(layer, cfg, x, earlier)
        q, k = (vectors[name].reshape(shape) for name in ("query", "key"))
        if own.rope is not None:
            q, k = apply_rope(q, own.rope), apply_rope(k, own.rope)
        maps.append(weights(q, k, own.mask))
        x, _ = apply_layer(layer, cfg, x, (own,), None, {}, earlier=earlier)
        results.append(x)
    return jnp.stack(maps)

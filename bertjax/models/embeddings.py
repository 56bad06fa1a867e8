# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens, and positions: a learned table or rotary ones."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import (
    Params,
    dropout,
    fold_in,
    layer_norm,
    linear,
    lookup,
    take_at,
)
from bertjax.parallel.sharding import constrain


def embed(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> jax.Array:
    """Return what the first layer reads, [B, L, D] in cfg.dtype; rng: the encoder's.

    Word, position and token type embeddings are added up in f32 [B, L, E]. inputs: [B,
    L, E] in the place of the word embeddings; None: those of input_ids.
    """
    if inputs is None:
        x = lookup(params["word"], batch["input_ids"])
    else:
        x = inputs.astype(jnp.float32)
    if cfg.position_embedding_type == "absolute":
        offset = cfg.position_offset
        table = params["position"][offset:] if offset else params["position"]
        if "position_ids" in batch:
            x = x + lookup(table, batch["position_ids"])
        else:
            x = x + table[: x.shape[1]].astype(jnp.float32)
    if cfg.type_vocab_size:
        # Without token types in the batch everything is of type 0.
        x = x + (
            lookup(params["token_type"], batch["token_type_ids"])
            if "token_type_ids" in batch
            else params["token_type"][0].astype(jnp.float32)
        )
    if cfg.embedding_norm:
        x = layer_norm(params["norm"], x, cfg.layer_norm_eps, cfg.norm_type)
    rng = fold_in(rng, cfg.num_hidden_layers)
    x = dropout(x, cfg.hidden_dropout_prob, rng).astype(cfg.dtype)
    if cfg.embedding_size:
        x = linear(params["projection"], x)
    return constrain(x, "batch length embed")


Rope = tuple[jax.Array, jax.Array]


def rope_angles(positions: jax.Array, width: int, theta: float) -> Rope:
    """Return cosine and sine, f32 [..., L, 1, width / 2], of rotary positions.

    positions i32 [..., L]; at position m pair i is rotated by m theta^(-2i / width)
    (Su et al. 2021, RoFormer, section 3.2.2).
    """
    rates = 1.0 / (theta ** (np.arange(0, width, 2) / width)).astype(np.float32)
    angles = positions[..., None, None].astype(jnp.float32) * rates
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the pairs (i, i + K/2) of x [B, L, H, K] by the angles of `rope`."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def take_rope(rope: Rope, at: jax.Array | None) -> Rope:
    """Take the angles at positions `at` i32 [B, P], all where it is None."""
    if at is None:
        return rope
    cos, sin = (x if x.ndim == 4 else x[None] for x in rope)
    shape = (len(at), *cos.shape[1:])
    return tuple(take_at(jnp.broadcast_to(x, shape), at) for x in (cos, sin))

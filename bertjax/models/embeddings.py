# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens, and positions: a learned table, rotary or relative ones."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.config import EncoderConfig, read_id_streams
from bertjax.models.layers import (
    Params,
    Rng,
    count_up,
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
    rng: Rng = None,
    inputs: jax.Array | None = None,
) -> jax.Array:
    """Return the input of the first layer, [B, L, D] in cfg.dtype; rng: the encoder's.

    Embeddings of words, positions, token types and streams of ids ({name}_ids in the
    batch, i32 [B, L]) are summed in f32 [B, L, E]. inputs: [B, L, E], used instead of
    the word embeddings of input_ids; or None.
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
    tables = [("token_type", params["token_type"])] if cfg.type_vocab_size else []
    tables += [(k, params["streams"][k]) for k in read_id_streams(cfg.id_streams)]
    for name, table in tables:
        ids = batch.get(f"{name}_ids")  # if the batch has none, all are 0
        x = x + (table[0].astype(jnp.float32) if ids is None else lookup(table, ids))
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


def apply_rope(x: jax.Array, rope: Rope, by_product: bool = False) -> jax.Array:
    """Rotate the pairs (i, i + K/2) of x [B, L, H, K] by the angles of `rope`.

    by_product: swap the halves of a head by a product with a matrix of 0, 1 and -1,
    with the same result. It is for TPUs, which pad slices of fewer than 128 numbers:
    by the compiler's estimate it saves 3% of the cycles of a step of modern.py:base.
    """
    cos, sin = rope
    if by_product:
        half = x.shape[-1] // 2
        turn = np.kron([[0, 1], [-1, 0]], np.eye(half)).astype(x.dtype)
        how = "highest" if x.dtype == jnp.float32 else None
        turned = jnp.dot(x, turn, precision=how, preferred_element_type=jnp.float32)
        cos, sin = (jnp.concatenate([y, y], -1) for y in rope)
        return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def take_rope(rope: Rope, at: jax.Array | None) -> Rope:
    """Select the angles at positions `at` i32 [B, P]; None selects all."""
    if at is None:
        return rope
    cos, sin = (x if x.ndim == 4 else x[None] for x in rope)
    shape = (len(at), *cos.shape[1:])
    return tuple(take_at(jnp.broadcast_to(x, shape), at) for x in (cos, sin))


def relative_buckets(cfg: EncoderConfig) -> np.ndarray:
    """Return the bucket of a key at offset i, i32 [2 M + 1] for i = -M, ..., M.

    M is cfg.relative_attention_max_distance; farther keys are in the buckets of M. Half
    of a side's buckets hold one distance each; the widths of the others grow
    geometrically (Raffel et al. 2020, T5, section 2.1). An encoder uses half of the
    buckets for keys before a query and half for keys after it; a decoder uses all of
    them for keys before it.

        buckets=8, max_distance=6   i  -6 -5 -4 -3 -2 -1  0  1  2  3  4  5  6
        an encoder                      3  3  3  2  2  1  0  5  6  6  7  7  7
        a decoder                       7  6  4  3  2  1  0  0  0  0  0  0  0
    """
    most = cfg.relative_attention_max_distance
    side = cfg.relative_attention_num_buckets // (1 if cfg.is_decoder else 2)
    exact = side // 2
    away = np.arange(most + 1)
    # Compute in float32, as T5's code does: rounding decides at the edges of buckets.
    ratio = np.maximum(away, 1).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(np.log(most / exact)) * np.float32(side - exact)
    far = np.minimum(exact + growth.astype(np.int64), side - 1)
    behind = np.where(away < exact, away, far)
    after = 0 * behind[1:] if cfg.is_decoder else side + behind[1:]
    return np.concatenate([behind[::-1], after]).astype(np.int32)


def relative_bias(
    table: jax.Array,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    length: int,
    slots: jax.Array | None = None,
) -> jax.Array:
    """Return the biases of scores, f32 [1, H, L, L], or [B, H, L, L] by position_ids.

    table: [buckets, H]. In packed rows without attention_steps positions count up
    within each sequence, so offsets in the row equal those of position_ids, which are
    not read then. slots: i32 [B, P], the slots of the queries; the result is [B, H, P,
    L] then.
    """
    positions = batch.get("position_ids")
    if "segment_ids" in batch and "attention_steps" not in batch:
        positions = None
    if positions is None:
        positions = count_up(length)[None]
    queries = positions if slots is None else slots
    most = cfg.relative_attention_max_distance
    away = positions[:, None, :] - queries[:, :, None]
    buckets = jnp.asarray(relative_buckets(cfg))[jnp.clip(away, -most, most) + most]
    return jnp.moveaxis(lookup(table, buckets), -1, 1)

# SPDX-License-Identifier: Apache-2.0
"""The key-value cache of decoding, in arrays of fixed size.

The number of slots ("room") is fixed when a cache is created, so one compiled program
extends it until it is full. Each row has its own number of tokens: the keys of a new
token are written where that row ends, over the padding of its prompt.

Each layer has its own arrays, with heads before slots. So each step of a base model's
decoder took 35 ms on a CPU, against 175 ms with one array [layers, rows, slots, heads,
K], which the matrix products had to copy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.attention import device_kind
from bertjax.models.config import EncoderConfig


class LayerCache(NamedTuple):
    """The cached keys and values of one layer, in the dtype of `cache_dtype`.

    key, value: [B, H, room, K], rotary positions applied. memory_key, memory_value:
    [B, H, S, K], those of the cross-attention to the encoder's output; None until it
    has run, or without a cross-attention.
    """

    key: jax.Array
    value: jax.Array
    memory_key: jax.Array | None = None
    memory_value: jax.Array | None = None


class Cache(NamedTuple):
    """The state that decoding continues from; axis 0 of each array is the batch's.

    layers: one LayerCache per layer. segments: i32 [B, room], 1 = a token, 0 = none
    yet. steps: i32 [B, room] as attention_mask.py reads them, None in a causal model.
    index: i32 [B], the number of tokens in each row, which is the slot of its next one.
    memory_segments: i32 [B, S], 1 = a token of the encoder, or None. more: for prompts
    with further arrays, i32 [B] each: `position_ids` is the difference between a
    token's position and its slot; the others (token types, streams of ids) are the ids
    of all new tokens.
    """

    layers: tuple[LayerCache, ...]
    segments: jax.Array
    steps: jax.Array | None
    index: jax.Array
    memory_segments: jax.Array | None = None
    more: dict[str, jax.Array] | None = None

    @property
    def room(self) -> int:
        """The number of tokens that a row can hold."""
        return self.segments.shape[1]


def cache_dtype(cfg: EncoderConfig) -> str:
    """Return the dtype of cached keys and values: the model's, but f32 on a CPU.

    XLA's CPU compiler multiplies a single query with keys in bfloat16 several times
    more slowly than in f32 (docs/benchmarks.md, "bfloat16 on a CPU").
    """
    on_cpu = (device_kind() or jax.default_backend()) == "cpu"
    return "float32" if on_cpu else cfg.dtype


def init_layers(cfg: EncoderConfig, rows: int, room: int) -> tuple[LayerCache, ...]:
    """Create an empty cache for each layer of cfg."""
    shape = (rows, cfg.num_attention_heads, room, cfg.head_dim)
    empty = jnp.zeros(shape, cache_dtype(cfg))
    return (LayerCache(empty, empty),) * cfg.num_hidden_layers


def keep_memory(cache: LayerCache, key: jax.Array, value: jax.Array) -> LayerCache:
    """Store the memory's keys and values, [B, S, H, K], in the dtype of the others."""
    key, value = (x.swapaxes(1, 2).astype(cache.key.dtype) for x in (key, value))
    return cache._replace(memory_key=key, memory_value=value)


def write(
    cache: LayerCache, key: jax.Array, value: jax.Array, slots: jax.Array | None
) -> LayerCache:
    """Write keys and values [B, n, H, K] of tokens into their slots, i32 [B, n].

    slots: None for the first n. Tokens with slots beyond the room are dropped.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if slots is None:
            return old.at[:, :, : new.shape[1]].set(new.swapaxes(1, 2))
        rows = jnp.arange(len(old))[:, None]
        return old.at[rows, :, slots].set(new, mode="drop")

    return cache._replace(key=put(cache.key, key), value=put(cache.value, value))

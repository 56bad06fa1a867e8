# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens so far, in arrays that do not grow.

The room is fixed when a cache is made, so that one compiled program extends it as long
as there is some. Each row has its own number of tokens: the keys of a new one are
written where that row ends, over what stood there (padding of its prompt).

An array a layer, heads before slots: each step of a base model's decoder on a CPU took
35 ms so, 175 ms with [layers, rows, slots, heads, K], which the products had to copy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig


class LayerCache(NamedTuple):
    """What a layer's attention has seen so far; all in the dtype of the model.

    key, value: [B, H, room, K], rotary positions applied. memory_key, memory_value:
    [B, H, S, K], the cross-attention's of what the encoder made, None without one.
    """

    key: jax.Array
    value: jax.Array
    memory_key: jax.Array | None = None
    memory_value: jax.Array | None = None


class Cache(NamedTuple):
    """What decoding goes on from; each array has a row of the batch on axis 0.

    layers: one LayerCache each. segments: i32 [B, room], 1 = a token, 0 = none yet.
    steps: i32 [B, room] as attention_mask.py reads them, None in a causal model. index:
    i32 [B], the tokens so far of each row, which is the slot of its next one.
    memory_segments: i32 [B, S], 1 = a token of the encoder's, or None. more: of prompts
    with arrays beside these, i32 [B] each: `position_ids` how far a token's position is
    from its slot, and token types and streams of ids those of all new tokens.
    """

    layers: tuple[LayerCache, ...]
    segments: jax.Array
    steps: jax.Array | None
    index: jax.Array
    memory_segments: jax.Array | None = None
    more: dict[str, jax.Array] | None = None

    @property
    def room(self) -> int:
        """How many tokens a row may have."""
        return self.segments.shape[1]


def init_layers(cfg: EncoderConfig, rows: int, room: int) -> tuple[LayerCache, ...]:
    """Make caches without tokens for each layer of cfg."""
    shape = (rows, cfg.num_attention_heads, room, cfg.head_dim)
    empty = jnp.zeros(shape, cfg.dtype)
    return (LayerCache(empty, empty),) * cfg.num_hidden_layers


def write(
    cache: LayerCache, key: jax.Array, value: jax.Array, slots: jax.Array | None
) -> LayerCache:
    """Put keys and values [B, n, H, K] of tokens into their slots, i32 [B, n].

    slots: None for the first n. What has no slot in the room is lost.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if slots is None:
            return old.at[:, :, : new.shape[1]].set(new.swapaxes(1, 2))
        rows = jnp.arange(len(old))[:, None]
        return old.at[rows, :, slots].set(new, mode="drop")

    return cache._replace(key=put(cache.key, key), value=put(cache.value, value))

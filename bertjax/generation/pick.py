# SPDX-License-Identifier: Apache-2.0
"""Selection of the next token from its logits: greedy, or by sampling.

Sampling takes the largest sum of logit and Gumbel noise (Gumbel 1954). The noise is a
hash of (seed, row, sample, step) only, so it is the same in any batch, with any padding
and on any devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NEG_INF = -jnp.inf


class Pick(NamedTuple):
    """How a token is selected.

    temperature: logits are divided by it before sampling; 0: the most likely token is
    selected. top_k: only this many of the most likely tokens are sampled; 0: all.
    top_p: only the most likely tokens whose probabilities add up to it are sampled
    (Holtzman et al. 2020, nucleus sampling). repetition_penalty: logits of tokens that
    occurred before are divided by it, or multiplied if they are negative (Keskar et al.
    2019, CTRL, section 4.1); 1: no penalty. The order is that of transformers: penalty,
    temperature, top_k, top_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0


GREEDY = Pick()


def pick_tokens(
    pick: Pick, logits: jax.Array, keys: jax.Array | None, seen: jax.Array | None = None
) -> jax.Array:
    """Select a token for each row of logits [..., V]: i32 [...].

    keys: from `draw_keys`, [...]; None without sampling. seen: bool [..., V], the
    tokens that occurred before; None without a penalty.
    """
    if seen is not None:
        logits = penalize(logits, seen, pick.repetition_penalty)
    if pick.draws:
        logits = keep_likely(logits / pick.temperature, pick.top_k, pick.top_p)
        logits = logits + gumbel(keys, logits.shape[-1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def penalize(scores: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Lower the scores [..., V] of seen tokens, bool [..., V].

    For the scores 2, -1, 3, with the first two seen and a penalty of 2: 1, -2, 3.
    """
    less = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, less, scores)


def keep_likely(logits: jax.Array, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Set all logits [..., V] to -inf except for the most likely tokens.

    Tokens as likely as the last one of top_k or top_p are kept too.

    For the probabilities 0.5, 0.3, 0.15, 0.05 and a top_p of 0.7 the first two are
    kept: the sum before the second is 0.5, less than 0.7, and before the third 0.8.
    """
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, NEG_INF, logits)
    if top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        likely = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(likely, axis=-1) - likely
        # The first token is kept whatever top_p is.
        kept = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True), 1)
        least = jnp.take_along_axis(falling, kept - 1, axis=-1)
        logits = jnp.where(logits < least, NEG_INF, logits)
    return logits


def draw_keys(seed: jax.Array | int, *parts: Any) -> jax.Array:
    """Return a key of jax.random for each tuple (seed, *parts).

    parts: integers, or broadcastable arrays of integers; the keys have their shape.
    """
    start = jax.random.key(seed, impl="threefry2x32")
    arrays = jnp.broadcast_arrays(*(jnp.asarray(p, jnp.uint32) for p in parts))
    shape = arrays[0].shape

    def fold(*numbers: jax.Array) -> jax.Array:
        key = start
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    return jax.vmap(fold)(*(x.ravel() for x in arrays)).reshape(shape)


def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Return Gumbel noise for each key [...]: f32 [..., size]."""

    def draw(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, (size,), jnp.uint32)
        # The middle of one of 2^23 bins: never 0, never 1.
        return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23

    uniform = jax.vmap(draw)(keys.ravel()).reshape(*keys.shape, size)
    return -jnp.log(-jnp.log(uniform))


def is_end(tokens: jax.Array, ends: Sequence[int]) -> jax.Array:
    """Return which tokens end a text: bool, of the shape of tokens."""
    return jnp.isin(tokens, jnp.array(ends, jnp.int32)) if ends else tokens < 0


def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mark tokens i32 [B, n] in `seen`, bool [B, V]; negative ones are ignored."""
    rows = jnp.arange(len(seen))[:, None]
    places = jnp.where(tokens < 0, seen.shape[1], tokens)
    return seen.at[rows, places].set(True, mode="drop")

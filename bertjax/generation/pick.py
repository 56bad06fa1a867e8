# SPDX-License-Identifier: Apache-2.0
"""How the next token is picked from its logits: the likeliest, or one that is drawn.

A draw is the largest sum of logit and Gumbel noise (Gumbel 1954), and the noise is a
hash of (seed, row, sample, step) alone: the same in any batch, however it is padded and
wherever it lies on devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NEVER = -jnp.inf


class Pick(NamedTuple):
    """What a token is picked by.

    temperature: logits are divided by it before a draw; 0: the likeliest token is
    taken, without a draw. top_k: only so many of the likeliest are drawn; 0: all.
    top_p: only the likeliest whose probabilities add up to it (Holtzman et al. 2020,
    nucleus sampling). repetition_penalty: logits of tokens that have been there are
    divided by it, below 0 multiplied (Keskar et al. 2019, CTRL, section 4.1); 1: none.
    In this order: penalty, temperature, top_k, top_p, as transformers has them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0


GREEDY = Pick()


def pick_tokens(
    pick: Pick, logits: jax.Array, keys: jax.Array | None, seen: jax.Array | None = None
) -> jax.Array:
    """Pick a token of each row of logits [..., V]: i32 [...].

    keys: of `draw_keys`, [...]; None where nothing is drawn. seen: bool [..., V], the
    tokens that have been there, for a penalty.
    """
    if seen is not None:
        logits = penalise(logits, seen, pick.repetition_penalty)
    if pick.draws:
        logits = keep_likely(logits / pick.temperature, pick.top_k, pick.top_p)
        logits = logits + gumbel(keys, logits.shape[-1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def penalise(scores: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Make scores [..., V] of seen tokens, bool [..., V], less likely.

    Of the scores 2, -1, 3 with the first two seen and a penalty of 2: 1, -2, 3.
    """
    less = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, less, scores)


def keep_likely(logits: jax.Array, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Leave of logits [..., V] the likeliest; others become -inf.

    Tokens as likely as the last of the top_k, or of those that make top_p, stay too.

    Of the probabilities 0.5, 0.3, 0.15, 0.05 a top_p of 0.7 leaves the first two: those
    before the second make 0.5, less than 0.7, and those before the third 0.8.
    """
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, NEVER, logits)
    if top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        likely = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(likely, axis=-1) - likely
        # The first stays whatever top_p is.
        kept = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True), 1)
        least = jnp.take_along_axis(falling, kept - 1, axis=-1)
        logits = jnp.where(logits < least, NEVER, logits)
    return logits


def draw_keys(seed: jax.Array | int, *parts: Any) -> jax.Array:
    """Return a key of jax.random for each address (seed, *parts).

    parts: integers, or arrays of integers that broadcast; the keys have their shape.
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
    """Return Gumbel noise under each key [...]: f32 [..., size]."""

    def draw(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, (size,), jnp.uint32)
        # 23 bits and a half: never 0, never 1
        return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23

    uniform = jax.vmap(draw)(keys.ravel()).reshape(*keys.shape, size)
    return -jnp.log(-jnp.log(uniform))


def is_end(tokens: jax.Array, ends: Sequence[int]) -> jax.Array:
    """Say which tokens end a text: bool, of the shape of tokens."""
    return jnp.isin(tokens, jnp.array(ends, jnp.int32)) if ends else tokens < 0


def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mark tokens i32 [B, n] in seen, bool [B, V]; those below 0 are none."""
    rows = jnp.arange(len(seen))[:, None]
    places = jnp.where(tokens < 0, seen.shape[1], tokens)
    return seen.at[rows, places].set(True, mode="drop")

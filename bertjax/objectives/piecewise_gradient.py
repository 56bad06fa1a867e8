# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens whose gradient is made beside them, a piece at a time.

A loss over the vocabulary at every token would keep its logits for the backward pass,
or make them twice. It is a sum, so that its gradient is known but for a factor when it
is made: what is kept are gradients, as large as hidden states and parameters (Hsu et
al. 2024, Liger, arXiv 2410.10989, section 3.2, has cross-entropy so).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.objectives.token_head import cut

# score(params, constants, *piece) -> f32 []
Score = Callable[..., jax.Array]


def add_pieces(
    score: Score, pieces: int, params: Any, constants: Any, arrays: Sequence[jax.Array]
) -> jax.Array:
    """Add up score(params, constants, *piece) over pieces of arrays [B, L, ...].

    A score is a sum over tokens, f32 [], and 0 of zeros, which fill the last piece. The
    gradient is of params and of the first array alone.
    """
    wide = -(-arrays[0].shape[1] // pieces)
    parts = tuple(cut(x, pieces, wide) for x in arrays)
    return _add_up(score, params, constants, parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_up(score: Score, params: Any, constants: Any, parts: Any) -> jax.Array:
    def add(total: jax.Array, piece: Any) -> tuple[jax.Array, None]:
        return total + score(params, constants, *piece), None

    return jax.lax.scan(add, jnp.zeros((), jnp.float32), parts)[0]


def _add_up_with_gradient(score, params, constants, parts):
    def add(carry, piece):
        total, summed = carry
        first, *rest = piece
        value, (own, of_first) = jax.value_and_grad(
            lambda params, first: score(params, constants, first, *rest), (0, 1)
        )(params, first)
        summed = jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, own)
        return (total + value, summed), of_first

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = jnp.zeros((), jnp.float32), zeros
    (total, summed), of_first = jax.lax.scan(add, start, parts)
    own = jax.tree.map(lambda s, p: s.astype(p.dtype), summed, params)
    return total, (own, of_first, (None,) * len(parts[1:]))


def _scale_gradient(score, gradients, factor):
    *own, others = gradients
    own, of_first = jax.tree.map(lambda g: (factor * g).astype(g.dtype), own)
    return own, None, (of_first, *others)


_add_up.defvjp(_add_up_with_gradient, _scale_gradient)

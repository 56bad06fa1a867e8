# SPDX-License-Identifier: Apache-2.0
"""Sum a loss over tokens piece by piece, and compute its gradient in the same pass.

A loss over the vocabulary at every token would otherwise store its logits for the
backward pass, or compute them twice. Because the loss is a sum, the forward pass can
compute its gradient up to a factor. It stores these gradients, which are only as large
as the hidden states and the parameters. (Hsu et al. 2024, Liger, arXiv 2410.10989,
section 3.2, do so for cross-entropy.)
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

    score must return a sum over tokens, f32 [], and 0 for zeros, which pad the last
    piece. Only params and the first array get a gradient.
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

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

# score(params, constants, *piece) -> (f32 [], a tree of sums that get no gradient)
Score = Callable[..., tuple[jax.Array, Any]]


def add_pieces(
    score: Score, pieces: int, params: Any, constants: Any, arrays: Sequence[jax.Array]
) -> tuple[jax.Array, Any]:
    """Add up score(params, constants, *piece) over pieces of arrays [B, L, ...].

    score must return sums over tokens, (f32 [], a tree of further ones), and 0 for
    zeros, which pad the last piece. Only the first sum has a gradient, and only params
    and the first array get it.
    """
    wide = -(-arrays[0].shape[1] // pieces)
    parts = tuple(cut(x, pieces, wide) for x in arrays)
    return _add_up(score, params, constants, parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_up(score: Score, params: Any, constants: Any, parts: Any) -> Any:
    def add(total: Any, piece: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, score(params, constants, *piece)), None

    return jax.lax.scan(add, _zero_sums(score, params, constants, parts), parts)[0]


def _zero_sums(score: Score, params: Any, constants: Any, parts: Any) -> Any:
    sums = jax.eval_shape(score, params, constants, *(x[0] for x in parts))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)


def _add_up_with_gradient(score, params, constants, parts):
    def add(carry, piece):
        total, summed = carry
        first, *rest = piece
        sums, (own, of_first) = jax.value_and_grad(
            lambda params, first: score(params, constants, first, *rest),
            argnums=(0, 1),
            has_aux=True,
        )(params, first)
        summed = jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, own)
        return (jax.tree.map(jnp.add, total, sums), summed), of_first

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = _zero_sums(score, params, constants, parts), zeros
    (total, summed), of_first = jax.lax.scan(add, start, parts)
    own = jax.tree.map(lambda s, p: s.astype(p.dtype), summed, params)
    return total, (own, of_first, (None,) * len(parts[1:]))


def _scale_gradient(score, gradients, factors):
    (factor, _), (*own, others) = factors, gradients
    own, of_first = jax.tree.map(lambda g: (factor * g).astype(g.dtype), own)
    return own, None, (of_first, *others)


_add_up.defvjp(_add_up_with_gradient, _scale_gradient)


def cut(x: jax.Array, pieces: int, wide: int) -> jax.Array:
    """Split x [B, P, ...], padded with zeros, into [pieces, B, wide, ...]."""
    b, p, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, pieces * wide - p), *((0, 0) for _ in rest)))
    return x.reshape(b, pieces, wide, *rest).swapaxes(0, 1)

# SPDX-License-Identifier: Apache-2.0
"""Compute the exact rank of the right candidate, and the best candidates."""

import jax
import jax.numpy as jnp

from bertjax import UserError


def count_above(
    scores: jax.Array, right: jax.Array, known: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Count the candidates that score higher than the right one, or the same.

    scores f32 [..., N]; right i32 [...], the number of the right candidate. known i32
    [..., F]: candidates to leave out (filtered ranking), without repeats and without
    the right one, -1 for none. Returns `greater` and `equal` (other candidates with the
    same score), f32 [...]: whole numbers, or NaN if any score is NaN.
    """
    own = jnp.take_along_axis(scores, right[..., None], -1, mode="clip")
    greater = jnp.sum(scores > own, axis=-1)
    equal = jnp.sum(scores == own, axis=-1) - 1
    if known is not None:
        others = jnp.take_along_axis(scores, jnp.maximum(known, 0), -1, mode="clip")
        counts = known >= 0
        greater -= jnp.sum(counts & (others > own), axis=-1)
        equal -= jnp.sum(counts & (others == own), axis=-1)
    # A model with NaN scores must not seem to rank every right answer first.
    is_number = ~jnp.isnan(jnp.max(scores, axis=-1))
    return {
        "greater": jnp.where(is_number, greater, jnp.nan).astype(jnp.float32),
        "equal": jnp.where(is_number, equal, jnp.nan).astype(jnp.float32),
    }


def check_top(name: str, top: int) -> None:
    """Raise UserError for a `top` below 1; name: the objective's."""
    if top < 1:
        raise UserError(f"objective: {name}'s top={top} has to be at least 1")


def best_candidates(
    scores: jax.Array, probabilities: jax.Array, most: int
) -> dict[str, jax.Array]:
    """Return the candidates with the highest scores [..., N], best first.

    They are `top_ids` i32 and `top_probabilities` f32, [..., min(most, N)].
    """
    _, ids = jax.lax.top_k(scores, min(most, scores.shape[-1]))
    likely = jnp.take_along_axis(probabilities, ids, axis=-1)
    return {"top_ids": ids, "top_probabilities": likely}

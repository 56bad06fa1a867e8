# SPDX-License-Identifier: Apache-2.0
"""The rank of the right candidate among all, exactly, and the best ones."""

import jax
import jax.numpy as jnp

from bertjax import UserError


def count_above(
    scores: jax.Array, right: jax.Array, known: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Count the candidates that score more than the right one, and others the same.

    scores f32 [..., N]; right i32 [...], its number. known i32 [..., F]: candidates
    that do not count, each once and never the right one; -1: none. Returns `greater`
    and `equal`, f32 [...]: whole numbers, or nan where a score is none.
    """
    own = jnp.take_along_axis(scores, right[..., None], -1, mode="clip")
    greater = jnp.sum(scores > own, axis=-1)
    equal = jnp.sum(scores == own, axis=-1) - 1
    if known is not None:
        others = jnp.take_along_axis(scores, jnp.maximum(known, 0), -1, mode="clip")
        counts = known >= 0
        greater -= jnp.sum(counts & (others > own), axis=-1)
        equal -= jnp.sum(counts & (others == own), axis=-1)
    # A model whose scores are no numbers must not seem to rank everything first.
    is_number = ~jnp.isnan(jnp.max(scores, axis=-1))
    return {
        "greater": jnp.where(is_number, greater, jnp.nan).astype(jnp.float32),
        "equal": jnp.where(is_number, equal, jnp.nan).astype(jnp.float32),
    }


def check_top(name: str, top: int) -> None:
    """Refuse answers of no candidates. Raises UserError; name: of the objective."""
    if top < 1:
        raise UserError(f"objective: {name}'s top={top} has to be at least 1")


def best_candidates(
    scores: jax.Array, probabilities: jax.Array, most: int
) -> dict[str, jax.Array]:
    """Return the best candidates by their scores [..., N], the best first: `top_ids`
    i32 and `top_probabilities` f32 [..., min(most, N)]."""
    _, ids = jax.lax.top_k(scores, min(most, scores.shape[-1]))
    likely = jnp.take_along_axis(probabilities, ids, axis=-1)
    return {"top_ids": ids, "top_probabilities": likely}

# SPDX-License-Identifier: Apache-2.0
"""The guard of a run: which updates are skipped, judged in the step itself."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")

WINDOW = 100  # updates that a gradient's norm is compared with, and before it is


class Guard(NamedTuple):
    """What the guard remembers: zeros at the beginning.

    norm: f32, the running mean of the gradients' norms; taken, skipped, streak: i32,
    updates made, skipped, and skipped in a row until now.
    """

    norm: jax.Array
    taken: jax.Array
    skipped: jax.Array
    streak: jax.Array


def make_guard() -> Guard:
    zero = jnp.zeros((), jnp.int32)
    return Guard(jnp.zeros(()), zero, zero, zero)


def check_update(
    guard: Guard, loss: jax.Array, norm: jax.Array, factor: float
) -> tuple[jax.Array, Guard]:
    """Say whether an update is to be made (bool []), and remember it.

    It is skipped when loss or gradient norm is not finite or, with a `factor` and once
    WINDOW updates are made, when the norm exceeds factor x its running mean (of all at
    first, then exponential over about WINDOW), which skipped updates leave as it was.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if factor:
        good &= (guard.taken < WINDOW) | (norm <= factor * guard.norm)
    taken = guard.taken + good
    weight = 1.0 / jnp.clip(taken, 1, WINDOW).astype(jnp.float32)
    mean = jnp.where(good, guard.norm + weight * (norm - guard.norm), guard.norm)
    streak = jnp.where(good, 0, guard.streak + 1)
    return good, Guard(mean, taken, guard.skipped + ~good, streak)


def advance_if(good: jax.Array, advance: Callable[[T], T], state: T) -> T:
    """Return advance(state) where an update is made, else `state` as it is.

    A CPU branches: to choose between arrays takes it another copy of the moments and a
    sixth of a base model's step. A TPU chooses while it writes, which is free, where a
    branch would end its overlapping of work (docs/benchmarks.md).
    """

    def branch(state: T) -> T:
        return jax.lax.cond(good, advance, lambda old: old, state)

    def choose(state: T) -> T:
        new = advance(state)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)

    return jax.lax.platform_dependent(state, cpu=branch, default=choose)

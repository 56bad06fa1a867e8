# SPDX-License-Identifier: Apache-2.0
"""The guard, which decides inside the training step whether to skip an update."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")

# The updates over which the mean of the gradient norms is taken, and the number of
# updates before norms are compared with it.
WINDOW = 100


class Guard(NamedTuple):
    """The state of the guard, initially zeros.

    norm: f32, the running mean of the gradient norms; taken, skipped, streak: i32, the
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
    """Return whether to make an update (bool []), and the guard's new state.

    An update is skipped if the loss or the gradient norm is not finite or, with a
    `factor` and after WINDOW updates, if the norm exceeds factor x its running mean.
    This is the mean of all updates at first, later an exponential one over about
    WINDOW updates; skipped updates do not change it.
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
    """Return advance(state) if `good`, otherwise `state` unchanged.

    On a CPU this is a branch: selecting between arrays would cost another copy of the
    moments and a sixth of a base model's step. A TPU selects while it writes, which is
    free; a branch would prevent it from overlapping work (docs/benchmarks.md).
    """

    def branch(state: T) -> T:
        return jax.lax.cond(good, advance, lambda old: old, state)

    def choose(state: T) -> T:
        new = advance(state)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)

    return jax.lax.platform_dependent(state, cpu=branch, default=choose)

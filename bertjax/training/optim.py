# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bertjax import UserError, registry

Schedule = Callable[[jax.Array | int], jax.Array]


def make_schedule(name: str, lr: float, warmup: int, total: int) -> Schedule:
    """Make a map from update (0-based) to learning rate.

    Both rise linearly over `warmup` updates, the first of them above 0; "linear" then
    falls to reach 0 after update `total` - 1 (google-research/bert, optimization.py),
    "constant" stays. Raises UserError when the warm-up is longer than the run.
    """
    if warmup > total:
        raise UserError(f"optim.warmup is {warmup} steps, more than total's {total}")

    def rise(step: jax.Array) -> jax.Array:
        return (step + 1) / max(warmup, 1)

    def linear(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        fall = (total - step) / max(total - warmup, 1)
        return lr * jnp.clip(jnp.minimum(rise(step), fall), 0.0, 1.0)

    def constant(step: jax.Array | int) -> jax.Array:
        return lr * jnp.minimum(rise(jnp.asarray(step, jnp.float32)), 1.0)

    return registry.pick(
        "optim.schedule", name, {"linear": linear, "constant": constant}
    )


def decays(params: Any) -> Any:
    """Say which leaves decay: all but biases and norm scales (BERT's rule, by name)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


def make_adamw(
    schedule: Schedule, *, wd: float, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Make AdamW (Loshchilov and Hutter 2019), decay where `decays` says."""
    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=wd, mask=decays)


OPTIMIZERS = {"adamw": make_adamw}


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    wd: float,
    b1: float,
    b2: float,
    eps: float,
    clip: float,
) -> optax.GradientTransformation:
    """Chain clipping by global norm (`clip` > 0) and the optimizer called `name`."""
    make = registry.pick("optim.name", name, OPTIMIZERS)
    tx = make(schedule, wd=wd, b1=b1, b2=b2, eps=eps)
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip > 0 else tx

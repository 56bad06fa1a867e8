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


def is_stacked(path: tuple[Any, ...]) -> bool:
    """True for leaves whose axis 0 counts layers: those below "layers" in a tree."""
    return "layers" in [getattr(entry, "key", None) for entry in path]


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Scale each layer's update to the norm of its parameters (LAMB's phi is identity).

    A layer is a leaf that `decays`, or an entry on axis 0 of a stacked one; the other
    leaves keep their updates, as in google-research/albert, lamb_optimizer.py. Where a
    norm is 0 the ratio is 1. Norms are those of whole arrays, however they lie.
    """

    def one(path: tuple[Any, ...], update: Any, param: Any, decayed: bool) -> Any:
        if not decayed:
            return update
        axes = tuple(range(int(is_stacked(path)), param.ndim))

        def norm(x: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))

        size, step = norm(param), norm(update)
        usable = (size > 0) & (step > 0)
        return update * jnp.where(usable, size / jnp.where(usable, step, 1.0), 1.0)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        scaled = jax.tree_util.tree_map_with_path(one, updates, params, decays(params))
        return scaled, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_lamb(
    schedule: Schedule, *, wd: float, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Make LAMB (You et al. 2020, algorithm 2, bias corrected as there).

    The decay is part of the update whose norm is taken. google-research/albert does
    not correct the bias, which a warm-up hides.
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(wd, mask=decays),
        scale_by_trust_ratio(),
        optax.scale_by_learning_rate(schedule),
    )


OPTIMIZERS = {"adamw": make_adamw, "lamb": make_lamb}


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

# SPDX-License-Identifier: Apache-2.0
"""The training state, and how it is made in its shards."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.parallel.sharding import ParamAxes, param_shardings, state_shardings
from bertjax.training.guard import make_guard


class State(NamedTuple):
    """Everything an update changes: updates done i32 [], parameters, moments.

    guard: what the guard remembers (guard.py); ema: the parameters' average, a moving
    one or that of a run's tail; averaged: i32 [], how many updates' parameters a tail's
    is the mean of. Each is None where a run has none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    guard: Any = None
    ema: Any = None
    averaged: Any = None

    def parts(self) -> dict[str, Any]:
        """Return what there is by name: a checkpoint's tree."""
        return {k: v for k, v in self._asdict().items() if v is not None}


def make_state(
    params: Any,
    tx: optax.GradientTransformation,
    guarded: bool = False,
    averaged: bool = False,
    tail: bool = False,
) -> State:
    """Begin at step 0 with these parameters.

    averaged: with a moving average; tail: with that of the run's tail instead.
    """
    return State(
        jnp.zeros((), jnp.int32),
        params,
        tx.init(params),
        make_guard() if guarded else None,
        params if averaged or tail else None,
        jnp.zeros((), jnp.int32) if tail else None,
    )


def plan_state(
    init: Callable[[], Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    extra: ParamAxes,
    guarded: bool = False,
    averaged: bool = False,
    tail: bool = False,
) -> tuple[State, State]:
    """Return the state's shapes and shardings before a byte is allocated."""
    shapes = jax.eval_shape(lambda: make_state(init(), tx, guarded, averaged, tail))
    shardings = param_shardings(shapes.params, mesh, extra)
    return shapes, state_shardings(shapes, shapes.params, shardings, mesh)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach shardings to shapes: what restoring a checkpoint asks for."""
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        shardings,
    )


def init_sharded(
    init: Callable[[], Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
) -> State:
    """Make the first state where its shardings say, in one compiled program."""
    kinds = shardings.guard, shardings.ema, shardings.averaged
    has = [kind is not None for kind in kinds]

    def begin() -> State:
        return make_state(init(), tx, *has)

    with jax.set_mesh(mesh):
        return jax.jit(begin, out_shardings=shardings)()


def complete(parts: dict[str, Any], wanted: State) -> State:
    """Make a state of saved parts; wanted: shapes and shardings.

    A guard that they lack begins anew, an average with the parameters.
    """
    if wanted.averaged is not None and "averaged" not in parts:
        zero = functools.partial(jnp.zeros, (), jnp.int32)
        parts["averaged"] = jax.jit(zero, out_shardings=wanted.averaged.sharding)()
    if wanted.guard is not None and "guard" not in parts:
        places = jax.tree.map(lambda s: s.sharding, wanted.guard)
        parts["guard"] = jax.jit(make_guard, out_shardings=places)()
    restored = State(**parts)
    if wanted.ema is not None and "ema" not in parts:
        restored = with_params(restored, restored.params, wanted.ema)
    return restored


def with_params(current: State, params: Any, wanted: Any) -> State:
    """Return a state with other parameters, copied into its average where one is
    wanted (shapes and shardings)."""
    if wanted is None:
        return current._replace(params=params)
    places = jax.tree.map(lambda s: s.sharding, wanted)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)
    return current._replace(params=params, ema=copy(params))

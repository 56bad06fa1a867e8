# SPDX-License-Identifier: Apache-2.0
"""The training state, and its sharded initialization."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.parallel.sharding import (
    TABLES,
    TEACHER,
    ParamAxes,
    leaves_of,
    param_shardings,
    path_name,
    state_shardings,
)
from bertjax.training.frozen import Sizes, split
from bertjax.training.guard import make_guard

# Frozen parts that checkpoints do not hold: every start loads them from elsewhere.
GIVEN = TEACHER, TABLES


class State(NamedTuple):
    """Everything that an update changes or reads.

    step: updates done, i32 []. opt_state: the optimizer's state. guard: the guard's
    state (guard.py). ema: the average of the parameters, a moving one or that of the
    run's tail. averaged: i32 [], the number of updates in the tail's average. frozen:
    what a step reads and does not train: parts of the model by their paths (frozen.py),
    and what checkpoints do not hold (GIVEN), namely another model, "teacher", and
    "tables", such as passages and their vectors.
    Each optional field is None in a run that does not have it.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    guard: Any = None
    ema: Any = None
    averaged: Any = None
    frozen: Any = None

    def parts(self) -> dict[str, Any]:
        """Return a checkpoint's tree: the fields that are set, without GIVEN parts."""
        own = self._replace(frozen=without_given(self.frozen))
        return {k: v for k, v in own._asdict().items() if v is not None}


def without_given(frozen: Any) -> Any:
    """Return the frozen parts of the model itself, without GIVEN; None if empty."""
    return {k: v for k, v in (frozen or {}).items() if k not in GIVEN} or None


def with_given(current: State, **given: Any) -> State:
    """Return a state with these frozen parts added: teacher=, tables= (GIVEN)."""
    return current._replace(frozen={**(current.frozen or {}), **given} or None)


def keep_given(current: State, before: State) -> State:
    """Return `current` with the teacher and tables of the state `before`."""
    given = {k: v for k, v in (before.frozen or {}).items() if k in GIVEN}
    return with_given(current, **given)


def make_state(
    params: Any,
    tx: optax.GradientTransformation,
    guarded: bool = False,
    averaged: bool = False,
    tail: bool = False,
    freeze: Sizes = MappingProxyType({}),
) -> State:
    """Return the state at step 0 with these parameters.

    averaged: with a moving average; tail: with the average of the run's tail instead;
    freeze: the parts of the parameters that are not trained.
    """
    params, frozen = split(params, freeze)
    return State(
        jnp.zeros((), jnp.int32),
        params,
        tx.init(params),
        make_guard() if guarded else None,
        params if averaged or tail else None,
        jnp.zeros((), jnp.int32) if tail else None,
        frozen or None,
    )


def plan_state(
    init: Callable[[], Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    extra: ParamAxes,
    guarded: bool = False,
    averaged: bool = False,
    tail: bool = False,
    freeze: Sizes = MappingProxyType({}),
    init_teacher: Callable[[], Any] | None = None,
    init_tables: Callable[[], Any] | None = None,
) -> tuple[State, State]:
    """Return the state's shapes and shardings, without allocating memory."""
    how = guarded, averaged, tail, freeze
    shapes = jax.eval_shape(lambda: make_state(init(), tx, *how))
    shardings = param_shardings(shapes.params, mesh, extra)
    where = state_shardings(shapes, shapes.params, shardings, mesh)
    for name, make in ((TEACHER, init_teacher), (TABLES, init_tables)):
        if make is not None:
            shapes = with_given(shapes, **{name: jax.eval_shape(make)})
    if shapes.frozen is not None:
        # state_shardings cannot match these: paths are the model's, shapes differ.
        where = where._replace(frozen=param_shardings(shapes.frozen, mesh, extra))
    return shapes, where


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach shardings to shapes, as restoring a checkpoint requires."""
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
    freeze: Sizes = MappingProxyType({}),
    init_teacher: Callable[[], Any] | None = None,
) -> State:
    """Create the first state with its shardings, in one compiled program.

    Tables are left out, and so is a teacher without init_teacher; `with_given` adds
    them.
    """
    kinds = shardings.guard, shardings.ema, shardings.averaged
    has = [kind is not None for kind in kinds]

    def begin() -> State:
        first = make_state(init(), tx, *has, freeze)
        return with_given(first, **{k: make() for k, make in given.items()})

    given = {} if init_teacher is None else {TEACHER: init_teacher}
    own = (without_given(shardings.frozen) or {}) | {
        name: shardings.frozen[name] for name in given
    }
    shardings = shardings._replace(frozen=own or None)
    with jax.set_mesh(mesh):
        return jax.jit(begin, out_shardings=shardings)()


def complete(parts: dict[str, Any], wanted: State) -> State:
    """Build a state from saved parts; wanted: shapes and shardings.

    If the parts lack a guard, a new one is created; if they lack an average, it begins
    with the parameters.
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


def in_pairs(state: Any) -> Any:
    """Convert an optimizer's state to the form that Muon with bfloat16 had at first.

    There the momentum is in a pair, whose other half is an empty state.
    """
    return jax.tree.map(
        lambda x: (x, optax.EmptyState()) if _is_momentum(x) else x,
        state,
        is_leaf=_is_momentum,
    )


def out_of_pairs(state: Any) -> Any:
    """Undo `in_pairs`."""

    def is_pair(x: Any) -> bool:
        return type(x) is tuple and len(x) == 2 and _is_momentum(x[0])

    return jax.tree.map(lambda x: x[0] if is_pair(x) else x, state, is_leaf=is_pair)


def _is_momentum(x: Any) -> bool:
    return isinstance(x, optax.contrib.MuonState)


def merge(params: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return `params` with the leaves of `taken` in place of their own."""
    leaves = leaves_of(taken)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves.get(path_name(path), leaf), params
    )


def take_params(
    current: State, taken: Mapping[str, Any], wanted: State, freeze: Sizes
) -> State:
    """Return a state with the parameters in `taken` instead of its own.

    taken: whole leaves of some of the model's parameters. wanted: shapes and shardings
    of a state.
    """
    part = functools.partial(split, sizes=freeze)
    if any(size is not None for size in freeze.values()):
        places = jax.tree.map(lambda s: s.sharding, (wanted.params, wanted.frozen))
        where = tuple(map(_restrict, places, jax.eval_shape(part, taken)))
        part = jax.jit(part, out_shardings=where)
    trained, frozen = part(taken)
    own = current.frozen and merge(current.frozen, frozen)
    params = merge(current.params, trained)
    return with_params(current._replace(frozen=own), params, wanted.ema)


def _restrict(tree: Any, like: Mapping[str, Any]) -> Any:
    """Return the part of a tree whose keys are also in `like`."""
    if not isinstance(like, Mapping):
        return tree
    return {key: _restrict(tree[key], value) for key, value in like.items()}


def with_params(current: State, params: Any, wanted: Any) -> State:
    """Return a state with other parameters, and an average that is a copy of them.

    wanted: shapes and shardings of the average; None: without one.
    """
    if wanted is None:
        return current._replace(params=params)
    places = jax.tree.map(lambda s: s.sharding, wanted)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)
    return current._replace(params=params, ema=copy(params))

# SPDX-License-Identifier: Apache-2.0
"""The training state, and how it is born already sharded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.parallel.sharding import Rows, param_shardings, state_shardings


class State(NamedTuple):
    """Everything an update changes: updates done i32 [], parameters, moments."""

    step: jax.Array
    params: Any
    opt_state: Any


def make_state(params: Any, tx: optax.GradientTransformation) -> State:
    """Begin at step 0 with these parameters."""
    return State(jnp.zeros((), jnp.int32), params, tx.init(params))


def plan_state(
    init: Callable[[], Any], tx: optax.GradientTransformation, mesh: Mesh, extra: Rows
) -> tuple[State, State]:
    """Return the state's shapes and shardings before a byte is allocated."""
    shapes = jax.eval_shape(lambda: make_state(init(), tx))
    shardings = param_shardings(shapes.params, mesh, extra)
    return shapes, state_shardings(shapes, shapes.params, shardings, mesh)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach shardings to shapes: what restoring a checkpoint asks for."""
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        shardings,
    )


def born(
    init: Callable[[], Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
) -> State:
    """Make the first state where its shardings say, in one compiled program."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda: make_state(init(), tx), out_shardings=shardings)()

# SPDX-License-Identifier: Apache-2.0
"""Convert a jax function to an ONNX graph for any batch size and length.

The function is traced with symbolic sizes (jax.export). Values that depend only on
parameters are computed here, and each remaining primitive becomes ONNX operators.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import Literal

from bertjax import UserError
from bertjax.parallel.sharding import path_name
from bertjax.serving.onnx_graph import Graph, Value
from bertjax.serving.onnx_primitives import UNKNOWN, lower

# Keys of call-like primitives' params that hold the called function.
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
LOOPS = ("scan", "while", "cond")
SMALL = 1024  # numbers in a table so small that a second copy does not matter


def convert(
    run: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    inputs: Mapping[str, Any],
    longest: int,
    names: Sequence[str],
) -> Graph:
    """Return the graph of run(params, batch) -> {name: array}.

    params: a tree of numpy arrays, which become constants named by path; inputs: the
    shapes of a batch in the syntax of jax.export.symbolic_shape ("b, l"), all i32; the
    graph accepts them as i64, like transformers' exports; longest: the maximum of l;
    names: the outputs to return, in order. Raises UserError for a primitive without
    known ONNX operators.
    """
    scope = export.SymbolicScope([f"l <= {longest}"])
    sizes = {n: export.symbolic_shape(text, scope=scope) for n, text in inputs.items()}
    batch = {n: jax.ShapeDtypeStruct(s, np.int32) for n, s in sizes.items()}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def listed(params: Any, batch: Any) -> list[jax.Array]:
        found = run(params, batch)
        return [found[name] for name in names]

    closed = jax.make_jaxpr(listed)(shapes, batch)
    graph = Graph()
    values = [
        graph.constant(np.asarray(leaf), path_name(path))
        for path, leaf in jax.tree.leaves_with_path(params)
    ]
    given = {}
    for name in inputs:  # in their own order; a tree sorts them alphabetically
        as_i64 = graph.add_input(name, sizes[name], np.int64)
        given[name] = graph.cast(as_i64, np.int32)
    values += [given[name] for name in sorted(given)]
    found = interpret(graph, closed.jaxpr, closed.consts, values)
    for name, value, var in zip(names, found, closed.jaxpr.outvars, strict=True):
        graph.add_output(name, graph.expand(value, var.aval.shape))
    check(graph)
    return graph


def interpret(
    graph: Graph, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Value]
) -> list[Value]:
    """Add the equations of a jaxpr to a graph, and return its outputs."""
    known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, array in zip(jaxpr.constvars, constants, strict=True):
        known[var] = graph.constant(np.asarray(array))

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return graph.constant(np.asarray(atom.val, atom.aval.dtype))
        return known[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        called = next((eqn.params[k] for k in CALLED if k in eqn.params), None)
        if called is not None and eqn.primitive.name not in LOOPS:
            inner = getattr(called, "jaxpr", called)
            consts = getattr(called, "consts", ())
            results = interpret(graph, inner, consts, values)
        elif (folded := fold(graph, values, eqn)) is not None:
            results = folded
        else:
            results = lower(graph, values, eqn)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def fold(graph: Graph, values: Sequence[Value], eqn: Any) -> list[Value] | None:
    """Return the results of an equation of constants, or None if they are not known.

    A parameter that is only reshaped keeps its name. Broadcasts are not computed here,
    but where they are used. Large tables are not transposed, so that a transposed table
    is not stored twice.
    """
    is_known = all(value.constant is not None for value in values)
    sizes = [size for var in eqn.outvars for size in var.aval.shape]
    if not is_known or not all(isinstance(size, int) for size in sizes):
        return None
    name, outputs = eqn.primitive.name, [var.aval.size for var in eqn.outvars]
    if name == "dim_as_value":
        return None
    if name == "broadcast_in_dim" and outputs != [values[0].constant.size]:
        return None
    if name in ("transpose", "dot_general") and max(outputs) > SMALL:
        return None
    arrays = [
        np.broadcast_to(value.constant, var.aval.shape)
        for value, var in zip(values, eqn.invars, strict=True)
    ]
    results = eqn.primitive.bind(*arrays, **eqn.params)
    results = results if eqn.primitive.multiple_results else [results]
    named = values[0].name if len(values) == 1 and values[0].constant.size > 64 else ""
    return [graph.constant(np.asarray(array), named) for array in results]


def check(graph: Graph) -> None:
    """Refuse a graph that needs a primitive without an operator. Raises UserError."""
    for node in graph.nodes():
        if node.op.startswith(UNKNOWN):
            raise UserError(
                f"--format=onnx: the model computes {node.op.removeprefix(UNKNOWN)}, "
                "which bertjax cannot write in ONNX: give --format=stablehlo"
            )

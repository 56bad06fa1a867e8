# SPDX-License-Identifier: Apache-2.0
"""A function of jax as a graph of ONNX, whatever batch and length.

The function is traced with symbolic sizes (jax.export), what depends on parameters
alone is computed here, and each other primitive becomes operators.
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

# Of primitives that only call, where the function that they call stands.
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
LOOPS = ("scan", "while", "cond")
SMALL = 1024  # numbers of a table of which a second copy is nothing


def convert(
    run: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    inputs: Mapping[str, Any],
    longest: int,
    names: Sequence[str],
) -> Graph:
    """Return the graph of run(params, batch) -> {name: array}.

    params: a tree of numpy arrays, which become constants by their paths; inputs: the
    shapes of a batch as jax.export.symbolic_shape reads them ("b, l"), all i32, which
    the graph takes as i64, as transformers' exports do; longest: l is at most that;
    names: the outputs wanted, in order. Raises UserError for what no operator of ONNX
    is known for.
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
    for name in inputs:  # in their order; a tree's is the alphabet's
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
    """Add the equations of a jaxpr to a graph; return its outputs."""
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
    """Return what an equation of constants computes; None where it is not known.

    A parameter that is only laid out otherwise keeps its name. What repeats is not
    computed: it is repeated where it is used. A transposed table is that table still.
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
    """Refuse what stands for a primitive without an operator: UserError."""
    for node in graph.nodes():
        if node.op.startswith(UNKNOWN):
            raise UserError(
                f"--format=onnx: the model computes {node.op.removeprefix(UNKNOWN)}, "
                "which bertjax cannot write in ONNX: give --format=stablehlo"
            )

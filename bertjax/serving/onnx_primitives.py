# SPDX-License-Identifier: Apache-2.0
"""Lower primitives of jax to ONNX operators, as far as encoders and heads use them.

A function of the table gets (graph, inputs, eqn) and returns one value per output.
Shapes of inputs may have 1 where jax's have a size: ONNX broadcasts by itself, so jax's
broadcasts are only carried out for operators that need them (`whole`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertjax.serving.onnx_graph import Graph, Value
from bertjax.serving.onnx_patterns import simplify

Lower = Callable[[Graph, list[Value], Any], list[Value]]


def whole(graph: Graph, inputs: Sequence[Value], eqn: Any) -> list[Value]:
    """Return the inputs, broadcast to their shapes in jax."""
    return [
        graph.expand(x, var.aval.shape)
        for x, var in zip(inputs, eqn.invars, strict=True)
    ]


def broadcast_shapes(inputs: Sequence[Value]) -> tuple[Any, ...]:
    """Return the broadcast shape of inputs, which have one rank or are scalars."""
    rank = max(len(x.shape) for x in inputs)
    shapes = [x.shape or (1,) * rank for x in inputs]
    return tuple(
        next((size for size in sizes if size != 1), 1)
        for sizes in zip(*shapes, strict=True)
    )


# ---------------------------------------------------------------- element by element
def elementwise(op: str, *fixed: Any) -> Lower:
    """Lower to one operator that broadcasts; fixed: further, constant inputs."""

    def lower(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
        kind = eqn.outvars[0].aval.dtype
        more = [graph.constant(np.array(x, inputs[0].dtype)) for x in fixed]
        shape = broadcast_shapes(inputs)
        return [simplify(graph, graph.emit(op, [*inputs, *more], shape, kind))]

    return lower


def rsqrt(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = inputs
    root = graph.emit("Sqrt", [x], x.shape, x.dtype)
    return [graph.emit("Reciprocal", [root], x.shape, x.dtype)]


def integer_pow(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = inputs
    if eqn.params.get("y", 2) == 2:
        return [graph.emit("Mul", [x, x], x.shape, x.dtype)]
    power = graph.constant(np.array(eqn.params["y"], x.dtype))
    return [graph.emit("Pow", [x, power], x.shape, x.dtype)]


def not_equal(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    shape = broadcast_shapes(inputs)
    same = graph.emit("Equal", inputs, shape, np.bool_)
    return [graph.emit("Not", [same], shape, np.bool_)]


def select_n(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    which, no, yes = inputs
    shape = broadcast_shapes(inputs)
    return [graph.emit("Where", [which, yes, no], shape, no.dtype)]


def clamp(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    least, x, most = inputs
    raised = graph.emit("Max", [x, least], broadcast_shapes([x, least]), x.dtype)
    return [graph.emit("Min", [raised, most], broadcast_shapes(inputs), x.dtype)]


def convert_element_type(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    return [graph.cast(inputs[0], eqn.params["new_dtype"])]


def identity(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    return inputs


# ---------------------------------------------------------------- shapes
def broadcast_in_dim(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    """Insert axes of size 1 where jax broadcasts."""
    x = inputs[0]
    if not x.shape:
        return [x]
    axes = eqn.params["broadcast_dimensions"]
    sizes = dict(zip(axes, x.shape, strict=True))
    shape = [sizes.get(i, 1) for i in range(len(eqn.params["shape"]))]
    return [reshape_to(graph, x, shape)]


def reshape_to(graph: Graph, x: Value, shape: Sequence[Any]) -> Value:
    """Return x with another shape, by Unsqueeze or Squeeze if only axes of 1 differ."""
    shape = tuple(shape)
    if x.shape == shape or not (set(map(str, x.shape + shape)) - {"1"}):
        return graph.reshape(x, shape)
    if x.op == "Unsqueeze" and x.node.inputs[0].shape == shape:
        return x.node.inputs[0]
    for op, short, long in (("Unsqueeze", x.shape, shape), ("Squeeze", shape, x.shape)):
        axes = _ones(short, long)
        if axes is not None:
            at = graph.constant(np.array(axes, np.int64))
            return graph.emit(op, [x, at], shape, x.dtype)
    return graph.reshape(x, shape)


def _ones(short: Sequence[Any], long: Sequence[Any]) -> list[int] | None:
    """Return the additional axes of size 1 in `long`; None if other axes differ."""
    axes, rest = [], list(short)
    for i, size in enumerate(long):
        if rest and size == rest[0]:
            rest.pop(0)
        elif size == 1:
            axes.append(i)
        else:
            return None
    return None if rest or not axes else axes


def reshape(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    return [reshape_to(graph, x, eqn.params["new_sizes"])]


def squeeze(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    return [reshape_to(graph, x, eqn.outvars[0].aval.shape)]


def transpose(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    return [graph.transpose(inputs[0], eqn.params["permutation"])]


def concatenate(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    out, axis = eqn.outvars[0].aval, eqn.params["dimension"]
    parts = whole(graph, inputs, eqn)
    return [graph.emit("Concat", parts, out.shape, out.dtype, axis=axis)]


def split(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    sizes = graph.constant(np.array(eqn.params["sizes"], np.int64))
    outputs = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return graph.emit_many("Split", [x, sizes], outputs, axis=eqn.params["axis"])


def take_slice(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    begin, end = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(begin)
    axes = np.arange(len(begin), dtype=np.int64)
    limits = [graph.shape(begin), graph.shape(end), graph.constant(axes)]
    given = [x, *limits, graph.constant(np.array(steps, np.int64))]
    out = eqn.outvars[0].aval
    return [graph.emit("Slice", given, out.shape, out.dtype)]


def iota(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    end = graph.reshape(graph.size(shape[axis]), ())
    begin, step = (graph.constant(np.array(n, np.int64)) for n in (0, 1))
    x = graph.emit("Range", [begin, end, step], (shape[axis],), np.int64)
    x = graph.cast(x, eqn.params["dtype"])
    return [reshape_to(graph, x, [n if i == axis else 1 for i, n in enumerate(shape)])]


def dim_as_value(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    size = graph.reshape(graph.size(eqn.params["dim"]), ())
    return [graph.cast(size, eqn.outvars[0].aval.dtype)]


# ---------------------------------------------------------------- sums and products
def reduction(op: str) -> Lower:
    """Lower to an operator that reduces some axes."""

    def lower(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
        [x] = whole(graph, inputs, eqn)
        out = eqn.outvars[0].aval
        axes = graph.constant(np.array(eqn.params["axes"], np.int64))
        return [graph.emit(op, [x, axes], out.shape, out.dtype, keepdims=0)]

    return lower


def argmax(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    [axis], out = eqn.params["axes"], eqn.outvars[0].aval
    found = graph.emit("ArgMax", [x], out.shape, np.int64, axis=axis, keepdims=0)
    return [graph.cast(found, out.dtype)]


def dot_general(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    """Lower to MatMul, with the operands in the order that moves fewer axes."""
    (at_a, at_b), (rows_a, rows_b) = eqn.params["dimension_numbers"]
    a, b = whole(graph, inputs, eqn)
    out = eqn.outvars[0].aval
    free_a = [i for i in range(len(a.shape)) if i not in (*at_a, *rows_a)]
    free_b = [i for i in range(len(b.shape)) if i not in (*at_b, *rows_b)]
    if len(at_a) != 1 or len(free_b) != 1 or (rows_a and len(free_a) != 1):
        return unknown(graph, inputs, eqn)
    n = len(rows_a)
    if n and at_b[0] == len(b.shape) - 1 and at_a[0] != len(a.shape) - 1:
        left = graph.transpose(b, [*rows_b, *free_b, *at_b])
        right = graph.transpose(a, [*rows_a, *at_a, *free_a])
        shape = [*out.shape[:n], out.shape[-1], out.shape[-2]]
        y = graph.emit("MatMul", [left, right], shape, out.dtype)
        return [graph.transpose(y, [*range(n), n + 1, n])]
    left = graph.transpose(a, [*rows_a, *free_a, *at_a])
    right = graph.transpose(b, [*rows_b, *at_b, *free_b])
    return [graph.emit("MatMul", [left, right], out.shape, out.dtype)]


# ---------------------------------------------------------------- places
def gather(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    """Lower gathers of table rows, of a known position or slice, or within rows."""
    table, at = whole(graph, inputs, eqn)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out, rank = eqn.outvars[0].aval, len(table.shape)
    axes, collapsed = numbers.start_index_map, numbers.collapsed_slice_dims
    is_batched = numbers.operand_batching_dims == (0,)
    if is_batched and axes == collapsed == (1,) and sizes[2:] == table.shape[2:]:
        given = [table, graph.cast(at, np.int64)]
        return [graph.emit("GatherND", given, out.shape, out.dtype, batch_dims=1)]
    along = {i for i in range(rank) if sizes[i] != table.shape[i]} | {*axes}
    if numbers.operand_batching_dims or len(axes) != 1 or along != {*axes}:
        return unknown(graph, inputs, eqn)
    [axis] = axes
    index = reshape_to(graph, at, at.shape[:-1])
    if collapsed == () and at.constant is not None:
        begin = int(at.constant.reshape(()))
        ends = [graph.size(begin), graph.size(begin + sizes[axis])]
        at_axis = graph.constant(np.array([axis], np.int64))
        return [graph.emit("Slice", [table, *ends, at_axis], out.shape, out.dtype)]
    last = tuple(range(len(out.shape) - rank + 1, len(out.shape)))
    is_row = axis == 0 and numbers.offset_dims == last
    if collapsed != (axis,) or not (is_row or index.shape == ()):
        return unknown(graph, inputs, eqn)
    if table.op == "Unsqueeze" and table.shape[axis] == 1 and index.shape == ():
        return [reshape_to(graph, table, out.shape)]
    return [graph.emit("Gather", [table, index], out.shape, out.dtype, axis=axis)]


def top_k(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    [x] = whole(graph, inputs, eqn)
    values, places = (v.aval for v in eqn.outvars)
    count = graph.constant(np.array([eqn.params["k"]], np.int64))
    outputs = [(values.shape, values.dtype), (places.shape, np.int64)]
    best, at = graph.emit_many("TopK", [x, count], outputs, axis=-1)
    return [best, graph.cast(at, places.dtype)]


UNKNOWN = "?"  # prefix of operators that are refused if an output needs them


def unknown(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    """Stand in for a primitive without an operator; no output may depend on it."""
    outputs = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return graph.emit_many(f"{UNKNOWN}{eqn.primitive.name}", inputs, outputs)


PRIMITIVES: dict[str, Lower] = {
    **{
        name: elementwise(op)
        for name, op in {
            "add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div",
            "max": "Max", "min": "Min", "pow": "Pow", "neg": "Neg", "abs": "Abs",
            "sign": "Sign", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "erf": "Erf",
            "tanh": "Tanh", "logistic": "Sigmoid", "cos": "Cos", "sin": "Sin",
            "floor": "Floor", "and": "And", "or": "Or", "not": "Not", "xor": "Xor",
            "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
            "ge": "GreaterOrEqual",
        }.items()
    },
    **{
        name: reduction(op)
        for name, op in {
            "reduce_sum": "ReduceSum", "reduce_max": "ReduceMax",
            "reduce_min": "ReduceMin",
        }.items()
    },
    **dict.fromkeys(
        ("stop_gradient", "name", "copy", "copy_p", "optimization_barrier"), identity
    ),
    "ne": not_equal, "rsqrt": rsqrt, "integer_pow": integer_pow,
    "square": integer_pow, "select_n": select_n, "clamp": clamp,
    "convert_element_type": convert_element_type,
    "broadcast_in_dim": broadcast_in_dim, "reshape": reshape, "squeeze": squeeze,
    "transpose": transpose, "concatenate": concatenate, "split": split,
    "slice": take_slice, "iota": iota, "dim_as_value": dim_as_value,
    "argmax": argmax, "dot_general": dot_general, "gather": gather, "top_k": top_k,
}  # fmt: skip


def lower(graph: Graph, inputs: list[Value], eqn: Any) -> list[Value]:
    """Return the outputs of a jaxpr's equation for these input values."""
    return PRIMITIVES.get(eqn.primitive.name, unknown)(graph, inputs, eqn)

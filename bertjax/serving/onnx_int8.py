# SPDX-License-Identifier: Apache-2.0
"""Quantize weights to 8 bits: an ONNX graph with a quarter of the bytes.

Weights are rounded to 255 levels around 0. A matrix has one scale per column; embedding
tables have one per row, which also suits a tied head. The inputs of a matrix are
rounded at run time with one scale per token (ZeroQuant, arXiv 2206.01861, section 4.1).
So the outputs for a text do not depend on other texts of its batch or on padding, as
they do if all inputs of a matrix share one scale (onnxruntime.quantization).

The inputs of a matrix are unsigned, with zero at 128. Weights are signed (int8), which
is fast on processors with VNNI. Without VNNI, products of unsigned and signed bytes are
added in pairs in 16 bits, which may saturate. With unsigned weights (uint8) onnxruntime
adds in 32 bits on every processor, but does not use VNNI.
"""

import numpy as np

from bertjax.serving.onnx_graph import Graph, Node, Value

LEVELS = 127
MIDDLE = 128  # the level of zero of unsigned bytes
KINDS = {"int8": np.int8, "uint8": np.uint8}  # of weights
NARROW = 16  # matrices with fewer columns stay unchanged, such as a task's classes


def quantize(graph: Graph, kind: str) -> None:
    """Quantize the matrices of products, and tables that are gathered, to 8 bits.

    Changes the graph in place, but not norms, biases, positions and narrow heads. kind:
    a key of KINDS.
    """
    replaced: dict[int, Value] = {}
    tables: dict[int, tuple[Value, Value]] = {}

    def now(value: Value | None) -> Value | None:
        return replaced.get(id(value), value)

    for node in graph.nodes():
        inputs = [now(value) for value in node.inputs]
        table = inputs[0] if node.op == "Gather" else weights_of(node)
        if table is not None and is_large(table):
            # A [K, N] matrix has one scale per column; embedding tables and their
            # transposes have one per row.
            axis = 0 if node.op == "MatMul" and inputs[1] is table else 1
            if id(table) not in tables:
                tables[id(table)] = rounded(graph, table, axis, kind)
            make = take_rows if node.op == "Gather" else multiply
            replaced[id(node.outputs[0])] = make(graph, node, inputs, tables[id(table)])
        elif inputs != list(node.inputs):
            kinds = [(value.shape, value.dtype) for value in node.outputs]
            renewed = graph.emit_many(node.op, inputs, kinds, **node.attributes)
            pairs = zip(node.outputs, renewed, strict=True)
            replaced |= {id(old): new for old, new in pairs}
    graph.outputs = {name: now(value) for name, value in graph.outputs.items()}


def weights_of(node: Node) -> Value | None:
    """Return the matrix of a product (a constant or the transpose of one), or None."""
    if node.op != "MatMul":
        return None
    right = node.inputs[1]
    return right.node.inputs[0] if right.op == "Transpose" else right


def is_large(table: Value) -> bool:
    """Return whether a value is a constant float matrix worth quantizing."""
    is_matrix = table.constant is not None and len(table.shape) == 2
    return is_matrix and table.dtype == np.float32 and min(table.shape) >= NARROW


def rounded(graph: Graph, table: Value, axis: int, kind: str) -> tuple[Value, Value]:
    """Return a table in 8 bits, and the scales of its columns (axis 0) or rows (1)."""
    numbers = table.constant
    scale = np.abs(numbers).max(axis, keepdims=True) / LEVELS
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    levels = (np.rint(numbers / scale) + zero_of(KINDS[kind])).astype(KINDS[kind])
    return (
        graph.constant(levels, f"{table.name}/{kind}"),
        graph.constant(scale.reshape(-1), f"{table.name}/scale"),
    )


def zero_of(dtype: np.dtype | type) -> int:
    """Return the level of zero of signed or unsigned bytes."""
    return 0 if dtype == np.int8 else MIDDLE


def multiply(
    graph: Graph, node: Node, inputs: list[Value], table: tuple[Value, Value]
) -> Value:
    """Multiply by a matrix in integers, with rows of x scaled by their maximum."""
    (x, _), (levels, scale), [out] = inputs, table, node.outputs
    rows, axes = (*x.shape[:-1], 1), graph.constant(np.array([-1], np.int64))
    sizes = graph.emit("Abs", [x], x.shape, np.float32)
    largest = graph.emit("ReduceMax", [sizes, axes], rows, np.float32, keepdims=1)
    least = graph.constant(np.float32(1e-9))  # for a row of zeros
    largest = graph.emit("Max", [largest, least], rows, np.float32)
    share = graph.constant(np.float32(1 / LEVELS))
    own = graph.emit("Mul", [largest, share], rows, np.float32)
    x = graph.emit("Div", [x, own], x.shape, np.float32)
    one, middle = graph.constant(np.float32(1)), graph.constant(np.uint8(MIDDLE))
    x = graph.emit("QuantizeLinear", [x, one, middle], x.shape, np.uint8)
    if node.inputs[1].op == "Transpose":
        levels = graph.transpose(levels, [1, 0])
    zero = graph.constant(np.array(zero_of(levels.dtype), levels.dtype))
    pair = [x, levels, middle, zero]
    sums = graph.emit("MatMulInteger", pair, out.shape, np.int32)
    y = graph.emit("Mul", [graph.cast(sums, np.float32), scale], out.shape, np.float32)
    return graph.emit("Mul", [y, own], out.shape, out.dtype)


def take_rows(
    graph: Graph, node: Node, inputs: list[Value], table: tuple[Value, Value]
) -> Value:
    """Gather rows of an 8-bit table, and scale them."""
    (_, at), (levels, scale), [out] = inputs, table, node.outputs
    rows = graph.emit("Gather", [levels, at], out.shape, levels.dtype, axis=0)
    x = graph.cast(rows, np.float32)
    if zero := zero_of(levels.dtype):
        middle = graph.constant(np.float32(zero))
        x = graph.emit("Sub", [x, middle], out.shape, np.float32)
    own = graph.emit("Gather", [scale, at], at.shape, np.float32, axis=0)
    axes = graph.constant(np.array([-1], np.int64))
    own = graph.emit("Unsqueeze", [own, axes], (*at.shape, 1), np.float32)
    return graph.emit("Mul", [x, own], out.shape, out.dtype)

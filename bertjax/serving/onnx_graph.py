# SPDX-License-Identifier: Apache-2.0
"""Build a graph of ONNX operators: values, nodes, and sizes known at run time.

Nothing here needs the onnx package until the graph is written (`serialize`).
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax import UserError

OPSET = 20  # the first with Gelu; also has LayerNormalization
IR_VERSION = 10
LARGEST = 2**31 - 2**16  # bytes of a protocol buffer, minus room for everything else
ARITHMETIC: Mapping[type, str] = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of the graph.

    shape: of ints and symbolic sizes (jax.export). constant: its value, if known; node:
    the operator that computes it, None for inputs and constants.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: np.dtype
    constant: np.ndarray | None = None
    node: "Node | None" = None

    @property
    def op(self) -> str:
        """The operator that computes it, or ""."""
        return self.node.op if self.node else ""


@dataclasses.dataclass(eq=False)
class Node:
    """An operator with its inputs; None for an optional input that is omitted."""

    op: str
    inputs: tuple[Value | None, ...]
    attributes: dict[str, Any]
    outputs: list[Value] = dataclasses.field(default_factory=list)


class Graph:
    """Nodes in order of computation; equal nodes are shared."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.outputs: dict[str, Value] = {}
        self.sizes: dict[str, Value] = {}  # of symbolic sizes, i64 [1]
        self._known: dict[Any, list[Value]] = {}
        self._constants: dict[Any, Value] = {}
        self._names: set[str] = set()

    # ------------------------------------------------------------ values
    def add_input(self, name: str, shape: Sequence[Any], dtype: Any) -> Value:
        """Add an input and return it; its symbolic sizes are known from then on."""
        value = Value(self.new_name(name), tuple(shape), np.dtype(dtype))
        self.inputs.append(value)
        for axis, size in enumerate(shape):
            if not isinstance(size, int) and str(size) not in self.sizes:
                ends = {"start": axis, "end": axis + 1}
                shape_of = self.emit("Shape", [value], (1,), np.int64, **ends)
                self.sizes[str(size)] = shape_of
        return value

    def add_output(self, name: str, value: Value) -> None:
        """Name a value that the graph returns."""
        self.outputs[self.new_name(name)] = value

    def constant(self, array: Any, name: str = "") -> Value:
        """Return a constant; equal small constants without a name are shared."""
        array = np.asarray(array)
        key = None
        if array.size <= 64 and not name:
            key = array.dtype.str, array.shape, array.tobytes()
            if key in self._constants:
                return self._constants[key]
        name = self.new_name(name or "constant")
        value = Value(name, array.shape, array.dtype, array)
        if key:
            self._constants[key] = value
        return value

    def new_name(self, name: str) -> str:
        """Return the name, with a number appended if it is taken."""
        unique, n = name, 1
        while unique in self._names:
            unique, n = f"{name}_{n}", n + 1
        self._names.add(unique)
        return unique

    # ------------------------------------------------------------ nodes
    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        shape: Sequence[Any],
        dtype: Any,
        **attributes: Any,
    ) -> Value:
        """Add an operator with one output, and return that output."""
        return self.emit_many(op, inputs, [(shape, dtype)], **attributes)[0]

    def emit_many(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[tuple[Sequence[Any], Any]],
        **attributes: Any,
    ) -> list[Value]:
        """Add an operator, and return a value for each (shape, dtype) in `outputs`."""
        key = op, tuple(map(id, inputs)), repr(sorted(attributes.items()))
        if key not in self._known:
            node = Node(op, tuple(inputs), attributes)
            node.outputs = [
                Value(
                    self.new_name(op.lower()), tuple(shape), np.dtype(dtype), None, node
                )
                for shape, dtype in outputs
            ]
            self._known[key] = node.outputs
        return self._known[key]

    # ------------------------------------------------------------ shapes
    def size(self, size: Any) -> Value:
        """Return a size (a number, or sums and products of symbolic ones), i64 [1]."""
        if isinstance(size, int):
            return self.constant(np.array([size], np.int64))
        return self._size_of(ast.parse(str(size), mode="eval").body, str(size))

    def _size_of(self, tree: ast.expr, whole: str) -> Value:
        if isinstance(tree, ast.Constant):
            return self.constant(np.array([tree.value], np.int64))
        if isinstance(tree, ast.Name) and tree.id in self.sizes:
            return self.sizes[tree.id]
        if isinstance(tree, ast.BinOp) and type(tree.op) in ARITHMETIC:
            sides = [self._size_of(side, whole) for side in (tree.left, tree.right)]
            return self.emit(ARITHMETIC[type(tree.op)], sides, (1,), np.int64)
        raise UserError(f"--format=onnx: the model has an array of size {whole}")

    def shape(self, sizes: Sequence[Any]) -> Value:
        """Return a shape as i64 [n]."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(np.array(sizes, np.int64))
        parts = [self.size(size) for size in sizes]
        return self.emit("Concat", parts, (len(parts),), np.int64, axis=0)

    def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
        """Return x in another shape of equal size; one axis may be -1 in the file."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if x.op == "Reshape":
            return self.reshape(x.node.inputs[0], shape)
        unknown = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        sizes = [-1 if i in unknown[:1] else size for i, size in enumerate(shape)]
        target = self.shape(sizes if len(unknown) == 1 else shape)
        return self.emit("Reshape", [x, target], shape, x.dtype)

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """Return x with its axes in another order."""
        if x.op == "Transpose":
            before = x.node.attributes["perm"]
            return self.transpose(x.node.inputs[0], [before[i] for i in order])
        if list(order) == sorted(order):
            return x
        shape = [x.shape[i] for i in order]
        return self.emit("Transpose", [x], shape, x.dtype, perm=list(order))

    def expand(self, x: Value, shape: Sequence[Any]) -> Value:
        """Broadcast x to a shape of the same rank, or a scalar to any shape."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        return self.emit("Expand", [x, self.shape(shape)], shape, x.dtype)

    def cast(self, x: Value, dtype: Any) -> Value:
        """Return x in another dtype."""
        dtype = np.dtype(dtype)
        if x.dtype == dtype:
            return x
        return self.emit("Cast", [x], x.shape, dtype, to=dtype.name)

    # ------------------------------------------------------------ the whole
    def nodes(self) -> list[Node]:
        """List the nodes that the outputs need, each after its inputs."""
        done: dict[int, Node] = {}
        # Without recursion, because graphs are deeper than Python's limit.
        waiting = [value.node for value in self.outputs.values() if value.node]
        while waiting:
            node = waiting[-1]
            needs = [x.node for x in node.inputs if x is not None and x.node]
            missing = [n for n in needs if id(n) not in done]
            if missing and id(node) not in done:
                waiting += missing
            else:
                done[id(waiting.pop())] = node
        return list(done.values())


def serialize(graph: Graph, about: str) -> bytes:
    """Return the graph as an ONNX file. Raises UserError if it would be too large.

    about: the file's doc string.
    """
    import onnx
    from onnx import helper, numpy_helper

    nodes, outputs = graph.nodes(), graph.outputs.items()
    used = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    used |= dict.fromkeys(graph.outputs.values())
    constants = [value for value in used if value.constant is not None]
    size = sum(value.constant.nbytes for value in constants)
    if size > LARGEST:
        raise UserError(f"--format=onnx: {size:,} bytes are more than one file takes")

    def describe(name: str, value: Value) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        shape = [size if isinstance(size, int) else str(size) for size in value.shape]
        return helper.make_tensor_value_info(name, kind, shape)

    def make_node(node: Node) -> Any:
        values = dict(node.attributes)
        if node.op == "Cast":
            values["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(values["to"]))
        return helper.make_node(
            node.op,
            [value.name if value is not None else "" for value in node.inputs],
            [value.name for value in node.outputs],
            **values,
        )

    contents = helper.make_graph(
        # An output may be an input or another output, so each gets its own node.
        [make_node(node) for node in nodes]
        + [helper.make_node("Identity", [v.name], [k]) for k, v in outputs],
        "bertjax",
        [describe(value.name, value) for value in graph.inputs],
        [describe(name, value) for name, value in outputs],
        [numpy_helper.from_array(value.constant, value.name) for value in constants],
    )
    model = helper.make_model(
        contents,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="bertjax",
        doc_string=about,
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()

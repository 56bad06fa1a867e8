# SPDX-License-Identifier: Apache-2.0
"""Merge groups of ONNX operators into one: layer norms and GELU.

onnxruntime has kernels for them; computed in parts, they take as much time as the
matrix products of a narrow model. Each group is found from its last operator backward.
"""

import math

import numpy as np

from bertjax.serving.onnx_graph import Graph, Value


def simplify(graph: Graph, value: Value) -> Value:
    """Return an equal value, computed by a merged operator if one is known."""
    if value.op == "Mul":
        return (
            layer_norm(graph, value)
            or scaled_norm(graph, value)
            or gelu(graph, value)
            or value
        )
    if value.op == "Add":
        return shifted_norm(graph, value) or value
    return value


def parts(value: Value | None, op: str) -> list[Value]:
    """Return the inputs of a value if `op` computes it, otherwise none."""
    if value is None or value.op != op:
        return []
    return [x for x in value.node.inputs if x is not None]


def either(value: Value | None, op: str) -> list[tuple[Value, Value]]:
    """Return the two inputs as pairs in both orders."""
    found = parts(value, op)
    return [(found[0], found[1]), (found[1], found[0])] if len(found) == 2 else []


def number(value: Value) -> float | None:
    """Return the value of a constant with one number; None for anything else."""
    if value.constant is None or value.constant.size != 1:
        return None
    return float(value.constant.reshape(()))


def mean_of(value: Value | None) -> Value | None:
    """Return x if a value is the mean of x [..., D] over its last axis, kept."""
    quotient = parts(value, "Div")
    if len(quotient) != 2:
        return None
    total = quotient[0]
    while total.op in ("Unsqueeze", "Reshape"):
        total = total.node.inputs[0]
    summed = parts(total, "ReduceSum")
    if not summed:
        return None
    x, axes = summed
    last = len(x.shape) - 1
    is_last = axes.constant is not None and axes.constant.tolist() == [last]
    is_whole = quotient[0].shape == (*x.shape[:-1], 1)
    return x if is_last and is_whole and number(quotient[1]) == x.shape[-1] else None


def layer_norm(graph: Graph, value: Value) -> Value | None:
    """Match y / sqrt(mean(y^2) + eps) where y = x - mean(x)."""
    for y, factor in either(value, "Mul"):
        [root] = parts(factor, "Reciprocal") or [None]
        [total] = parts(root, "Sqrt") or [None]
        for variance, eps in either(total, "Add"):
            squared = parts(mean_of(variance), "Mul")
            difference = parts(y, "Sub")
            if squared != [y, y] or len(difference) != 2 or number(eps) is None:
                continue
            x, mean = difference
            if mean_of(mean) is x:
                ones = graph.constant(np.ones(x.shape[-1], np.float32))
                return norm(graph, x, ones, None, number(eps))
    return None


def norm(
    graph: Graph, x: Value, scale: Value, bias: Value | None, eps: float | None
) -> Value:
    inputs = [x, scale, *([] if bias is None else [bias])]
    return graph.emit(
        "LayerNormalization", inputs, x.shape, x.dtype, axis=-1, epsilon=eps
    )


def scaled_norm(graph: Graph, value: Value) -> Value | None:
    """Merge a multiplication into a norm without a scale."""
    for y, scale in either(value, "Mul"):
        found = parts(y, "LayerNormalization")
        is_plain = len(found) == 2 and np.all(found[1].constant == 1.0)
        if is_plain and is_vector(scale, y):
            eps = y.node.attributes["epsilon"]
            return norm(graph, found[0], flat(graph, scale), None, eps)
    return None


def shifted_norm(graph: Graph, value: Value) -> Value | None:
    """Merge an addition into a norm without a bias."""
    for y, bias in either(value, "Add"):
        found = parts(y, "LayerNormalization")
        if len(found) == 2 and is_vector(bias, y):
            eps = y.node.attributes["epsilon"]
            return norm(graph, found[0], found[1], flat(graph, bias), eps)
    return None


def is_vector(value: Value, y: Value) -> bool:
    """Return whether a value is a constant vector as long as y's last axis."""
    width = y.shape[-1]
    return value.constant is not None and (
        value.constant.size == width and value.shape[-1:] == (width,)
    )


def flat(graph: Graph, value: Value) -> Value:
    if len(value.shape) == 1:
        return value
    return graph.constant(value.constant.reshape(-1), value.name)


def gelu(graph: Graph, value: Value) -> Value | None:
    """Match x/2 (1 + erf(x / sqrt 2))."""
    for half, rest in either(value, "Mul"):
        for x, factor in either(half, "Mul"):
            if number(factor) != 0.5:
                continue
            for one, error in either(rest, "Add"):
                if number(one) != 1.0:
                    continue
                for y, scale in either((parts(error, "Erf") or [None])[0], "Mul"):
                    near = math.isclose(number(scale) or 0, 0.5**0.5, rel_tol=1e-6)
                    if y is x and near:
                        return graph.emit("Gelu", [x], x.shape, x.dtype)
    return None

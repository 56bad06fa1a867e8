# SPDX-License-Identifier: Apache-2.0
"""Compression of an encoder in place, layer by layer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.compression.hessians import Batch, Walk
from bertjax.compression.methods import Recipe
from bertjax.compression.packed import Form, PackedMatrix, pack_matrix
from bertjax.compression.quantize import Quantized, dequantize, output_error
from bertjax.data.progress import Progress
from bertjax.models.config import EncoderConfig
from bertjax.models.stacked_layers import take_layer

# Tap (models/transformer_layer.py) -> the matrices that are multiplied with its input.
MATRICES = {
    "attention/query": ("attention/query", "attention/key", "attention/value"),
    "attention/output": ("attention/output",),
    "mlp/up": ("mlp/up", "mlp/gate"),
    "mlp/down": ("mlp/down",),
}
TABLES = ("word", "position", "token_type")


class Compressed(NamedTuple):
    """The result of a compression.

    forms: the forms of the compressed leaves, by path; the others are dense. weights,
    zeros: the number of weights in the layers' matrices, and of zeros among them.
    error: the mean over matrices of the relative error of their outputs, tr(E^T H E) /
    tr(W^T H W); None if no texts were read. tokens: the real tokens that were read.
    """

    forms: dict[str, Form]
    weights: int
    zeros: int
    error: float | None
    tokens: int


def check_model(cfg: EncoderConfig, what: str) -> None:
    """Raise UserError for models that are not supported; `what` begins the message."""
    if cfg.num_decoder_layers:
        raise UserError(f"{what} is an encoder-decoder, which is not compressed")


def compress_model(
    params: dict[str, Any], cfg: EncoderConfig, recipe: Recipe, batches: Sequence[Batch]
) -> Compressed:
    """Compress the encoder of `params` (numpy arrays f32) in place.

    It compresses the matrices of the layers, and tables as recipe.embeddings says;
    heads, biases, norms and projections do not change. Each layer's calibration inputs
    are the outputs of the compressed layers before it. Layers that share parameters
    (ALBERT) are compressed once, with the inputs at all their depths. Raises UserError
    for weights or inputs that are not finite, and for a pattern that does not fit.
    """
    encoder, forms = params["encoder"], compress_tables(params, recipe)
    encoder["layers"] = writable(encoder["layers"])
    groups = cfg.groups[-1] + 1
    walk = None
    if recipe.calibrated:
        walk = Walk(encoder["embeddings"], cfg, batches)
    matrices: dict[str, list[PackedMatrix | None]] = {}
    errors: list[float] = []
    with Progress("compress", total=groups, unit="layers") as progress:
        for group in range(groups):
            depths = [d for d, own in enumerate(cfg.groups) if own == group]
            layer = take_layer(encoder["layers"], group, groups)
            hessians = walk.hessians(layer, depths) if walk else {}
            for tap, paths in MATRICES.items():
                for path in paths:
                    where, name = path.split("/")
                    if name not in layer[where]:
                        continue
                    kernel = layer[where][name]["kernel"]
                    hessian = hessians.get(tap)
                    packed, lost = compress_kernel(kernel, path, recipe, hessian)
                    errors += lost
                    matrices.setdefault(path, []).append(packed)
            if walk and group < groups - 1:
                walk.advance(layer, depths)
            progress.add(1)
    weights, zeros = 0, 0
    for path, slots in matrices.items():
        where, name = path.split("/")
        leaf = encoder["layers"][where][name]["kernel"]
        weights += leaf.size
        zeros += leaf.size - int(np.count_nonzero(leaf))
        width = inputs_of(path, leaf[0])
        full = f"encoder/layers/{path}/kernel"
        forms[full] = make_form(recipe, False, width, slots)
    error = float(np.mean(errors)) if errors else None
    return Compressed(forms, weights, zeros, error, walk.tokens if walk else 0)


def compress_kernel(
    kernel: np.ndarray, path: str, recipe: Recipe, hessian: np.ndarray | None
) -> tuple[PackedMatrix | None, list[float]]:
    """Compress a kernel in place.

    Returns its packed codes (None if it is pruned), and a list with the relative error
    of its outputs, which is empty without a Hessian.
    """
    weights = kernel.reshape(inputs_of(path, kernel), -1)
    if not np.isfinite(weights).all():
        raise UserError(f"--model: weights of {path} are not finite (NaN)")
    try:
        small = recipe.compress(weights, hessian)
    except np.linalg.LinAlgError as e:
        raise UserError(f"--model: the inputs of {path}: {e}") from None
    new = dequantize(small) if isinstance(small, Quantized) else small
    errors = []
    if hessian is not None:
        whole = output_error(weights, np.zeros_like(weights), hessian)
        errors = [output_error(weights, new, hessian) / whole] if whole else []
    kernel[...] = new.reshape(kernel.shape)
    packed = pack_matrix(small) if isinstance(small, Quantized) else None
    return packed, errors


def compress_tables(params: dict[str, Any], recipe: Recipe) -> dict[str, Form]:
    """Compress the embedding tables in place; return their forms by path."""
    tables = params["encoder"]["embeddings"]
    places = {f"encoder/embeddings/{name}": (tables, name) for name in TABLES}
    places["mlm/decoder"] = params.get("mlm", {}), "decoder"
    forms = {}
    for path, (parent, name) in places.items():
        if name not in parent:
            continue
        small = recipe.compress_table(parent[name])
        if small is None:
            continue
        is_quantized = isinstance(small, Quantized)
        new = dequantize(small) if is_quantized else small
        parent[name] = np.ascontiguousarray(new.T)
        packed = [pack_matrix(small)] if is_quantized else []
        forms[path] = make_form(recipe, True, len(new), packed)
    return forms


def make_form(
    recipe: Recipe, is_table: bool, inputs: int, packed: Sequence[PackedMatrix | None]
) -> Form:
    if matrices := tuple(one for one in packed if one is not None):
        return Form("quantized", is_table, inputs, matrices)
    pattern = recipe.pattern
    name = "2:4" if pattern is not None and pattern.group else "sparse"
    return Form(name, is_table, inputs)


def inputs_of(path: str, kernel: np.ndarray) -> int:
    """Return the number of inputs of a kernel [D, H, K], [H, K, D] or [D, M]."""
    if path == "attention/output":
        return kernel.shape[0] * kernel.shape[1]
    return kernel.shape[0]


def writable(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of writable f32 arrays, copied only if necessary."""
    return {
        key: writable(leaf)
        if isinstance(leaf, Mapping)
        else np.require(leaf, np.float32, ["C", "W"])
        for key, leaf in tree.items()
    }

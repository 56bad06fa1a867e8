# SPDX-License-Identifier: Apache-2.0
"""Compress an encoder in place, layer by layer."""

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

# What is seen at a tap (models/transformer_layer.py) -> the matrices that it meets.
MATRICES = {
    "attention/query": ("attention/query", "attention/key", "attention/value"),
    "attention/output": ("attention/output",),
    "mlp/up": ("mlp/up", "mlp/gate"),
    "mlp/down": ("mlp/down",),
}
TABLES = ("word", "position", "token_type")


class Compressed(NamedTuple):
    """What was done to a model.

    forms: of the compressed leaves, by path; the others are dense. weights, zeros: of
    the layers' matrices, how many there are, and how many are 0. error: the mean over
    matrices of what their outputs lost, tr(E^T H E) / tr(W^T H W); None where no
    texts were read. tokens: real ones that were.
    """

    forms: dict[str, Form]
    weights: int
    zeros: int
    error: float | None
    tokens: int


def check_model(cfg: EncoderConfig, what: str) -> None:
    """Refuse what is not compressed: UserError beginning with `what`."""
    if cfg.num_decoder_layers:
        raise UserError(f"{what} is an encoder-decoder, which is not compressed")


def compress_model(
    params: dict[str, Any],
    cfg: EncoderConfig,
    recipe: Recipe,
    batches: Sequence[Batch],
) -> Compressed:
    """Compress the encoder of `params`, numpy arrays f32 that are written to.

    Matrices of the layers, and tables as recipe.embeddings says; heads, biases, norms
    and projections stay. Each layer's inputs are those that the compressed layers
    before it make of the batches. Layers that share their parameters (ALBERT) are
    compressed once, by the inputs at all depths. Raises UserError.
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
    """Replace a kernel's weights in place; returns its codes (None of a pruned one) and
    what its outputs lost, [] where nothing says."""
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
    """Compress the tables of embeddings in place; returns their forms by path."""
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
    """Return how many inputs a layer's kernel has: [D, H, K], [H, K, D] or [D, M]."""
    if path == "attention/output":
        return kernel.shape[0] * kernel.shape[1]
    return kernel.shape[0]


def writable(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of f32 arrays that can be written to, copies where they must be."""
    return {
        key: writable(leaf)
        if isinstance(leaf, Mapping)
        else np.require(leaf, np.float32, ["C", "W"])
        for key, leaf in tree.items()
    }

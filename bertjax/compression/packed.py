# SPDX-License-Identifier: Apache-2.0
"""The packed file, which stores every parameter in as few bytes as its form allows.

It is a safetensors file. Its metadata has the format, the recipe and the form of each
leaf. A leaf "a/b" has the tensors "a/b.PART", with these parts by form:

    dense       values f32: the leaf itself
    quantized   codes u32 [slots, words], zeros u32 [slots, words], scales f16 [slots,
                groups, out], and for AWQ inputs f32 [slots, in] (quantize.Quantized)
    sparse      mask u8 [slots, bytes], 1 where a weight is not 0, values f32 [n]
    2:4         places u8 [slots, in out / 8]: for each group of four inputs two 2-bit
                indices, the first in the lower bits; values f32 [slots, in out / 2]

Slots are layers; a table has one. Codes fill words from the lowest bit on, so that 32
codes of 3 bits take 3 words. `read_packed` returns exactly the parameters of the
workdir that contains the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from bertjax import UserError
from bertjax.compression.quantize import Quantized, dequantize
from bertjax.interop.tensor_layout import unflatten

FILE = "packed.safetensors"
FORMAT = "bertjax-packed-1"
# Codes that are packed per step: a multiple of 32, so that they end at a word boundary.
CODES = 2**18
DTYPES = {"F32": "<f4", "U32": "<u4", "F16": "<f2", "U8": "u1"}  # widest first


# ---------------------------------------------------------------- bits
def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack whole numbers below 2^bits, u8 [n], into u32 [ceil(n bits / 32)].

    >>> pack_bits(np.array([1, 2, 7], np.uint8), 3)  # 0b111_010_001
    array([465], dtype=uint32)
    """
    values = values.reshape(-1)
    words = np.zeros(-(-len(values) * bits // 32), "<u4")
    stream, places = words.view(np.uint8), np.arange(bits, dtype=np.uint8)
    for first in range(0, len(values), CODES):
        planes = (values[first : first + CODES, None] >> places) & 1
        part = np.packbits(planes, bitorder="little")
        stream[first * bits // 8 :][: len(part)] = part
    return words


def unpack_bits(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Return the n numbers that `pack_bits` packed: u8 [n]."""
    stream = np.ascontiguousarray(words, "<u4").view(np.uint8)
    values = np.empty(n, np.uint8)
    for first in range(0, n, CODES):
        count = min(CODES, n - first)
        part = stream[first * bits // 8 :]
        planes = np.unpackbits(part, count=count * bits, bitorder="little")
        planes = np.packbits(planes.reshape(count, bits), axis=1, bitorder="little")
        values[first : first + count] = planes[:, 0]
    return values


def pack_pairs(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack a matrix [in, out] with at most two nonzeros per group of four inputs.

    Returns places u8 [in out / 8] and values f32 [in out / 2].
    """
    groups = np.ascontiguousarray(matrix.T).reshape(-1, 4)
    kept = np.sort(np.argsort(groups == 0, axis=1, kind="stable")[:, :2], axis=1)
    values = np.take_along_axis(groups, kept, axis=1)
    nibbles = (kept[:, 0] | kept[:, 1] << 2).astype(np.uint8)
    nibbles = np.pad(nibbles, (0, len(nibbles) % 2)).reshape(-1, 2)
    return nibbles[:, 0] | nibbles[:, 1] << 4, values.reshape(-1)


def unpack_pairs(
    places: np.ndarray, values: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Return the matrix [in, out] that `pack_pairs` packed."""
    pairs = values.reshape(-1, 2)
    nibbles = np.stack([places & 15, places >> 4], axis=1).reshape(-1)[: len(pairs)]
    groups = np.zeros((len(pairs), 4), np.float32)
    kept = np.stack([nibbles & 3, nibbles >> 2], axis=1).astype(np.int64)
    np.put_along_axis(groups, kept, pairs, axis=1)
    return groups.reshape(shape[::-1]).T


class PackedMatrix(NamedTuple):
    """A Quantized with codes and zeros packed into words, u32."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    inputs: np.ndarray | None
    group_size: int
    bits: int


def pack_matrix(q: Quantized) -> PackedMatrix:
    codes, zeros = (pack_bits(x.reshape(-1), q.bits) for x in (q.codes, q.zeros))
    return PackedMatrix(codes, zeros, q.scales, q.inputs, q.group_size, q.bits)


# ---------------------------------------------------------------- leaves
class Form(NamedTuple):
    """How a leaf is stored.

    name: dense, quantized, sparse or 2:4. is_table: the leaf is an embedding table [V,
    E], whose inputs are its columns, and not a stack of kernels. inputs: the number of
    inputs of its matrices. matrices: for a quantized leaf, one per slot.
    """

    name: str
    is_table: bool = False
    inputs: int = 0
    matrices: tuple[PackedMatrix, ...] = ()


DENSE = Form("dense")


def slots_of(leaf: np.ndarray, form: Form) -> list[np.ndarray]:
    """Return views of a leaf's matrices, [in, out] each."""
    if form.is_table:
        return [leaf.T]
    return [slot.reshape(form.inputs, -1) for slot in leaf]


class Tensor(NamedTuple):
    """A tensor to write; its parts, in order, are computed when they are written."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]


def tensors_of(leaf: np.ndarray, form: Form) -> dict[str, Tensor]:
    """Return the tensors of a leaf by the name of the part."""
    if form.name == "dense":
        return {"values": Tensor("F32", leaf.shape, lambda: iter([leaf]))}
    if form.name == "quantized":
        tensors = {}
        for part, dtype in (("codes", "U32"), ("zeros", "U32"), ("scales", "F16")):
            tensors[part] = _of_matrices(form, part, dtype)
        inputs = [matrix.inputs for matrix in form.matrices]
        if any(factors is not None for factors in inputs):
            ones = np.ones(form.inputs, np.float32)  # division by 1 changes nothing
            filled = [ones if factors is None else factors for factors in inputs]
            shape = len(filled), form.inputs
            tensors["inputs"] = Tensor("F32", shape, lambda: iter(filled))
        return tensors
    slots = slots_of(leaf, form)
    size = slots[0].size
    if form.name == "2:4":
        return {
            part: Tensor(
                dtype,
                (len(slots), -(-size // per)),
                lambda i=i: (pack_pairs(slot)[i] for slot in slots),
            )
            for i, part, dtype, per in ((0, "places", "U8", 8), (1, "values", "F32", 2))
        }
    shape = len(slots), -(-size // 8)
    masks = Tensor(
        "U8", shape, lambda: (np.packbits(s.reshape(-1) != 0) for s in slots)
    )
    kept = (int(np.count_nonzero(leaf)),)
    values = Tensor(
        "F32", kept, lambda: (s.reshape(-1)[s.reshape(-1) != 0] for s in slots)
    )
    return {"mask": masks, "values": values}


def _of_matrices(form: Form, part: str, dtype: str) -> Tensor:
    arrays = [getattr(matrix, part) for matrix in form.matrices]
    return Tensor(dtype, (len(arrays), *arrays[0].shape), lambda: iter(arrays))


def restore(
    form: str, about: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return a leaf, f32, from its tensors in the file."""
    if form == "dense":
        return tensors["values"]
    shape = tuple(about["shape"])
    leaf = np.zeros(shape, np.float32)
    kind = Form(form, about["is_table"], about["inputs"])
    first = 0
    for i, slot in enumerate(slots_of(leaf, kind)):
        if form == "quantized":
            slot[:] = _unpack_matrix(about, tensors, i, slot.shape)
        elif form == "2:4":
            slot[:] = unpack_pairs(
                tensors["places"][i], tensors["values"][i], slot.shape
            )
        else:
            mask = np.unpackbits(tensors["mask"][i], count=slot.size).astype(bool)
            count = int(mask.sum())
            flat = np.zeros(slot.size, np.float32)
            flat[mask] = tensors["values"][first : first + count]
            slot[:] = flat.reshape(slot.shape)
            first += count
    return leaf


def _unpack_matrix(
    about: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    i: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    bits, scales = about["bits"], tensors["scales"][i]
    codes = unpack_bits(tensors["codes"][i], bits, shape[0] * shape[1]).reshape(shape)
    zeros = unpack_bits(tensors["zeros"][i], bits, scales.size).reshape(scales.shape)
    inputs = tensors["inputs"][i] if "inputs" in tensors else None
    q = Quantized(codes, scales, zeros, inputs, about["group_size"], bits)
    return dequantize(q)


# ---------------------------------------------------------------- the file
def write_packed(
    path: Path,
    params: Mapping[str, np.ndarray],
    forms: Mapping[str, Form],
    recipe: Mapping[str, Any],
) -> int:
    """Write leaves by path, f32; those without a form are dense. Return the bytes.

    One slot at a time is packed and written, so that memory holds no second model.
    """
    tensors: dict[str, Tensor] = {}
    leaves: dict[str, dict[str, Any]] = {}
    for name, leaf in params.items():
        form = forms.get(name, DENSE)
        about: dict[str, Any] = {"form": form.name, "shape": list(leaf.shape)}
        if form.name != "dense":
            about |= {"is_table": form.is_table, "inputs": form.inputs}
        if form.matrices:
            one = form.matrices[0]
            about |= {"bits": one.bits, "group_size": one.group_size}
        leaves[name] = about
        parts = tensors_of(leaf, form)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    # Write wide dtypes first, so that all tensors are aligned to their width.
    order = sorted(tensors, key=lambda name: [*DTYPES].index(tensors[name].dtype))
    header: dict[str, Any] = {"__metadata__": {
        "format": FORMAT,
        "recipe": json.dumps(recipe),
        "leaves": json.dumps(leaves),
    }}  # fmt: skip
    at = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        end = at + int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for part in tensors[name].parts():
                file.write(np.ascontiguousarray(part, DTYPES[tensors[name].dtype]).data)
        size = file.tell()
    if size != 8 + len(text) + at:
        raise ValueError(f"{path}: {size} bytes were written, not {8 + len(text) + at}")
    return size


def read_packed(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters, a tree of f32 arrays, and the recipe of a packed file.

    path: the file, or the workdir that contains it. Raises UserError for other files.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{file} is not a packed model of format {FORMAT}")
            parts: dict[str, list[str]] = {}
            for name in opened.keys():  # noqa: SIM118 (no dict)
                leaf, _, part = name.rpartition(".")
                parts.setdefault(leaf, []).append(part)
            leaves = {}
            for name, about in json.loads(metadata["leaves"]).items():
                found = {p: opened.get_tensor(f"{name}.{p}") for p in parts[name]}
                leaves[name] = restore(about["form"], about, found)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())}") from None
    return unflatten(leaves.items()), json.loads(metadata["recipe"])

# SPDX-License-Identifier: Apache-2.0
"""Tensors in files of safetensors, whole or in shards: read row by row, and written.

The format: 8 bytes with the header's length, a JSON header of names, types, shapes and
byte ranges, the bytes (github.com/huggingface/safetensors, README.md). Reading goes
straight to where a tensor is wanted: nothing is mapped, nothing is held twice.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError

# How a type of the file stands in memory. numpy has no bfloat16: the upper half of a
# float32.
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2}
OTHERS |= {"U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
ROWS = 16  # transposed at a time: four times as fast as numpy's copy of the whole
LONGEST_HEADER = 100_000_000  # bytes, as in safetensors' own library


class Tensor(NamedTuple):
    """Where a tensor lies: bytes of a file from `start` on."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def in_file(self, shape: Sequence[int]) -> list[int]:
        """Return the file's own order of axes, for messages."""
        return list(shape)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read some rows, f32 [rows, ...]; fewer where the tensor ends before."""
        end = min(end, self.shape[0])
        width = math.prod(self.shape[1:])
        at = self.start + begin * width * np.dtype(DTYPES[self.dtype]).itemsize
        piece = Tensor(self.file, at, self.dtype, (end - begin, *self.shape[1:]))
        out = np.empty(piece.shape, np.float32)
        piece.fill(out, transpose=False, part=0, of=1)
        return out

    def fill(self, out: np.ndarray, transpose: bool, part: int, of: int) -> None:
        """Read the tensor, or one of `of` equal parts of its rows, into `out`.

        out: f32, contiguous, of as many elements as the part; transposed it gets
        [in, out] where the file has [out, in].
        """
        dtype = np.dtype(DTYPES[self.dtype])
        rows = (self.shape[0] if self.shape else 1) // of
        width = math.prod(self.shape[1:])
        target = out.reshape(width, rows).T if transpose else out.reshape(rows, width)
        step = ROWS if transpose else max(1, 2**20 // max(width, 1))
        with self.file.open("rb", buffering=0) as f:
            f.seek(self.start + part * rows * width * dtype.itemsize)
            if not transpose and self.dtype == "F32":
                _read(f, out.reshape(-1))
                return
            block = np.empty((min(step, rows), width), dtype)
            for begin in range(0, rows, step):
                piece = block[: min(step, rows - begin)]
                _read(f, piece.reshape(-1))
                target[begin : begin + step] = as_float32(piece, self.dtype)


def open_tensors(directory: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors of a directory by name; `where` begins every message.

    Raises UserError when there are none, or a file is cut short, foreign or damaged.
    """
    if (directory / SINGLE).exists():
        return read_header(inside(directory, SINGLE, where), where)
    if (directory / INDEX).exists():
        return _shards(directory, where)
    if (directory / PICKLE).exists():
        from bertjax.interop.torch_pickle import read_index

        return read_index(inside(directory, PICKLE, where), where)
    raise UserError(f"{where} holds no {SINGLE}, {INDEX} or {PICKLE}")


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError."""
    try:
        found = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise UserError(f"{where} holds no {path.name}") from None
    except OSError as e:
        raise UserError(f"{where}: {path.name} cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: {path.name} is not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise UserError(f"{where}: {path.name} holds no JSON object")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def inside(directory: Path, name: str, where: str) -> Path:
    """Return the file of a name. Names that lead elsewhere are refused.

    A download cache links each file of a directory to one beside the directory
    (snapshots/<commit>/x -> ../../blobs/<hash>), so links may lead into the cache.
    """
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise UserError(f"{where}: the file name {name!r} leads out of the directory")
    path = directory / name
    real = path.resolve()
    root = directory.resolve()
    blobs = root.parent.parent / "blobs"
    cached = root.parent.name == "snapshots" and real.parent == blobs
    if real.parent != root and not cached:
        raise UserError(f"{where}: {name} is a link that leads out of the directory")
    if not real.is_file():
        raise UserError(f"{where} holds no {name}")
    return path


def _shards(directory: Path, where: str) -> dict[str, Tensor]:
    names = read_json(directory / INDEX, where).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(v, str) for v in names.values()
    ):
        raise UserError(f"{where}: {INDEX} has no weight_map of names to files")
    found = {}
    for file in sorted(set(names.values())):
        there = read_header(inside(directory, file, where), where)
        for name in (n for n, f in names.items() if f == file):
            if name not in there:
                raise UserError(f"{where}: {file} lacks {name}, which {INDEX} names")
            found[name] = there[name]
    return found


def read_header(path: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file. Raises UserError."""

    def refuse(why: str) -> UserError:
        return UserError(f"{where}: {path.name} {why}")

    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise refuse("is cut short, or no safetensors file")
            header = json.loads(f.read(length))
    except OSError as e:
        raise refuse(f"cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise refuse("has no header of safetensors") from e
    if not isinstance(header, dict):
        raise refuse("has no header of safetensors")
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, said in header.items():
        try:
            shape = tuple(said["shape"])
            begin, end = said["data_offsets"]
            dtype = said["dtype"]
            wide = np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else None
            wide = wide or OTHERS[dtype]
            fits = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            fits = fits and end - begin == wide * math.prod(shape)
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise refuse(f"is damaged: the header's entry of {name!r} makes no sense")
        if 8 + length + end > size:
            raise refuse(f"is cut short: {name} ends after the file does")
        found[name] = Tensor(path, 8 + length + begin, dtype, shape)
    return found


def _read(f: Any, out: np.ndarray) -> None:
    left = memoryview(out).cast("B")
    while left:
        count = f.readinto(left)
        if not count:
            raise UserError(f"{f.name} was cut short while it was read")
        left = left[count:]


def as_float32(block: np.ndarray, dtype: str) -> np.ndarray:
    """Turn what stands in a file into float32."""
    if dtype == "BF16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    return block.astype(np.float32, copy=False)


def write(path: Path, tensors: Iterable[tuple[str, tuple[int, ...], Any]]) -> None:
    """Write float32 tensors: (name, shape, a function that makes its array) each.

    Only one array at a time exists.
    """
    listed = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, _ in listed:
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape, make in listed:
            made = np.ascontiguousarray(make(), "<f4")
            assert made.shape == shape, (name, made.shape, shape)
            f.write(memoryview(made).cast("B"))


def are_equal(a: Any, b: Any) -> bool:
    """Compare two tensors of any kind, a block of rows at a time."""
    if a == b:
        return True
    if a.shape != b.shape:
        return False
    step = max(1, 2**20 // max(math.prod(a.shape[1:]), 1))
    return all(
        np.array_equal(a.rows(i, i + step), b.rows(i, i + step))
        for i in range(0, a.shape[0], step)
    )

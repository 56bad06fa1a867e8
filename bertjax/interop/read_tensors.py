# SPDX-License-Identifier: Apache-2.0
"""Read the tensors of a directory: safetensors, whole or sharded, or a pickle.

A pytorch_model.bin is a zip with a pickle of the names and one member per tensor for
its bytes. A pickle may name any function to call; this reader accepts a few names,
replaces them with its own stand-ins, and refuses all others before anything is called.
"""

import dataclasses
import json
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bertjax import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
# Types that can become parameters; others are known only by name.
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}
BLOCK = 2**20  # numbers to read at a time
# rows to transpose at a time: four times as fast as numpy's copy of the whole
ROWS = 16
STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
LARGEST = 64 * 2**20  # bytes of the pickle itself, which has only names


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file; dtype: a key of DTYPES, or another name of the format."""

    dtype: str
    shape: tuple[int, ...]

    def shape_in_file(self, shape: tuple[int, ...]) -> list[int]:
        """Return a shape in the file's order of axes, for messages."""
        return list(shape)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read rows [begin, end) as f32 [end - begin, ...]."""
        raise NotImplementedError

    def fill(self, out: np.ndarray, transpose: bool, part: int, of: int) -> None:
        """Read the tensor, or one of `of` equal parts of its rows, into `out`.

        out: f32, contiguous, with as many elements as the part; with `transpose` it
        gets [in, out] from [out, in] in the file.
        """
        count, width = self.shape[0] // of, math.prod(self.shape[1:])
        target = out.reshape(width, count).T if transpose else out.reshape(count, width)
        step = ROWS if transpose else max(1, BLOCK // max(width, 1))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            rows = self.rows(part * count + begin, part * count + end)
            target[begin:end] = rows.reshape(end - begin, width)


@dataclasses.dataclass(frozen=True)
class SwappedTensor(StoredTensor):
    """A weight [out, in] that is [in, out] in the file, `stored`."""

    stored: StoredTensor

    @classmethod
    def of(cls, stored: StoredTensor) -> "SwappedTensor":
        return cls(stored.dtype, stored.shape[::-1], stored)

    def shape_in_file(self, shape: tuple[int, ...]) -> list[int]:
        return list(shape[::-1])

    def rows(self, begin: int, end: int) -> np.ndarray:
        return self.stored.rows(0, self.shape[1])[:, begin:end].T

    def fill(self, out: np.ndarray, transpose: bool, part: int, of: int) -> None:
        """Read the file's own rows block by block; a part is a range of its columns."""
        count, width = self.shape[0] // of, self.shape[1]
        target = out.reshape(width, count) if transpose else out.reshape(count, width).T
        step = max(1, BLOCK // max(self.shape[0], 1))
        for begin in range(0, width, step):
            rows = self.stored.rows(begin, min(begin + step, width))
            target[begin : begin + step] = rows[:, part * count : (part + 1) * count]


@dataclasses.dataclass(frozen=True)
class RowTensor(StoredTensor):
    """A vector [n] that is [1, n] in the file, `stored`."""

    stored: StoredTensor

    @classmethod
    def of(cls, stored: StoredTensor) -> "RowTensor":
        return cls(stored.dtype, stored.shape[1:], stored)

    def shape_in_file(self, shape: tuple[int, ...]) -> list[int]:
        return [1, *shape]

    def rows(self, begin: int, end: int) -> np.ndarray:
        return self.stored.rows(0, 1)[0, begin:end]


@dataclasses.dataclass(frozen=True)
class ZeroTensor(StoredTensor):
    """A tensor of zeros that no file has."""

    def rows(self, begin: int, end: int) -> np.ndarray:
        return np.zeros((end - begin, *self.shape[1:]), np.float32)


def are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare two tensors of any kind, block by block."""
    if a.shape != b.shape or not a.shape:
        return False
    step = max(1, BLOCK // max(math.prod(a.shape[1:]), 1))
    blocks = [(i, min(i + step, a.shape[0])) for i in range(0, a.shape[0], step)]
    return a is b or all(np.array_equal(a.rows(*x), b.rows(*x)) for x in blocks)


@dataclasses.dataclass(frozen=True)
class SafeTensor(StoredTensor):
    """A tensor of a safetensors file. file: the open file, which reads slices."""

    file: Any
    name: str

    def rows(self, begin: int, end: int) -> np.ndarray:
        return self.file.get_slice(self.name)[begin:end].astype(np.float32, copy=False)


def open_tensors(directory: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name; `where` begins every message.

    Raises UserError if there are none, or a file is truncated, foreign or damaged.
    """
    if (directory / SINGLE).exists():
        return open_safetensors(inside(directory, SINGLE, where), where)
    if not (directory / INDEX).exists():
        if not (directory / PICKLE).exists():
            raise UserError(f"{where} holds no {SINGLE}, {INDEX} or {PICKLE}")
        return open_pickle(inside(directory, PICKLE, where), where)
    names = read_json(directory / INDEX, where).get("weight_map")
    files = names.values() if isinstance(names, dict) else [None]
    if not all(isinstance(file, str) for file in files):
        raise UserError(f"{where}: {INDEX} has no weight_map of names to files")
    tensors = {}
    for file in sorted(set(files)):
        shard = open_safetensors(inside(directory, file, where), where)
        for name in (n for n, f in names.items() if f == file):
            if name not in shard:
                raise UserError(f"{where}: {file} lacks {name}, which {INDEX} names")
            tensors[name] = shard[name]
    return tensors


def read_json(path: Path, where: str, required: bool = True) -> dict[str, Any]:
    """Return a JSON file's object, {} if it may be missing. Raises UserError."""
    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        if not required:
            return {}
        raise UserError(f"{where} holds no {path.name}") from None
    except OSError as e:
        raise UserError(f"{where}: {path.name} cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: {path.name} is not valid JSON ({e})") from e
    if not isinstance(content, dict):
        raise UserError(f"{where}: {path.name} holds no JSON object")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def inside(directory: Path, name: str, where: str) -> Path:
    """Return the file of a name, and refuse names that lead out of the directory.

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


def open_safetensors(path: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name. Raises UserError."""
    try:
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as e:
        raise UserError(
            f"{where}: {path.name} is cut short, damaged or no safetensors file "
            f"({e!s:.150})"
        ) from e
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: SafeTensor(part.get_dtype(), tuple(part.get_shape()), file, name)
        for name, part in slices.items()
    }


# ---------------------------------------------------------------- pickles
@dataclasses.dataclass(frozen=True)
class PickledTensor(StoredTensor):
    """A tensor whose bytes begin at `start` of a file."""

    file: Path
    start: int

    def rows(self, begin: int, end: int) -> np.ndarray:
        dtype = DTYPES[self.dtype]
        values = np.memmap(self.file, dtype, "r", self.start, self.shape)
        return values[begin:end].astype(np.float32)


class Reader(pickle.Unpickler):
    """An unpickler of names and tensor locations that calls only its own two functions.

    pickled: data.pkl. archive: the zip file, whose members `folder`KEY have the bytes.
    """

    def __init__(self, pickled: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(pickled)
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            # Not a class but a word, which only persistent_load sees.
            **{("torch", storage): dtype for storage, dtype in STORAGES.items()},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> tuple[zipfile.ZipInfo, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it holds no plain tensors")
        return self.archive.getinfo(f"{self.folder}{key}"), dtype

    def rebuild(
        self, storage: Any, offset: int, size: Any, strides: Any, *_: Any
    ) -> PickledTensor:
        """Locate a tensor's bytes; check that they are complete and rows in order."""
        member, dtype = storage
        shape = tuple(map(int, size))
        if member.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError("it is compressed")
        for i, (n, stride) in enumerate(zip(shape, strides, strict=True)):
            if n > 1 and stride != math.prod(shape[i + 1 :]):
                raise pickle.UnpicklingError("it holds a tensor that is not contiguous")
        width = np.dtype(DTYPES.get(dtype, np.int8)).itemsize
        if offset < 0 or width * (offset + math.prod(shape)) > member.file_size:
            raise pickle.UnpicklingError("a tensor is longer than its bytes")
        # The bytes begin after the local header, whose length fields give its size.
        path = Path(self.archive.filename)
        header = np.memmap(path, "<u2", "r", member.header_offset + 26, (2,))
        start = member.header_offset + 30 + int(header.sum(dtype=int))
        return PickledTensor(dtype, shape, path, start + width * int(offset))


def open_pickle(path: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a pytorch_model.bin by name. Raises UserError."""
    try:
        with zipfile.ZipFile(path) as archive:
            (index,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
            if archive.getinfo(index).file_size > LARGEST:
                raise pickle.UnpicklingError("its index is too large")
            with archive.open(index) as pickled:
                folder = index.removesuffix("data.pkl") + "data/"
                state = Reader(pickled, archive, folder).load()
        if not isinstance(state, dict):
            raise pickle.UnpicklingError("it holds no dictionary of tensors")
        tensors = {str(name): value for name, value in state.items()}
        return {n: t for n, t in tensors.items() if isinstance(t, PickledTensor)}
    except zipfile.BadZipFile:
        problem = "is no zip: cut short, or of the form before 2020"
    except pickle.UnpicklingError as e:
        problem = f"is not read, since {e}"
    except Exception as e:  # a pickle can fail in any way
        problem = f"is damaged ({type(e).__name__})"
    raise UserError(
        f"{where}: {path.name} {problem}; nothing of it was run: save the model as "
        "model.safetensors where you trust it"
    )

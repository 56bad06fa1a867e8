# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a pytorch_model.bin lie, without running what it says.

Such a file is a zip with a pickle of the names and one member for each tensor's bytes.
A pickle may name any function to call; this reader knows five names, stand-ins of its
own for them, and refuses all others before anything is called.
"""

import dataclasses
import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.interop.stored_tensor import DTYPES, StoredTensor

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
LARGEST = 64 * 2**20  # bytes of the pickle itself, which holds names alone


@dataclasses.dataclass(frozen=True)
class PickledTensor(StoredTensor):
    """A tensor whose bytes begin at `start` of a file."""

    file: Path
    start: int

    def rows(self, begin: int, end: int) -> np.ndarray:
        dtype = DTYPES[self.dtype]
        values = np.memmap(self.file, dtype, "r", self.start, self.shape)
        return values[begin:end].astype(np.float32)


class Reference(NamedTuple):
    """A tensor of the pickle: its storage's key and type, and where in it."""

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Reference:
    key, dtype = storage
    return Reference(key, dtype, int(offset), tuple(map(int, size)), tuple(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


class Reader(pickle.Unpickler):
    """Unpickles names and places; calls nothing but the two functions above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _rebuild
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _parameter
        if module == "torch" and name in STORAGES:
            return STORAGES[name]  # a word, not a class: only persistent_load sees it
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it holds no plain tensors")
        return str(key), dtype


def read_index(path: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a pytorch_model.bin by name. Raises UserError."""
    try:
        return _read_index(path)
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


def _read_index(path: Path) -> dict[str, StoredTensor]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as f:
        members = {m.filename: m for m in archive.infolist()}
        (index,) = [n for n in members if n.endswith("data.pkl")]
        if members[index].file_size > LARGEST:
            raise pickle.UnpicklingError("its index is too large")
        with archive.open(index) as pickled:
            state = Reader(pickled).load()
        if not isinstance(state, dict):
            raise pickle.UnpicklingError("it holds no dictionary of tensors")
        folder = index.removesuffix("data.pkl") + "data/"
        return {
            str(name): _tensor(f, members[folder + reference.key], reference)
            for name, reference in state.items()
            if isinstance(reference, Reference)
        }


def _tensor(f: Any, member: zipfile.ZipInfo, reference: Reference) -> PickledTensor:
    """Find a tensor's bytes; check that it is whole and its rows follow each other."""
    _, dtype, offset, shape, strides = reference
    if member.compress_type != zipfile.ZIP_STORED:
        raise pickle.UnpicklingError("it is compressed")
    for i, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and stride != math.prod(shape[i + 1 :]):
            raise pickle.UnpicklingError("it holds a tensor that is not contiguous")
    # The local header's own lengths say where the bytes begin.
    f.seek(member.header_offset + 26)
    name_size = int.from_bytes(f.read(2), "little")
    extra = int.from_bytes(f.read(2), "little")
    start = member.header_offset + 30 + name_size + extra
    if dtype in DTYPES:
        width = np.dtype(DTYPES[dtype]).itemsize
        if offset < 0 or width * (offset + math.prod(shape)) > member.file_size:
            raise pickle.UnpicklingError("a tensor is longer than its bytes")
        start += width * offset
    return PickledTensor(dtype, shape, Path(f.name), start)

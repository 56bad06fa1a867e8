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
from typing import Any

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


class Reader(pickle.Unpickler):
    """Unpickles names and tensors' places; calls nothing but its own two functions.

    pickled: data.pkl. archive: the file, whose members `folder`KEY are the bytes.
    """

    def __init__(self, pickled: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(pickled)
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            # A word, not a class: only persistent_load sees it.
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
        """Find a tensor's bytes; check that they are whole and its rows in order."""
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
        # The local header's own lengths say where the bytes begin.
        path = Path(self.archive.filename)
        header = np.memmap(path, "<u2", "r", member.header_offset + 26, (2,))
        start = member.header_offset + 30 + int(header.sum(dtype=int))
        return PickledTensor(dtype, shape, path, start + width * int(offset))


def read_index(path: Path, where: str) -> dict[str, StoredTensor]:
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

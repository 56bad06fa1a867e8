# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a pytorch_model.bin lie, without running what it says.

Such a file is a zip with a pickle of the names and one member for each tensor's bytes.
A pickle may name any function to call; this reader knows five names, stand-ins of its
own for them, and refuses all others before anything is called.
"""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.interop.tensor_files import DTYPES, Tensor

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


class Placed(NamedTuple):
    """A tensor of the pickle: its storage's key and type, and where in it."""

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Placed:
    key, dtype = storage
    return Placed(key, dtype, int(offset), tuple(size), tuple(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


class Reader(pickle.Unpickler):
    """Unpickles names and places; calls nothing but the two functions above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2",):
            return _rebuild
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _parameter
        if module == "torch" and name in STORAGES:
            return STORAGES[name]  # a word, not a class: only persistent_load sees it
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")

    def persistent_load(self, said: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = said
        if kind != "storage" or dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it holds no plain tensors")
        return str(key), dtype


def read_index(path: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors of a pytorch_model.bin by name. Raises UserError."""

    def refuse(why: str) -> UserError:
        return UserError(
            f"{where}: {path.name} {why}; nothing of it was run: save the model as "
            "model.safetensors where you trust it"
        )

    try:
        with zipfile.ZipFile(path) as archive:
            members = {m.filename: m for m in archive.infolist()}
            (index,) = [n for n in members if n.endswith("data.pkl")]
            if members[index].file_size > LARGEST:
                raise refuse("has too large an index")
            with archive.open(index) as f:
                state = Reader(f).load()
            folder = index.removesuffix("data.pkl")
            starts = {}
            with path.open("rb") as f:
                for name, member in members.items():
                    if not name.startswith(folder + "data/"):
                        continue
                    if member.compress_type != zipfile.ZIP_STORED:
                        raise refuse("is compressed")
                    # The local header's own lengths say where the bytes begin.
                    f.seek(member.header_offset + 26)
                    name_size = int.from_bytes(f.read(2), "little")
                    extra = int.from_bytes(f.read(2), "little")
                    start = member.header_offset + 30 + name_size + extra
                    starts[name.removeprefix(folder + "data/")] = start, member
        if not isinstance(state, dict):
            raise refuse("holds no dictionary of tensors")
        found = {}
        for name, placed in state.items():
            if not isinstance(placed, Placed):
                continue
            start, member = starts[placed.key]
            found[str(name)] = _tensor(path, placed, start, member.file_size, refuse)
    except UserError:
        raise
    except zipfile.BadZipFile:
        raise refuse("is no zip: cut short, or of the form before 2020") from None
    except pickle.UnpicklingError as e:
        raise refuse(f"is not read, since {e}") from None
    except Exception as e:  # a pickle can fail in any way
        raise refuse(f"is damaged ({type(e).__name__})") from e
    return found


def _tensor(path: Path, placed: Placed, start: int, size: int, refuse: Any) -> Tensor:
    """Check that a tensor is whole and its rows lie one after the other."""
    wanted, width = [], 1
    for n in reversed(placed.shape):
        wanted.append(width)
        width *= n
    for n, has, want in zip(placed.shape, placed.stride, reversed(wanted), strict=True):
        if n > 1 and has != want:
            raise refuse("holds a tensor that is not contiguous")
    if placed.dtype in DTYPES:
        wide = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}[placed.dtype]
        if placed.offset < 0 or wide * (placed.offset + width) > size:
            raise refuse("is damaged: a tensor is longer than its bytes")
        start += wide * placed.offset
    return Tensor(path, start, placed.dtype, placed.shape)

# SPDX-License-Identifier: Apache-2.0
"""Find the tensors of a directory: safetensors, whole or in shards, or a pickle."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from bertjax import UserError
from bertjax.interop import torch_pickle
from bertjax.interop.stored_tensor import StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"


@dataclasses.dataclass(frozen=True)
class SafeTensor(StoredTensor):
    """A tensor of a safetensors file. file: the open file; it reads what is sliced."""

    file: Any
    name: str

    def rows(self, begin: int, end: int) -> np.ndarray:
        return self.file.get_slice(self.name)[begin:end].astype(np.float32, copy=False)


def open_tensors(directory: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name; `where` begins every message.

    Raises UserError when there are none, or a file is cut short, foreign or damaged.
    """
    if (directory / SINGLE).exists():
        return open_safetensors(inside(directory, SINGLE, where), where)
    if not (directory / INDEX).exists():
        if not (directory / PICKLE).exists():
            raise UserError(f"{where} holds no {SINGLE}, {INDEX} or {PICKLE}")
        return torch_pickle.read_index(inside(directory, PICKLE, where), where)
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
    """Return the object in a JSON file, {} where one need not be. Raises UserError."""
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

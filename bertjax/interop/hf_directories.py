# SPDX-License-Identifier: Apache-2.0
"""Open a directory of another library's, whatever lies in it.

config.json and tensors (hf_read.py); a TensorFlow 1 checkpoint (tf1.py); generator/ and
discriminator/ of the first kind, which are one model (electra_pair.py).
"""

from pathlib import Path
from typing import Any

from bertjax.interop import electra_pair, hf_read, read_tensors, tf1

OURS = ("overrides.json", "checkpoints", "meta.json")
THEIRS = (hf_read.CONFIG, read_tensors.SINGLE, read_tensors.INDEX, read_tensors.PICKLE)
HALVES = ("discriminator", "generator")


def is_directory(path: Any) -> bool:
    """True for what looks like one of theirs, and not like a workdir."""
    if any((path / name).exists() for name in OURS):
        return False
    return _is_hf(path) or _is_pair(path) or tf1.is_directory(path)


def _is_hf(path: Any) -> bool:
    return any((path / name).exists() for name in THEIRS)


def _is_pair(path: Any) -> bool:
    return all((path / name).is_dir() for name in HALVES)


def tokenizer_folders(path: Any) -> list[Any]:
    """Return where a directory's tokenizer lies: in both halves of a pair."""
    return [path / name for name in HALVES] if _is_pair(path) else [path]


def open_model(directory: Path, where: str) -> hf_read.Imported:
    """Open any of them. Raises UserError, which `where` (flag and value) begins."""
    if _is_hf(directory):
        return hf_read.open_model(directory, where)
    if _is_pair(directory):
        models = [hf_read.open_model(directory / n, f"{where}/{n}") for n in HALVES]
    else:
        models = tf1.open_models(directory, where)
    if len(models) == 1:
        return models[0]
    return electra_pair.join(*models, directory, where)

# SPDX-License-Identifier: Apache-2.0
"""Compression of a loaded model, and writing of a workdir with its packed file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import write_new, write_workdir
from bertjax.compression.compress_model import compress_model
from bertjax.compression.methods import Recipe
from bertjax.compression.packed import FILE, Form, write_packed
from bertjax.interop.hf_read import Imported
from bertjax.interop.tensor_layout import walk

# How often each id occurs in the training text; evaluations use it.
COUNTS = "unigram.npy"


class Small(NamedTuple):
    """A compressed model in memory.

    params: a tree of numpy arrays, f32; forms: those of the compressed leaves, by path;
    about: JSON-like facts about the compression, which are recorded; opened: the dense
    model.
    """

    params: dict[str, Any]
    forms: dict[str, Form]
    about: dict[str, Any]
    opened: LoadedModel


def make_small(
    opened: LoadedModel,
    recipe: Recipe,
    batches: Sequence[Mapping[str, np.ndarray]],
    weights: str = "",
) -> Small:
    """Compress a model in memory.

    batches: calibration rows, [] if the recipe needs none. Raises UserError.
    """
    params = opened.read_params(weights=weights)
    done = compress_model(params, opened.cfg, recipe, batches)
    about = {
        "method": recipe.method,
        "sparsity": done.zeros / done.weights,
        "pattern": str(recipe.pattern or ""),
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "embeddings": recipe.embeddings,
        "rows": int(sum((b["example_weights"] > 0).sum() for b in batches)),
        "tokens": done.tokens,
        "output_error": done.error,
    }
    return Small(params, done.forms, about, opened)


def write_small(small: Small, out: str) -> dict[str, Any]:
    """Write a compressed model atomically to a new directory.

    Returns the facts about the compression, with the measured bytes of the packed file
    and those of all parameters in f32. Raises UserError.
    """
    leaves = flatten(small.params)
    opened = small.opened
    facts = {**opened.meta, "compressed": small.about}
    counts = read_counts(opened.checkpoint)
    size = 0

    def write(draft: Path) -> None:
        nonlocal size
        model = opened._replace(meta=facts)
        write_workdir(draft, lambda: small.params, model)
        if counts is not None:
            (draft / COUNTS).write_bytes(counts)
        size = write_packed(draft / FILE, leaves, small.forms, small.about)

    write_new(out, "--out", write)
    dense = sum(leaf.size for leaf in leaves.values()) * 4
    return {"out": out, **small.about, "bytes": size, "bytes_dense": dense}


def read_counts(checkpoint: Any) -> bytes | None:
    """Return the counts file of the workdir around a checkpoint, if it has one."""
    if isinstance(checkpoint, Imported):
        return None
    file = checkpoint.parents[1] / COUNTS
    return file.read_bytes() if file.exists() else None


def flatten(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the f32 leaves of a tree by path, such as "encoder/embeddings/word"."""
    return {path: np.asarray(leaf, np.float32) for path, leaf in walk(tree)}

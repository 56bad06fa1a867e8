# SPDX-License-Identifier: Apache-2.0
"""Write a model as StableHLO programs that jax runs without bertjax (jax.export).

There is one program per batch size and length. All use the same weights, which are
stored once. docs/serving.md shows how to read them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file

from bertjax.assembly.models import LoadedModel
from bertjax.data.progress import Progress
from bertjax.inference.fill_blanks import BLANKS as COUNT
from bertjax.interop.write_tensors import write_tensors
from bertjax.parallel.sharding import path_name
from bertjax.serving.card import describe, write_card, write_own_tokenizer
from bertjax.serving.differences import (
    COMPARED,
    blank_positions,
    largest_difference,
    make_batch,
    real_rows,
)
from bertjax.serving.served_model import BLANKS, ServedModel

PLATFORMS = ("cpu", "cuda", "tpu")
WEIGHTS = "model.safetensors"
BATCH_SIZES = (1, 8)
SHORTEST, RATIO = 32, 4  # of the default lengths


def default_lengths(longest: int) -> list[int]:
    """Return the default lengths: 32, 128 and 512, up to the model's longest.

    >>> default_lengths(8192), default_lengths(100), default_lengths(20)
    ([32, 128, 512], [32, 100], [20])
    """
    longest = min(longest, COMPARED)
    steps = math.ceil(math.log(max(longest / SHORTEST, 1), RATIO))
    return sorted({longest, *(SHORTEST * RATIO**i for i in range(steps))})


def write_stablehlo(
    folder: Path,
    model: LoadedModel,
    served: ServedModel,
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Write programs, weights, tokenizer and card.json; return the card.

    Texts are padded to the shortest sufficient length. Models of vectors return only
    the vectors; masked LMs return logits f32 [B, 8, V] at mlm_positions i32 [B, 8].
    """
    if served.task == "sentence-similarity":
        served = served._replace(outputs=served.outputs[:1])
    params = served.unstacked()
    leaves, tree = jax.tree.flatten_with_path(params)
    names = [path_name(path) for path, _ in leaves]
    weights = {
        n: np.ascontiguousarray(x) for n, (_, x) in zip(names, leaves, strict=True)
    }
    write_tensors(folder / WEIGHTS, weights)

    def run(weights: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
        found = served.run(jax.tree.unflatten(tree, [weights[n] for n in names]), batch)
        return {name: found[name].astype("float32") for name in served.outputs}

    programs = [
        {"file": f"batch{b}_length{n}.jaxexport", "batch_size": b, "length": n}
        for b in sorted({*batch_sizes})
        for n in sorted({*lengths})
    ]
    with Progress("export", total=len(programs), unit="programs") as progress:
        for program in programs:
            exported = export.export(jax.jit(run), platforms=PLATFORMS)(
                shapes_of(weights), shapes_of(blank_batch(served, program))
            )
            (folder / program["file"]).write_bytes(exported.serialize())
            progress.add(1)
    write_own_tokenizer(folder, model, served)
    files = [WEIGHTS, *(program["file"] for program in programs)]
    facts = describe(model, served) | {
        "format": "stablehlo",
        "jax": jax.__version__,
        "platforms": [*PLATFORMS],
        "weights": WEIGHTS,
        "programs": programs,
        "bytes": sum((folder / name).stat().st_size for name in files),
        "largest_difference": difference(folder, model, served, programs),
    }
    if served.task == "fill-mask":
        facts |= {"inputs": [*served.inputs, BLANKS], "blanks": COUNT}
    write_card(folder, facts)
    return facts


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in arrays.items()}


def blank_batch(
    served: ServedModel,
    program: Mapping[str, Any],
    rows: Sequence[np.ndarray] = (),
    pad_id: int = 0,
) -> dict[str, np.ndarray]:
    """Return a batch of a program's shape with these rows."""
    shape = program["batch_size"], program["length"]
    batch = make_batch(served, [*rows], pad_id, shape)
    if served.task == "fill-mask":
        batch[BLANKS] = blank_positions(batch, COUNT)
    return batch


def difference(
    folder: Path,
    model: LoadedModel,
    served: ServedModel,
    programs: Sequence[Mapping[str, Any]],
) -> float:
    """Return the largest difference between the files' outputs and the model's.

    It is taken over all programs and the texts that fit each.
    """
    weights = jax.device_put(load_file(folder / WEIGHTS))
    longest = min(programs[-1]["length"], COMPARED)
    rows, largest = real_rows(model.tokenizer, longest), 0.0
    with Progress("compare", total=len(programs), unit="programs") as progress:
        for program in programs:
            stored = bytearray((folder / program["file"]).read_bytes())
            call = jax.jit(export.deserialize(stored).call)
            fitting = [row for row in rows if len(row) <= program["length"]]
            size, pad_id = program["batch_size"], model.tokenizer.pad_id
            batches = [
                blank_batch(served, program, fitting[at : at + size], pad_id)
                for at in range(0, max(len(fitting), 1), size)
            ]

            def predict(batch: Any, call: Any = call) -> dict[str, np.ndarray]:
                return jax.device_get(call(weights, batch))

            largest = max(largest, largest_difference(served, predict, batches))
            progress.add(1)
    return largest

# SPDX-License-Identifier: Apache-2.0
"""Write a model as onnx/model.onnx for onnxruntime.

The files beside it are those that optimum and sentence-transformers read: config.json,
the tokenizer, modules.json. Inputs and outputs have the names of transformers' exports,
so that ORTModelForMaskedLM and the like, SentenceTransformer(backend="onnx") and
transformers.js open the directory.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bertjax
from bertjax import UserError
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import write_hf
from bertjax.config import cli
from bertjax.serving import onnx_graph, onnx_int8
from bertjax.serving.card import describe, write_card, write_own_tokenizer
from bertjax.serving.differences import (
    COMPARED,
    TEXTS,
    Predict,
    largest_difference,
    make_batches,
    real_rows,
)
from bertjax.serving.gate import Gate
from bertjax.serving.served_model import ServedModel

FILE = "onnx/model.onnx"
PACKAGES = ("onnx", "onnxruntime")
TOGETHER = 8  # texts per batch of the comparison


def check_packages() -> None:
    """Raise UserError if the packages that write and run ONNX are not installed."""
    if lacking := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        raise UserError(
            f"--format=onnx needs {' and '.join(lacking)}: pip install 'bertjax[onnx]'"
        )


def write_onnx(
    folder: Path, model: LoadedModel, served: ServedModel, gate: Gate | None, kind: str
) -> dict[str, Any]:
    """Write onnx/model.onnx, tokenizer, configs and card.json; return the card.

    kind: "" for float32 weights; or a key of onnx_int8.KINDS, on which the gate
    decides. Raises UserError if the gate refuses, and for what ONNX cannot represent.
    """
    from bertjax.serving.jaxpr_to_onnx import convert

    sizes = dict.fromkeys(served.inputs, "b, l")
    graph = convert(
        served.run, served.unstacked(), sizes, served.longest, served.outputs
    )
    if gate:
        onnx_int8.quantize(graph, kind)
    about = f"bertjax {bertjax.__version__}, {served.task}"
    path = folder / FILE
    path.parent.mkdir()
    path.write_bytes(onnx_graph.serialize(graph, about))
    predict = open_session(path)
    facts = describe(model, served) | {
        "format": "onnx",
        "file": FILE,
        "quantize": kind,
        "bytes": path.stat().st_size,
    }
    if gate:
        facts["gate"] = gate.check(predict, kind)
    batches = compared_batches(model, served)
    facts["largest_difference"] = largest_difference(served, predict, batches)
    write_surroundings(folder, model, served)
    write_card(folder, facts)
    return facts


def open_session(path: Path, threads: int = 0) -> Predict:
    """Return predict(batch) -> outputs for a file of ours; batches are i32 or i64.

    threads: of onnxruntime; 0 means one per core.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    inputs = [given.name for given in session.get_inputs()]

    def predict(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: np.asarray(batch[name], np.int64) for name in inputs}
        return dict(zip(names, session.run(names, given), strict=True))

    return predict


def compared_batches(
    model: LoadedModel, served: ServedModel, count: int = TEXTS
) -> list[dict[str, np.ndarray]]:
    """Return real texts of all lengths in batches, padded to the longest of each."""
    longest = min(served.longest, COMPARED)
    rows = real_rows(model.tokenizer, longest, count)
    return make_batches(served, rows, model.tokenizer.pad_id, TOGETHER, longest)


def write_surroundings(folder: Path, model: LoadedModel, served: ServedModel) -> None:
    """Write config.json, and the files of sentence-transformers for vectors.

    If no Hugging Face family has such a model, writes only the tokenizer.
    """
    vectors = served.sentences is not None
    if vectors:  # without the head of a task
        meta = {key: value for key, value in model.meta.items() if key != "task"}
        model = model._replace(meta=meta)
    try:
        if served.cfg.hidden_size != model.cfg.hidden_size:
            raise UserError("of ELECTRA's two models the generator alone is served")
        # If it raises, it has written nothing; it also raises if no
        # class has this task head.
        write_hf(folder, lambda: served.params, model, tensors=False, sentences=vectors)
    except UserError as e:
        cli.say(f"not written: config.json ({e})")
        write_own_tokenizer(folder, model, served)

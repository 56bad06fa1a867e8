# SPDX-License-Identifier: Apache-2.0
"""Export an open model into a new directory for serving."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import write_new
from bertjax.serving.onnx_int8 import KINDS

FORMATS = ("stablehlo", "onnx")


class Options(NamedTuple):
    """How a model is exported; empty lists, "" and 0 mean that the option is not given.

    batch_sizes, lengths: of StableHLO's programs; quantize: a key of onnx_int8.KINDS,
    for ONNX; gate: rows by which that is judged; vectors: whether to serve vectors of a
    model with a head.
    """

    batch_sizes: Sequence[int] = ()
    lengths: Sequence[int] = ()
    quantize: str = ""
    gate: str = ""
    vectors: bool = False
    weights: str = ""


def check_options(format: str, options: Options) -> None:
    """Refuse flags that a format does not use. Raises UserError."""
    own = dict.fromkeys(("batch_sizes", "lengths"), "stablehlo")
    own |= dict.fromkeys(("quantize", "gate"), "onnx")
    for name, needed in own.items():
        if getattr(options, name) and format != needed:
            raise UserError(f"--{name} needs --format={needed}: leave it out")
    if options.vectors and format not in FORMATS:
        raise UserError(f"--vectors has no effect with --format={format}: leave it out")
    if options.quantize not in ("", *KINDS):
        raise UserError(f"--quantize={options.quantize}: give {' or '.join(KINDS)}")
    if options.quantize and not options.gate:
        raise UserError(
            f"--quantize={options.quantize} needs --gate=ROWS: labelled rows of the "
            "model's task, or a file with a text a line, by which both models are "
            "judged"
        )
    if options.gate and not options.quantize:
        raise UserError("--gate judges 8 bits: give --quantize=int8 with it")
    if format == "onnx":
        from bertjax.serving.write_onnx import check_packages

        check_packages()


def export_model(
    target: str, format: str, model: LoadedModel, where: str, options: Options
) -> dict[str, Any]:
    """Write a directory, whole or not at all; return the content of its card.json.

    where: the flag and value that named the model. Raises UserError.
    """
    from bertjax.serving.served_model import make_served

    served = make_served(model, where, options.weights, options.vectors)
    facts: dict[str, Any] = {}

    def write(folder: Path) -> None:
        if format == "stablehlo":
            from bertjax.serving import write_stablehlo as writer

            sizes = options.batch_sizes or writer.BATCH_SIZES
            lengths = options.lengths or writer.default_lengths(served.longest)
            if max(lengths) > served.longest:
                raise UserError(
                    f"--lengths={max(lengths)}: the model takes {served.longest} tokens"
                )
            facts.update(writer.write_stablehlo(folder, model, served, sizes, lengths))
        else:
            from bertjax.serving.write_onnx import write_onnx

            kind = options.quantize
            facts.update(write_onnx(folder, model, served, gate, kind))

    gate = None
    if options.quantize:
        from bertjax.serving.gate import open_gate

        gate = open_gate(options.gate, model, served, where, options.weights)
    write_new(target, "--to", write)
    return facts

# SPDX-License-Identifier: Apache-2.0
"""Convert Hugging Face directories to ours and back, and export files for serving.

python -m bertjax.convert --from=HF_DIR --to=DIR                 a model for --model
... --from=TF1_DIR         a checkpoint of Google's BERT, ALBERT or ELECTRA
python -m bertjax.convert --from=WORKDIR_OR_DIR --to=HF_DIR --format=hf
... --format=stablehlo     programs that need only jax (docs/serving.md)
... --format=onnx          for onnxruntime; --quantize=int8 --gate=ROWS: smaller
... --add_words=FILE       with a larger vocabulary: FILE has a word per line
... --step=N               another checkpoint of a workdir than its newest or best

Neither torch nor transformers is needed.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from bertjax import UserError, registry
from bertjax.assembly import command_line
from bertjax.assembly import models as open_models
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import FORMS, Read, check_target, save_model
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.interop.hf_read import Imported
from bertjax.serving.export_model import FORMATS, Options, check_options, export_model

FLAGS = {
    "from": Flag(
        "the model to convert: a workdir, a checkpoint or another library's files"
    ),
    "to": Flag("the new directory to write"),
    "format": Flag(
        "bertjax (a model for every command), hf (for transformers), stablehlo or onnx "
        "(for serving)",
        "bertjax",
    ),
    "add_words": Flag("a file of words to add to the vocabulary, one per line"),
    "batch_sizes": Flag(
        "batch sizes of the StableHLO programs; default: 1,8", kind=list
    ),
    "lengths": Flag(
        "lengths of the StableHLO programs; default: 32,128,512 up to the model's "
        "maximum",
        kind=list,
    ),
    "quantize": Flag(
        "int8: ONNX weights in 8 bits; uint8: for CPUs without VNNI; needs --gate", ""
    ),
    "gate": Flag(
        "labelled rows of a finetuned model's task, or a file with one text per line: "
        "fail if 8 bits lose more than 0.5% of the metric on them",
        "",
    ),
    "vectors": Flag("export sentence vectors, as bertjax.embed computes them", False),
    **shared("weights", "step", "json"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    source, target = args["from"].value, args.to
    if not source or not target:
        raise UserError("--from and --to are needed: what to convert, and where to")
    registry.pick("--format", args.format, {**FORMS, **dict.fromkeys(FORMATS)})
    options = Options(
        read_sizes(args.batch_sizes, "--batch_sizes"),
        read_sizes(args.lengths, "--lengths"),
        args.quantize,
        args.gate,
        args.vectors,
        args.weights,
    )
    check_options(args.format, options)
    if args.json and args.format not in FORMATS:
        raise UserError(
            f"--json has no effect with --format={args.format}: leave it out"
        )
    check_target(target, f"--to={target}")
    model = open_models.open_model(open_models.at_step(source, args.step), "--from")
    if args.format in FORMATS:
        return serve(target, model, f"--from={source}", args, options)
    if missing := getattr(model.checkpoint, "missing", ()):
        cli.say(f"not in the files: {', '.join(missing)}")
    read = functools.partial(model.read_params, weights=args.weights)
    if args.add_words:
        model, read = add_words(args.add_words, read, model)
    elif args.format == "bertjax" and not isinstance(model.checkpoint, Imported):
        raise UserError("--from is a workdir already: give --format=hf")
    save_model(target, args.format, model, read)
    cli.say(f"{target} is written")
    return 0


def serve(
    target: str, model: LoadedModel, where: str, args: Any, options: Options
) -> int:
    """Write files for serving, and print their card or a summary of it."""
    if args.add_words:
        raise UserError(
            f"--add_words has no effect with --format={args.format}: convert twice"
        )
    facts = export_model(target, args.format, model, where, options)
    if args.json:
        print(json.dumps(facts))
    cli.say(
        f"{target} is written: {facts['task']}, {facts['bytes']:,} bytes, numbers "
        f"within {facts['largest_difference']:.1e} of the model's"
    )
    return 0


def read_sizes(values: list[str] | None, flag: str) -> list[int]:
    """Return the numbers of a flag, sorted. Raises UserError."""
    sizes = [int(text) if text.isdecimal() else 0 for text in values or ()]
    if any(size < 1 for size in sizes):
        raise UserError(
            f"{flag}={','.join(values or ())}: give whole numbers, such as 8,32"
        )
    return sorted(sizes)


def add_words(path: str, read: Read, model: LoadedModel) -> tuple[LoadedModel, Read]:
    """Return an opened model with more words, and a function that reads its parameters.

    path: a file with a word per line. read: reads the parameters without the new words.
    """
    from bertjax.data.tokenizers import add_words as tokenizers_add_words
    from bertjax.interop.resize_embeddings import grow_rows

    config, tokenizer, source, meta = model
    words = tokenizers_add_words.read_words(path, "--add_words")
    grown = tokenizers_add_words.add_words(tokenizer, words, f"--add_words={path}")
    cli.say(f"--add_words={path}: {grown}")
    pieces, larger = tokenizer.vocab_size, grown.tokenizer
    if config.model.vocab_size is not None:
        config.model.vocab_size = max(config.model.vocab_size, larger.vocab_size)
    if config.model.pieces:
        config.model.pieces = max(config.model.pieces, larger.vocab_size)
    raw = meta.get("hf") or {"model_type": config.model.family}
    meta = {**meta, "config": config.to_dict(), "tokenizer": larger.identity, "hf": raw}
    opened = LoadedModel(config, larger, source, meta)
    return opened, lambda: grow_rows(read(), pieces, grown.origins)


if __name__ == "__main__":
    cli.command(main)

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's directories to ours and back, without torch and transformers.

python -m bertjax.convert --from=HF_DIR --to=DIR                 what --model takes
... --from=TF1_DIR         one of Google's checkpoints of BERT, ALBERT, ELECTRA
python -m bertjax.convert --from=WORKDIR_OR_DIR --to=HF_DIR --format=hf
... --add_words=FILE       with a larger vocabulary: FILE has a word a line
... --step=N               another checkpoint of a workdir than its newest or best
"""

import functools
from collections.abc import Sequence

from bertjax import UserError, registry
from bertjax.assembly import command_line
from bertjax.assembly import models as open_models
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import FORMS, Read, check_target, save_model
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.interop.hf_read import Imported

FLAGS = {
    "from": Flag("what to convert"),
    "to": Flag("the directory to write; it must be new"),
    "format": Flag("bertjax, what --model takes, or hf, for transformers", "bertjax"),
    "add_words": Flag("a file with a word a line, which the vocabulary gets"),
    **shared("weights", "step"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    source, target = args["from"].value, args.to
    if not source or not target:
        raise UserError("--from and --to are needed: what to convert, and where to")
    registry.pick("--format", args.format, FORMS)
    check_target(target, f"--to={target}")
    model = open_models.open_model(open_models.at_step(source, args.step), "--from")
    read = functools.partial(model.read_params, weights=args.weights)
    if args.add_words:
        model, read = add_words(args.add_words, read, model)
    elif args.format == "bertjax" and not isinstance(model.checkpoint, Imported):
        raise UserError("--from is a workdir already: give --format=hf")
    save_model(target, args.format, model, read)
    cli.say(f"{target} is written")
    return 0


def add_words(path: str, read: Read, model: LoadedModel) -> tuple[LoadedModel, Read]:
    """Return an opened model with a larger vocabulary, and what reads its parameters.

    path: a file with a word a line. read: reads the parameters without them.
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

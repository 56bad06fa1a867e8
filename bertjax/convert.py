# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's directories to ours and back, without torch and transformers.

python -m bertjax.convert --from=HF_DIR --to=DIR                 what --model takes
... --from=TF1_DIR         one of Google's checkpoints of BERT, ALBERT, ELECTRA
python -m bertjax.convert --from=WORKDIR_OR_DIR --to=HF_DIR --format=hf
... --add_words=FILE       with a larger vocabulary: FILE has a word a line
... --step=N               another checkpoint of a workdir than its newest or best
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bertjax import UserError, registry
from bertjax.assembly import command_line, resolve
from bertjax.assembly import models as open_models
from bertjax.config import cli, serialize
from bertjax.interop import hf_read, sentence_transformers
from bertjax.storage import directories
from bertjax.tasks import hf_task_config
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import get_task_type, is_shipped

Read = Callable[[], dict[str, Any]]  # reads parameters: numpy arrays


def define_flags(values: flags.FlagValues) -> None:
    string = functools.partial(flags.DEFINE_string, flag_values=values)
    string("from", None, "what to convert")
    string("to", None, "the directory to write; it must be new")
    string("format", "bertjax", "bertjax, what --model takes, or hf, for transformers")
    string("add_words", None, "a file with a word a line, which the vocabulary gets")
    string("weights", "", "")
    flags.DEFINE_integer("step", None, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False)
    source, target = args["from"].value, args.to
    if not source or not target:
        raise UserError("--from and --to are needed: what to convert, and where to")
    forms = {"bertjax": to_workdir, "hf": to_hf}
    write = registry.pick("--format", args.format, forms)
    into = check_target(target)
    opened = open_models.open_model(open_models.at_step(source, args.step), "--from")
    source = opened[2]
    read = functools.partial(open_models.read_params, source, weights=args.weights)
    if args.add_words:
        opened, read = add_words(args.add_words, read, *opened)
    elif write == to_workdir and not isinstance(source, hf_read.Imported):
        raise UserError("--from is a workdir already: give --format=hf")
    what = f"--to={target}"
    if not directories.make_whole(
        into, lambda draft: write(draft, read, *opened), what
    ):
        raise UserError(f"{what} exists already: another process has just made it")
    cli.say(f"{target} is written")
    return 0


def check_target(target: str) -> Path:
    """Return where to write: links followed. Raises UserError unless it is new."""
    if "://" in target:
        raise UserError(f"--to={target}: it is written to a disk of this machine")
    try:
        real = Path(target).expanduser().resolve()
        if real.exists() and (not real.is_dir() or any(real.iterdir())):
            raise UserError(f"--to={target} exists already")
    except (OSError, RuntimeError) as e:
        raise UserError(f"--to={target} cannot be written: {e}") from e
    return real


def add_words(
    path: str, read: Read, config: Any, tokenizer: Any, source: Any, meta: dict
) -> tuple[Any, Read]:
    """Return an opened model with a larger vocabulary, and what reads its parameters.

    path: a file with a word a line. read: reads the parameters without them.
    """
    from bertjax.data.tokenizers import add_words as tokenizers_add_words
    from bertjax.interop.resize_embeddings import grow_rows

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
    opened = config, larger, source, meta
    return opened, lambda: grow_rows(read(), pieces, grown.origins)


def to_workdir(
    into: Path, read: Read, config: Any, tokenizer: Any, source: Any, meta: dict
) -> None:
    """Write a workdir with one checkpoint, of step 0."""
    from bertjax.checkpoints.manager import Checkpoints

    tokenizer.save(into / "tokenizer")
    (into / "config.json").write_text(serialize.to_json(config), "utf-8")
    (into / "overrides.json").write_text("{}\n", "utf-8")
    saved = Checkpoints(into, keep_last=2, keep_every=None)
    keys = ("config", "tokenizer", "hf", "task")
    facts = {key: meta[key] for key in keys if key in meta} | {"tokens": 0}
    sentences = sentence_transformers.sentence_options(source, meta)
    facts["sentences"] = dataclasses.asdict(sentences)
    saved.save(0, {"params": read()}, facts)
    saved.close()


def to_hf(
    into: Path, read: Read, config: Any, tokenizer: Any, source: Any, meta: dict
) -> None:
    """Write config.json, model.safetensors and the tokenizer, for transformers.

    With them how sentence-transformers makes vectors: as the model that was imported
    does, or by mean pooling. What ELECTRA trained are two models, each in a directory
    of its own: generator/ and discriminator/.
    """
    from bertjax.data.tokenizers.export_tokenizer import write_tokenizer
    from bertjax.interop import hf_write
    from bertjax.interop.resize_embeddings import drop_rows

    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    raw, pooled = meta.get("hf"), sentence_transformers.sentence_options(source, meta)
    task, between = meta.get("task", {}), None
    task_type = get_task_type(config.objective) if task else None
    if task_type and not task_type.makes_vectors:
        between = task.get("separators") or tasks.separators(config)
    model_type = raw["model_type"] if raw else config.model.family
    hf_write.choose_family(cfg, tokenizer.roles, model_type)  # before the long work
    params = read()
    pieces = tokenizer.vocab_size
    if cfg.vocab_size > pieces and "vocab_size" not in (raw or {}):
        # Padding for a chip's sake; what came with padding goes with it.
        params = drop_rows(params, pieces)
        cfg = dataclasses.replace(cfg, vocab_size=pieces, pieces=0)
    models = {"": (params, cfg)}
    if "generator" in params:
        from bertjax.objectives.electra import split_pair

        models = split_pair(params, cfg)
    if pooled.pooling not in sentence_transformers.MODES.values():
        cli.say(
            f"not written: that vectors of sentences are made by {pooled.pooling}; "
            "sentence-transformers will take the mean"
        )
    for name, (part, cfg) in models.items():
        folder = into / name
        folder.mkdir(exist_ok=True)
        hf_write.write_model(
            folder,
            part,
            cfg,
            tokenizer.roles,
            model_type,
            raw,
            cli.say,
            task.get("labels", ()),
            hf_task_config.to_json(task, config, raw),
            "" if is_shipped(task_type) else task_type.hf_class,
        )
        types, longest = cfg.type_vocab_size > 1, cfg.max_length
        if between:  # texts are cut where the finetuned model cuts them
            longest = min(config.data.length, longest)
        write_tokenizer(tokenizer, folder, types, longest, between)
        sentence_transformers.write(folder, pooled, cfg.hidden_size, cfg.max_length)


if __name__ == "__main__":
    cli.command(main)

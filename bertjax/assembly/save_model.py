# SPDX-License-Identifier: Apache-2.0
"""Write open models as workdirs, and as directories for Hugging Face's tools."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertjax import UserError, registry
from bertjax.assembly import resolve
from bertjax.assembly.models import LoadedModel
from bertjax.config import cli, serialize
from bertjax.data.tokenizers.export_tokenizer import write_tokenizer
from bertjax.interop import hf_write, sentence_transformers
from bertjax.interop.resize_embeddings import drop_rows
from bertjax.interop.sentence_transformers import (
    CROSS,
    Sentences,
    of_passages,
    sentence_options,
)
from bertjax.storage import directories
from bertjax.storage.paths import check_writable, expand
from bertjax.tasks import hf_task_config
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import get_task_type

Read = Callable[[], dict[str, Any]]  # reads parameters: numpy arrays


def check_target(target: str, what: str) -> Path:
    """Return where to write, with links resolved. Raises UserError unless it is new
    and can be written."""
    if "://" in target:
        raise UserError(f"{what}: it is written to a disk of this machine")
    try:
        real = expand(target, what.partition("=")[0]).resolve()
        if real.exists() and (not real.is_dir() or any(real.iterdir())):
            raise UserError(f"{what} exists already")
    except (OSError, RuntimeError) as e:
        raise UserError(f"{what} cannot be written: {e}") from e
    check_writable(real, what)
    return real


def write_workdir(into: Path, read: Read, model: LoadedModel) -> None:
    """Write a workdir with one checkpoint, of step 0."""
    from bertjax.checkpoints.manager import Checkpoints  # needs jax

    config, tokenizer, source, meta = model
    tokenizer.save(into / "tokenizer")
    (into / "config.json").write_text(serialize.to_json(config), "utf-8")
    (into / "overrides.json").write_text("{}\n", "utf-8")
    saved = Checkpoints(into, keep_last=2, keep_every=None)
    keys = "config tokenizer hf hf_config generation task compressed index_model"
    facts = {key: meta[key] for key in keys.split() if key in meta} | {"tokens": 0}
    facts["sentences"] = dataclasses.asdict(sentence_options(source, meta))
    saved.save(0, {"params": read()}, facts)
    saved.close()


def write_hf(
    into: Path,
    read: Read,
    model: LoadedModel,
    tensors: bool = True,
    sentences: bool = True,
) -> None:
    """Write config.json, model.safetensors and the tokenizer for transformers.

    It also writes how sentence-transformers makes vectors. A model that ELECTRA trained
    becomes two directories, generator/ and discriminator/. tensors, sentences: whether
    to write model.safetensors and the files of sentence-transformers.
    """
    config, tokenizer, source, meta = model
    cfg = model.cfg
    pooled = of_passages(sentence_options(source, meta), config, meta)
    raw, task, between = meta.get("hf"), meta.get("task", {}), None
    task_type = get_task_type(config.objective) if task else None
    if task_type and (task_type.generates or task_type.token_head):
        # Export it as the language model that it was before the task.
        task, task_type = {}, None
    is_seq2seq = model.cfg.num_decoder_layers > 0
    if task_type and not task_type.makes_vectors and not is_seq2seq:
        between = task.get("separators") or tasks.separators(config)
    model_type = raw["model_type"] if raw else config.model.family
    # Raise errors before the long work.
    family, *_ = hf_write.choose_family(cfg, tokenizer.roles, model_type)
    is_causal = cfg.is_decoder and not task
    params = dict(read())
    projection = params.pop("colbert", {}).get("kernel")
    pieces = tokenizer.vocab_size
    if cfg.vocab_size > pieces and "vocab_size" not in (raw or {}):
        # Drop padding that was added for speed, unless it came with the model.
        params = drop_rows(params, pieces)
        cfg = dataclasses.replace(cfg, vocab_size=pieces, pieces=0)
    for what in _not_written(config, bool(task), pooled):
        cli.say(f"not written: {what}")
    models = {"": (params, cfg)}
    if "generator" in params:
        from bertjax.objectives.electra import split_pair

        models = split_pair(params, cfg)
    for name, (part, cfg) in models.items():
        folder = into / name
        folder.mkdir(exist_ok=True)
        hf_write.write_model(
            folder,
            part,
            cfg,
            tokenizer.roles,
            model_type,
            raw or meta.get("hf_config"),
            cli.say,
            labels=task.get("labels", ()),
            more=hf_task_config.to_json(task, config, raw),
            hf_class=task_type.hf_class if task_type else "",
            generation=model.generation,
            tensors=tensors,
        )
        types, longest = cfg.type_vocab_size > 1, cfg.max_length
        if between:  # cut texts as the finetuned model does
            longest = min(config.data.length, longest)
        if is_seq2seq and cfg.position_embedding_type == "none":
            longest = config.data.length  # the model sets no limit
        kinds = [family.model_type * is_it for is_it in (is_causal, is_seq2seq)]
        write_tokenizer(
            tokenizer,
            folder,
            types,
            longest,
            between,
            *kinds,
            has_bare_texts=model.has_bare_texts,
        )
        # Mean pooling is the default there: causal and seq2seq models need no files.
        has_own = pooled != Sentences(longest=pooled.longest)
        if sentences and (has_own or not any(kinds)):
            most = longest if pooled.kind == CROSS else cfg.max_length
            sizes = cfg.hidden_size, most
            sentence_transformers.write(folder, pooled, *sizes, projection)


def _not_written(config: Any, has_task: bool, how: Sentences) -> Iterator[str]:
    """Yield descriptions of what the files of other libraries cannot store."""
    if not has_task and resolve.reads_before(config):
        yield (
            "that masked tokens are predicted from the place before them; transformers "
            "will look where they stand"
        )
    modes = sentence_transformers.MODES.values()
    if how.kind == "dense" and how.pooling not in modes:
        yield (
            f"that vectors of sentences are made by {how.pooling}; "
            "sentence-transformers will take the mean"
        )


FORMS = {"bertjax": write_workdir, "hf": write_hf}


def save_model(
    target: str,
    form: str,
    model: LoadedModel,
    read: Read,
    flags: tuple[str, str] = ("--to", "--format"),
) -> None:
    """Write a model as a new directory, whole or not at all.

    form: "bertjax", a workdir with one checkpoint, or "hf", for transformers. read:
    reads its parameters. flags: the names of target and form in messages. Raises
    UserError if the directory exists already or the format cannot represent the model.
    """
    write = registry.pick(flags[1], form, FORMS)
    write_new(target, flags[0], lambda draft: write(draft, read, model))


def write_new(target: str, flag: str, write: Callable[[Path], None]) -> None:
    """Write a new directory, whole or not at all. Raises UserError if it exists."""
    what = f"{flag}={target}"
    if not directories.make_whole(check_target(target, what), write, what):
        raise UserError(f"{what} exists already: another process has just made it")

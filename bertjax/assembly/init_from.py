# SPDX-License-Identifier: Apache-2.0
"""Apply init_from: parameters, architecture and vocabulary of another run or model."""

import contextlib
import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, objectives
from bertjax.assembly.init_layers import ChosenLayers
from bertjax.assembly.models import (
    find_checkpoint,
    lower_case_differs,
    open_model,
    params_part,
    read_params,
    same_ids,
    same_pieces,
)
from bertjax.checkpoints import manifest
from bertjax.config import cli
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.interop import hf_directories, hf_read, sentence_transformers
from bertjax.interop.sentence_transformers import Sentences
from bertjax.models.config import RUNTIME
from bertjax.models.families import in_effect
from bertjax.storage.atomic import is_remote
from bertjax.tasks.hf_task_config import PREFIX
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_type import shipped_task_type

# Keys that say nothing about a model's shape, or that another compared key implies.
UNTOLD = {"size", "family", "vocab_size", "pieces", "is_decoder"}
# Model options that the recipe decides, whatever a checkpoint had.
OPEN = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
OPEN += ("zero_init_outputs", "fan_in_init")

# Keys of config.json that do not hold for a model that is trained further.
OF_FILES = {"architectures", "auto_map", "_name_or_path", "transformers_version"}
OF_FILES |= {"dtype", "torch_dtype", "id2label", "label2id", "num_labels"}
OF_FILES |= {"problem_type", "finetuning_task", "task_specific_params"}


def check_init_from(path: str, say: Say = silent, key: str = "init_from") -> Any:
    """Return the intact checkpoint, or the imported model, that a key names."""
    found = find_checkpoint(path, key, say)[1]
    return found or open_model(path, key, silent).checkpoint


def follow_init_from(config: ConfigDict, overrides: Container[str] = ()) -> None:
    """Use init_from's tokenizer if none is given, and its architecture.

    overrides: keys of the command line, which stay; so do the config's values of OPEN.
    If one of our runs is pretrained further with another model than the config's, a
    line says so. Does nothing if init_from is empty or does not exist (yet). Raises
    UserError for another size in overrides.
    """
    if not config.init_from:
        return
    folder = manifest.as_path(config.init_from)
    try:
        follows = _is_imported(folder) or config.task.text
        other = [] if follows else _differences(config, folder)
        if other is None:
            return
        _follow_tokenizer(config, "init_from", overrides)
    except OSError:
        return
    if other:
        cli.say(
            f"init_from={config.init_from}: its architecture is used, not the config's "
            f"({', '.join(other[:3])})"
        )
    # No output here: `take` reports which checkpoint it is.
    source, *_ = open_model(config.init_from, "init_from", silent)
    if "model.size" in overrides and config.model.size != source.model["size"]:
        raise UserError(
            f"model.size={config.model.size}: the sizes are those of "
            f"init_from={config.init_from}; leave it out"
        )
    depth = "num_hidden_layers"
    if config.init_layers:
        config.model[depth] = in_effect(config.model.to_dict())[depth]
    for key, value in source.model.items():
        chosen = key == depth and config.init_layers
        given = key in OPEN and config.model[key] is not None
        if not (chosen or given or key in RUNTIME or f"model.{key}" in overrides):
            config.model[key] = value
    if _continues_causally(config, source) and "model.is_decoder" not in overrides:
        config.model.is_decoder = True
    # The generator's width is a size, although the objective states it.
    (name, options, _), *_ = objectives.parse(config.objective)
    if name == "electra" and source.objective.startswith("electra:"):
        options |= objectives.parse(source.objective)[0][1]
        # Written as floats, as runs of earlier versions recorded them.
        parts = [f"{key}={float(value)}" for key, value in options.items()]
        config.objective = f"electra:{','.join(parts)}"


def vocabulary_of(path: str) -> str:
    """Return the path of the tokenizer of a run or of another library's directory."""
    folder = manifest.as_path(path)
    if not hf_directories.is_directory(folder):
        folder = manifest.resolve(path)[0]
    own = folder / "tokenizer"
    return str(own if own.is_dir() else hf_directories.tokenizer_folders(folder)[0])


def follow_teacher(config: ConfigDict, overrides: Container[str] = ()) -> None:
    """Use the teacher's tokenizer if none is given and the teacher exists."""
    if config.teacher:
        with contextlib.suppress(OSError):
            _follow_tokenizer(config, "teacher", overrides)


def _follow_tokenizer(
    config: ConfigDict, key: str, overrides: Container[str] = ()
) -> None:
    """Use the vocabulary of a key's model if none is given, lower-casing as it does.

    data.lower_case stays if it is given on the command line. In a config file it is
    meant for a vocabulary that is trained. Raises OSError if there is no model.
    """
    path, data = config[key], config.data
    if data.vocab:
        return
    data.vocab = vocabulary_of(path)
    if data.lower_case is None or "data.lower_case" in overrides:
        return
    theirs = open_model(path, key, silent)[1].lower_case
    if theirs != data.lower_case:
        data.lower_case = theirs
        cli.say(
            f"{key}={path}: data.lower_case={theirs} is used, as its tokenizer has it, "
            f"not the config's {not theirs}"
        )


def keep_vocabulary(config: ConfigDict, path: Any) -> None:
    """Let a workdir's run keep its own tokenizer files.

    init_from's or the teacher's tokenizer may have other files that give the same ids,
    as an export has.
    """
    source, own = config.init_from or config.teacher, path / "tokenizer"
    if not (source and config.data.vocab) or is_remote(path) or not own.is_dir():
        return
    with contextlib.suppress(OSError):  # a resumed run may not have its source any more
        if config.data.vocab == vocabulary_of(source):
            theirs, ours = map(load_tokenizer, (config.data.vocab, own))
            if theirs.identity != ours.identity and same_ids(theirs, ours):
                config.data.vocab = str(own)


def kept_sentences(config: ConfigDict) -> dict[str, Any]:
    """Return {"sentences": how the model that pretraining begins with embeds them}.

    See interop/sentence_transformers.py; a checkpoint records it. Returns {} for a
    task, which has its own way or none; for models whose vectors need more than hidden
    states; and if nothing is recorded. The length in a tokenizer's files is the
    model's, and pretraining may continue with longer texts.
    """
    from bertjax.models.pooling import POOLINGS  # needs jax

    key = "init_from" if config.init_from else "teacher"
    source = config[key] if key == "init_from" or config.init_layers else ""
    if not source or config.task.text:
        return {}
    folder = manifest.as_path(source)
    how: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # a resumed sweep may not have it any more
        if hf_directories.is_directory(folder):
            own = Path(hf_directories.tokenizer_folders(folder)[0])
            if (own / sentence_transformers.MODULES).exists():
                read = sentence_transformers.read(own, f"{key}={source}")
                how = dataclasses.asdict(read)
        else:
            meta = manifest.read_meta(manifest.resolve(folder)[1])
            how = meta.get("sentences", {})
    usual = dataclasses.asdict(Sentences())
    how = {**usual, **how}
    is_known = how["kind"] == "dense" and how["pooling"] in POOLINGS
    return {"sentences": how} if is_known and how != usual else {}


def kept_hf_config(config: ConfigDict) -> dict[str, Any]:
    """Return {"hf_config": keys} of the config.json of init_from's model, or {}.

    An export of the run writes them again. Keys about a task or files are left out.
    """
    if not config.init_from:
        return {}
    folder, raw = manifest.as_path(config.init_from), {}
    with contextlib.suppress(OSError):  # a sweep may continue without it
        if hf_directories.is_directory(folder):
            raw = hf_directories.open_model(Path(folder), "init_from").raw
        else:
            meta = manifest.read_meta(manifest.resolve(folder)[1])
            raw = meta.get("hf") or meta.get("hf_config", {})
    kept = {k: raw[k] for k in raw if not (k in OF_FILES or k.startswith(PREFIX))}
    return {"hf_config": kept} if kept else {}


def _continues_causally(config: ConfigDict, source: ConfigDict) -> bool:
    """Return whether a causal model continues with a task that writes texts.

    source: the config of a run. The objective `clm` itself makes attention causal; no
    model.* key records it.
    """
    task_type = shipped_task_type(config.objective)
    if not task_type or not task_type.generates:
        return False
    return {part.name for part in objectives.parse(source.objective)} == {"clm"}


def _is_imported(path: Any) -> bool:
    """Return whether a path is another library's directory, or converted from one."""
    try:
        return "hf" in manifest.read_meta(manifest.resolve(path)[1])
    except FileNotFoundError:
        return hf_directories.is_directory(path)


def _differences(config: ConfigDict, path: Any) -> list[str] | None:
    """Return where a run's model differs from the config's, as "norm_position=post".

    None if there is no run.
    """
    try:
        meta = manifest.read_meta(manifest.resolve(path)[1])
    except FileNotFoundError:
        return None
    theirs = in_effect(meta.get("config", {}).get("model", {}))
    ours = in_effect(config.model.to_dict())
    keys = theirs.keys() & ours.keys() - UNTOLD - {*RUNTIME, *OPEN}
    return [f"{key}={theirs[key]}" for key in sorted(keys) if theirs[key] != ours[key]]


class SavedParams:
    """A checkpoint's parameters, or their average, read like an imported model's."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.leaves = folder, None

    def __str__(self) -> str:
        return str(self.folder)

    def describe(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves by path."""
        from bertjax.checkpoints.manager import describe

        return describe(self.folder)

    def read(self, path: str) -> Any:
        """Read one leaf; the first call reads all."""
        from bertjax.parallel.sharding import leaves_of

        if self.leaves is None:
            self.leaves = leaves_of(read_params(self.folder))
        return self.leaves[path]


def take(
    path: str,
    tokenizer: Any,
    params: Any,
    say: Say,
    task: Mapping[str, Any],
    layers: str = "",
    reads: bool = True,
) -> dict[str, Any]:
    """Read the parameters that init_from and these shapes and shardings have in common.

    layers: init_layers. task: what a checkpoint will store about the task
    (tasks/prepare_task.py); a head of classes is used only if its classes have the same
    names in the same order. reads: whether to read them; otherwise only their shapes
    are. Raises UserError if the parameters do not fit, or if a token has another id
    there.
    """
    from bertjax.checkpoints.manager import warm_start
    from bertjax.parallel.sharding import leaves_of

    source = check_init_from(path, say)
    if not isinstance(source, hf_read.Imported):
        meta = manifest.read_meta(source)
    else:
        meta = {"task": {"labels": [*source.task.labels]}} if source.task else {}
    if meta.get("tokenizer") != tokenizer.identity:
        theirs = open_model(str(source), "init_from", silent).tokenizer
        if not same_ids(theirs, tokenizer):
            if same_pieces(theirs, tokenizer):
                raise UserError(lower_case_differs(f"init_from={source}", theirs))
            more = 0 if len(theirs.sentinel_ids) else len(tokenizer.sentinel_ids)
            if more and theirs.pieces == tokenizer.pieces[:-more]:
                raise UserError(
                    f"init_from={source} has no embeddings of the {more} pieces that "
                    f"data.extra_ids={more} puts behind its vocabulary: take a model "
                    "that has them, or --config.data.extra_ids=0 and an objective "
                    "that needs none"
                )
            raise UserError(
                f"init_from={source} has another tokenizer: give its own, "
                f"--config.data.vocab={vocabulary_of(path)}"
            )
    known, wanted = meta.get("task", {}).get("labels", []), task.get("labels", [])
    heads = tuple(f"{part}/" for part in params if wanted and part != "encoder")
    fresh = heads if known and known != wanted else ()
    if fresh:
        say(f"init_from={path}: it has other labels, so the head is newly initialized")
    part = params_part(source)
    whole = source if isinstance(source, hf_read.Imported) else SavedParams(source)
    is_pair = any(path.startswith("generator/") for path in whole.describe())
    if is_pair != ("generator" in params) and "mlm" in params:
        # A pair's head for masked tokens is the generator's, which has another width.
        what = "it becomes the discriminator; the generator"
        if is_pair:
            what = "ELECTRA's discriminator is used; the head for masked tokens"
        say(f"init_from={path}: {what} is newly initialized")
        fresh = (*fresh, "mlm/")
    if layers:
        shapes = {name: leaf.shape for name, leaf in leaves_of(params).items()}
        source = ChosenLayers(whole, layers, shapes)
    return warm_start(source, params, say, part, fresh, heads, reads)

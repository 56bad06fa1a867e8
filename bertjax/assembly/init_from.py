# SPDX-License-Identifier: Apache-2.0
"""init_from: parameters, architecture and vocabulary of another run or model."""

import contextlib
import dataclasses
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, objectives
from bertjax.assembly.init_layers import ChosenLayers
from bertjax.assembly.models import (
    find_checkpoint,
    open_model,
    params_part,
    read_params,
    same_ids,
)
from bertjax.checkpoints import manifest
from bertjax.config import cli
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.interop import hf_directories, hf_read, sentence_transformers
from bertjax.interop.sentence_transformers import Sentences
from bertjax.models.config import RUNTIME
from bertjax.models.families import in_effect
from bertjax.storage.atomic import is_remote
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_type import shipped_task_type

# What says nothing of a model's shape, or is said by another key that is compared.
UNTOLD = {"size", "family", "vocab_size", "pieces", "is_decoder"}
# Of a model's options those that a recipe decides, whatever a checkpoint had.
OPEN = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
OPEN += ("zero_init_outputs", "fan_in_init")


def check_init_from(path: str, say: Say = silent, key: str = "init_from") -> Any:
    """Return what a key names: a whole checkpoint, or an imported model."""
    found = find_checkpoint(path, key, say)[1]
    return found or open_model(path, key, silent).checkpoint


def follow_init_from(config: ConfigDict, overrides: Container[str] = ()) -> None:
    """Take init_from's vocabulary where none is given, and its architecture.

    overrides: keys that the command line gave, which stay; so does what the config
    says of OPEN. Where a run of ours goes on in pretraining as another model than the
    config's, a line says so. Nothing happens where nothing is (yet). Raises UserError
    for another size in overrides.
    """
    folder = manifest.as_path(config.init_from) if config.init_from else None
    try:
        if folder is None:
            return
        follows = _is_imported(folder) or config.task.text
        other = [] if follows else _differences(config, folder)
        if other is None:
            return
        if not config.data.vocab:
            config.data.vocab = vocabulary_of(config.init_from)
    except OSError:
        return
    if other:
        cli.say(
            f"init_from={config.init_from}: its model is taken, not the config's "
            f"({', '.join(other[:3])})"
        )
    # Silently: `take` says which checkpoint it is.
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
        stays = key == depth and config.init_layers
        stays = (
            stays or key in RUNTIME or (key in OPEN and config.model[key] is not None)
        )
        if not stays and f"model.{key}" not in overrides:
            config.model[key] = value
    if _goes_on_causally(config, source) and "model.is_decoder" not in overrides:
        config.model.is_decoder = True
    # A generator's width is a size, though the objective tells it.
    (name, options, _), *_ = objectives.parse(config.objective)
    if name == "electra" and source.objective.startswith("electra:"):
        options |= objectives.parse(source.objective)[0][1]
        # As floats, which is how runs begun by earlier versions recorded them.
        parts = [f"{key}={float(value)}" for key, value in options.items()]
        config.objective = f"electra:{','.join(parts)}"


def vocabulary_of(path: str) -> str:
    """Return where the tokenizer of a run or of another library's directory lies."""
    folder = manifest.as_path(path)
    if not hf_directories.is_directory(folder):
        folder = manifest.resolve(path)[0]
    own = folder / "tokenizer"
    return str(own if own.is_dir() else hf_directories.tokenizer_folders(folder)[0])


def follow_teacher(config: ConfigDict) -> None:
    """Take the teacher's vocabulary where none is given; nothing where it is not
    (yet)."""
    if config.teacher and not config.data.vocab:
        with contextlib.suppress(OSError):
            config.data.vocab = vocabulary_of(config.teacher)


def keep_vocabulary(config: ConfigDict, path: Any) -> None:
    """Let the run in a workdir keep its own tokenizer where that of init_from or of the
    teacher has other files that give the same ids, as those of an export."""
    source, own = config.init_from or config.teacher, path / "tokenizer"
    if not (source and config.data.vocab) or is_remote(path) or not own.is_dir():
        return
    with contextlib.suppress(OSError):  # of a run that goes on without its source
        if config.data.vocab == vocabulary_of(source):
            theirs, ours = map(load_tokenizer, (config.data.vocab, own))
            if theirs.identity != ours.identity and same_ids(theirs, ours):
                config.data.vocab = str(own)


def kept_sentences(config: ConfigDict) -> dict[str, Any]:
    """Return {"sentences": how}: vectors of sentences are made as the model makes them
    that pretraining begins with (interop/sentence_transformers.py).

    {} of a task, which has a way of its own or none, of models whose vectors need more
    than hidden states, and where nothing is said of them: the length in files of a
    tokenizer is the model's, and pretraining may go on with longer texts.
    """
    from bertjax.models.pooling import POOLINGS  # which needs jax

    key = "init_from" if config.init_from else "teacher"
    source = config[key] if key == "init_from" or config.init_layers else ""
    if not source or config.task.text:
        return {}
    folder = manifest.as_path(source)
    how: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # of a sweep that goes on without it
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


def _goes_on_causally(config: ConfigDict, source: ConfigDict) -> bool:
    """True where texts are learnt by a model whose tokens have seen none after them.

    source: the config of a run; `clm` itself says how its tokens see, no model.* does.
    """
    task_type = shipped_task_type(config.objective)
    if not task_type or not task_type.generates:
        return False
    return {part.name for part in objectives.parse(source.objective)} == {"clm"}


def _is_imported(path: Any) -> bool:
    """True for another library's directory and for what convert made of one."""
    try:
        return "hf" in manifest.read_meta(manifest.resolve(path)[1])
    except FileNotFoundError:
        return hf_directories.is_directory(path)


def _differences(config: ConfigDict, path: Any) -> list[str] | None:
    """Return what sets a run's model apart from the config's: "norm_position=post",
    ...; None where there is no run."""
    try:
        meta = manifest.read_meta(manifest.resolve(path)[1])
    except FileNotFoundError:
        return None
    theirs = in_effect(meta.get("config", {}).get("model", {}))
    ours = in_effect(config.model.to_dict())
    keys = theirs.keys() & ours.keys() - UNTOLD - {*RUNTIME, *OPEN}
    return [f"{key}={theirs[key]}" for key in sorted(keys) if theirs[key] != ours[key]]


def _has_generator(shapes: Iterable[str]) -> bool:
    return any(path.startswith("generator/") for path in shapes)


class SavedParams:
    """The parameters of a checkpoint, or their average, as an imported model's."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.leaves = folder, None

    def __str__(self) -> str:
        return str(self.folder)

    def describe(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves by path."""
        from bertjax.checkpoints.manager import describe

        return describe(self.folder)

    def read(self, path: str) -> Any:
        """Read one leaf, and with the first one all."""
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
) -> dict[str, Any]:
    """Read what init_from and these parameters (shapes, shardings) have in common.

    layers: init_layers. task: what a checkpoint will keep of the task
    (tasks/prepare_task.py): a head of classes is taken where they have the same names
    in the same order. Raises UserError where it cannot be, or a token has another id
    in it.
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
            raise UserError(
                f"init_from={source} has another tokenizer: give its own, "
                f"--config.data.vocab={vocabulary_of(path)}"
            )
    known, wanted = meta.get("task", {}).get("labels", []), task.get("labels", [])
    heads = tuple(f"{part}/" for part in params if wanted and part != "encoder")
    fresh = heads if known and known != wanted else ()
    if fresh:
        say(f"init_from={path}: its labels are others, so their head begins anew")
    part = params_part(source)
    whole = source if isinstance(source, hf_read.Imported) else SavedParams(source)
    if "generator" in params and not _has_generator(whole.describe()):
        # The head for masked tokens is the generator's, which is of another width.
        say(
            f"init_from={path}: it becomes the discriminator; the generator begins anew"
        )
        fresh = ("mlm/",)
    if layers:
        shapes = {name: leaf.shape for name, leaf in leaves_of(params).items()}
        source = ChosenLayers(whole, layers, shapes)
    return warm_start(source, params, say, part, fresh, heads)

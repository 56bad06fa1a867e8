# SPDX-License-Identifier: Apache-2.0
"""Open what lies on a disk: workdirs, their checkpoints, other libraries' models.

Nothing here imports jax until parameters are read.
"""

import json
import os
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import IO, Any

from bertjax import UserError, counted, objectives, registry
from bertjax import config as c
from bertjax.interop import directories, hf, pairs, sentences
from bertjax.models.config import RUNTIME
from bertjax.models.families import size_name
from bertjax.tasks import exported
from bertjax.tasks import prepare as tasks
from bertjax.training import kinds, manifest, workdir

Say = Callable[[str], None]
# Config, tokenizer, checkpoint, what the checkpoint says of itself.
Opened = tuple[c.ConfigDict, Any, Any, dict[str, Any]]
FINDINGS = "answers.txt"  # in a workdir
FEW = 5  # changes of a config that a message tells
# Of a model's options those that a recipe decides, whatever a checkpoint had.
OPEN = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def silent(text: str) -> None:
    """Say nothing."""


def write_whole(
    out: Path, content: bytes | Callable[[IO[bytes]], Any], what: str
) -> None:
    """Write a file beside its place and rename it: it is there whole or not at all.

    content: or what writes it to a file. Raises UserError, which begins with `what`,
    when it cannot be written.
    """
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
        draft.replace(out)
    except OSError as e:
        raise UserError(f"{what} cannot be written: {e.strerror or e}") from e
    finally:
        draft.unlink(missing_ok=True)


def check_out(name: str, flag: str, ending: str = "") -> Path:
    """Return the file to write, which a flag names.

    ending: of its name, in any case. Raises UserError for what cannot be one.
    """
    out = Path(name).expanduser()
    if "://" in name:
        raise UserError(f"{flag}={name}: it is written to a disk of this machine")
    if ending and out.suffix.lower() != ending:
        raise UserError(f"{flag}={name} is no name of such a file: it ends in {ending}")
    if out.is_dir():
        raise UserError(f"{flag}={name} is a directory: name a file in it")
    if not out.parent.is_dir():
        raise UserError(
            f"{flag}={name} cannot be written: {out.parent} is no directory"
        )
    return out


def write_findings(path: Any, prepared: Any, say: Say) -> None:
    """Write what was said of a task's text, whole, into a workdir, and say where."""
    sets = (*prepared.parts.values(), *prepared.valid.values())
    lines = dict.fromkeys(line for one in sets for line in getattr(one, "findings", ()))
    if lines:
        workdir.write_text(path / FINDINGS, "".join(f"{line}\n" for line in lines))
        told = counted(len(lines), "answer")
        say(f"all {told} not where the file says: {FINDINGS}")


def check_place(path: Any) -> None:
    """Refuse a workdir that cannot be one: UserError."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--workdir={path} is a file")
    if not workdir.is_remote(path):
        there = next(p for p in (path, *path.parents) if p.exists())
        try:
            # Made and removed: permissions alone do not tell, as of /proc.
            tempfile.TemporaryDirectory(prefix=".bertjax-", dir=there).cleanup()
        except OSError as e:
            why = f"nothing can be made in {there}"
            if not isinstance(e, FileNotFoundError):
                why += f" ({e.strerror})"
            raise UserError(f"--workdir={path} cannot be written: {why}") from e


def check_workdir(path: Any, config: c.ConfigDict, allow_change: bool) -> None:
    """Refuse a workdir that holds a sweep, or a run of another config: UserError."""
    check_place(path)
    kinds.check_run(path)
    file = path / "config.json"
    if not file.exists():
        return
    try:
        changes = c.differences(c.from_json(file.read_text()), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())}") from e
    if changes and not allow_change:
        advice = "take another workdir, or --allow_config_change to go on with this one"
        said = tell_changes(changes, advice)
        raise UserError(f"--workdir={path} holds a run of another config{said}")


def tell_changes(changes: list[str], advice: str) -> str:
    """Say what to do about "KEY: OLD -> NEW": one in this line, several a line each."""
    if len(changes) == 1:
        return f": {changes[0]}; {advice}"
    first, more = changes[:FEW], len(changes) - FEW
    keys = ", ".join(change.partition(":")[0] for change in first)
    rest = [f"and {more} more"] if more > 0 else []
    return "\n  ".join([f" ({', '.join([keys, *rest])}): {advice}", *first, *rest])


def names_its_text(path: Any, config: c.ConfigDict) -> bool:
    """True where a workdir's run was made of running text by the names of this config.

    Then nobody prepares it, which may take hours, to say that the run is done. A task's
    rows are read in a moment, so that a table that was changed in its place is noticed.
    """
    there = workdir.read_json(path / "config.json").get("data", {})
    keys = "train", "valid", "vocab", "similar", "segmenter"
    same = all(there.get(key) == config.data[key] for key in keys)
    return same and not tasks.is_task(config)


def check_init_from(path: str, say: Say = silent) -> Any:
    """Return what init_from names: a checkpoint, or an imported model.

    say: is told where it is the best one. Raises UserError unless it is whole.
    """
    try:
        found = manifest.resolve(path, say)[1]
    except OSError as e:
        there = manifest.as_path(path)
        if directories.is_directory(there):
            return open_model(path, "init_from", silent)[2]
        why = kinds.why_no_checkpoint(there, path)
        raise UserError(f"init_from={path}: {why}") from e
    if wrong := manifest.problem(found):
        raise UserError(f"init_from={path}: checkpoints/{found.name}: {wrong}")
    return found


def follow_init_from(config: c.ConfigDict, overrides: Container[str] = ()) -> None:
    """Take an imported init_from's architecture, and vocabulary where none is given.

    overrides: keys that the command line gave, which stay; so does what the config
    says of OPEN, if it says something. A config file's own shapes are its recipe's,
    not the checkpoint's. Finetuning follows runs of ours too; nothing happens for
    others, and where nothing is (yet). Raises UserError for a size in overrides.
    """
    folder = manifest.as_path(config.init_from) if config.init_from else None
    try:
        if folder is None or not (_is_imported(folder) or config.task.text):
            return
    except OSError:
        return
    if "model.size" in overrides:
        raise UserError(
            f"model.size={config.model.size}: the sizes are those of "
            f"init_from={config.init_from}; leave it out"
        )
    # Silently: `take` says which checkpoint it is.
    there, *_ = open_model(config.init_from, "init_from", silent)
    for key, value in there.model.items():
        stays = key in RUNTIME or (key in OPEN and config.model[key] is not None)
        if not stays and f"model.{key}" not in overrides:
            config.model[key] = value
    if not config.data.vocab:
        if not directories.is_directory(folder):
            folder = manifest.resolve(config.init_from)[0]
        own = folder / "tokenizer"
        found = own if own.is_dir() else directories.tokenizer_folders(folder)[0]
        config.data.vocab = str(found)
    # A generator's width is a size, though the objective tells it.
    (name, options), *_ = objectives.parse(config.objective)
    if name == "electra" and there.objective.startswith("electra:"):
        options |= objectives.parse(there.objective)[0][1]
        told = ",".join(f"{key}={value}" for key, value in options.items())
        config.objective = f"electra:{told}"


def _is_imported(path: Any) -> bool:
    """True for another library's directory and for what convert made of one."""
    try:
        return "hf" in manifest.read_meta(manifest.resolve(path)[1])
    except FileNotFoundError:
        return directories.is_directory(path)


def check_init_tokenizer(source: Any, tokenizer: Any) -> None:
    """Refuse init_from's parameters where a token has another id in them."""
    ours = not isinstance(source, hf.Imported)
    if ours and manifest.read_meta(source)["tokenizer"] == tokenizer.identity:
        return
    there = open_model(str(source), "init_from", silent)[1]
    said = [(t.kind, t.pieces, t.lower_case, t.roles) for t in (there, tokenizer)]
    if said[0] != said[1]:
        raise UserError(f"init_from={source} has another tokenizer")


def at_step(path: str, step: int | None) -> str:
    """Return a workdir's checkpoint of a step; without a step, the workdir.

    Raises UserError where it has none of that step.
    """
    if step is None or not manifest.as_path(path).is_dir():
        return path  # which whoever opens it says
    there = manifest.steps(manifest.as_path(path))
    if step not in there:
        have = f"; there are {', '.join(map(str, there))}" if there else ", nor another"
        raise UserError(f"--step={step}: {path} has no checkpoint of that step{have}")
    return f"{path.rstrip('/')}/checkpoints/{step}"


def take(
    path: str, tokenizer: Any, params: Any, say: Say, task: Mapping[str, Any]
) -> dict[str, Any]:
    """Read what init_from and these parameters (shapes, shardings) have in common.

    task: what a checkpoint will keep of the task (tasks/prepare.py): a head of classes
    is taken where they have the same names in the same order. Raises UserError where it
    cannot be, or a token has another id in it.
    """
    from bertjax.training.checkpoint import warm_start

    source = check_init_from(path, say)
    check_init_tokenizer(source, tokenizer)
    fresh: tuple[str, ...] = ()
    known, wanted = _labels(source), task.get("labels", [])
    if known and wanted and known != wanted:
        fresh = tuple(f"{part}/" for part in params if part != "encoder")
        say(f"init_from={path}: its labels are others, so their head begins anew")
    return warm_start(source, params, say, params_part(source), fresh)


def _labels(source: Any) -> list[str]:
    """Return the labels of what init_from names, [] where it has none."""
    if isinstance(source, hf.Imported):
        return list(source.task.labels) if source.task else []
    return manifest.read_meta(source).get("task", {}).get("labels", [])


def open_model(path: str, flag: str, say: Say = c.say) -> Opened:
    """Open a workdir (its newest checkpoint, or the best where the run kept that), a
    checkpoint, or another library's directory.

    Returns (config, tokenizer, checkpoint, what the checkpoint says of itself);
    `read_params` reads the checkpoint. Raises UserError naming `flag` when there is
    no whole one.
    """
    from bertjax.data.vocab.tokenizers import load_tokenizer

    try:
        directory, checkpoint = manifest.resolve(path, say)
    except OSError:
        there = manifest.as_path(path)
        if directories.is_directory(there):
            return open_directory(there, flag, say)
        raise UserError(
            f"{flag}={path}: {kinds.why_no_checkpoint(there, path)}"
        ) from None
    wrong = manifest.problem(checkpoint)
    if wrong:
        raise UserError(f"{flag}={path}: checkpoints/{checkpoint.name}: {wrong}")
    meta = manifest.read_meta(checkpoint)
    tokenizer = workdir.read_directory(directory / "tokenizer", load_tokenizer)
    if tokenizer.identity != meta["tokenizer"]:
        raise UserError(f"{directory}/tokenizer is not the one of {checkpoint}")
    return c.from_json(json.dumps(meta["config"])), tokenizer, checkpoint, meta


def open_directory(directory: Any, flag: str, say: Say = c.say) -> Opened:
    """Open another library's directory, as `open_model` does a workdir.

    In the place of the checkpoint stands an interop.hf.Imported. Raises UserError when
    model and tokenizer are not of one piece.
    """
    from bertjax.data.vocab.exports import separators_of
    from bertjax.data.vocab.tokenizers import load_tokenizer

    where = f"{flag}={directory}"
    if workdir.is_remote(directory):
        raise UserError(f"{where} is another library's: copy it to a disk first")
    model = directories.open_model(Path(directory), where)
    folders = directories.tokenizer_folders(directory)
    tokenizer, *same = [load_tokenizer(folder, key=flag) for folder in folders]
    if any(other.identity != tokenizer.identity for other in same):
        raise UserError(f"{where}: generator and discriminator differ in the tokenizer")
    hf.check_tokenizer(model, tokenizer, say)
    config = c.base()
    config.model.update(sizes(model.cfg, model.family.model_type))
    config.objective = "+".join(h for h in ("mlm", "nsp", "sop") if h in model.heads)
    config.objective = config.objective or "mlm"
    if isinstance(model, pairs.Pair):
        config.objective = f"electra:generator={model.share:g}"
    if "+" not in config.objective:
        config.data.plan = "full_sentences"
    config.data.length = min(config.data.length, model.cfg.max_length)
    if model.task:
        told = sentences.model_max_length(model.directory, where)
        longest = model.cfg.max_length
        tasks.tell(config, *model.task, longest=min(told or longest, longest))
    model.report(say)
    task = {}
    if model.task:
        between = separators_of(tokenizer) or tasks.separators(config)
        task = {"labels": list(model.task.labels), "separators": between}
        task |= exported.from_json(model.raw, config, where)
    meta = {
        "tokenizer": tokenizer.identity,
        "config": config.to_dict(),
        "hf": model.raw,
    }
    if task:
        meta["task"] = task
    return config, tokenizer, model, meta


def sizes(cfg: Any, family: str) -> dict[str, Any]:
    """Return the keys of config.model that spell an encoder out."""
    keys = set(c.base().model) - {"family", "size", *RUNTIME}
    told = {k: getattr(cfg, k) for k in keys if hasattr(cfg, k)}
    return {**told, "family": family, "size": size_name(family, told)}


def params_part(checkpoint: Any, weights: str = "") -> str:
    """Return which part of a checkpoint's state is used: "params", or "ema".

    weights: "raw", "ema", or "" for the average where there is one, unless the run's
    config says otherwise (eval.ema). Raises UserError where there is none.
    """
    if weights:
        registry.pick("--weights", weights, dict.fromkeys(("raw", "ema")))
    there = False
    if weights != "raw" and not isinstance(checkpoint, hf.Imported):
        from bertjax.training.checkpoint import has_average

        there = has_average(checkpoint)
    if weights == "ema" and not there:
        raise UserError(f"--weights=ema: {checkpoint} has no moving average")
    if there and not weights:
        said = manifest.read_meta(checkpoint)["config"]
        there = c.from_json(json.dumps(said)).eval.ema
    return "ema" if there else "params"


def check_masked_lm(opened: Opened, what: str, then: str = "") -> None:
    """Refuse a finetuned model where blanks are filled: UserError.

    Its head took the masked-LM head's place. what: begins the message; then: what to
    do instead, where it is not the command that uses such models.
    """
    config, _, _, meta = opened
    if "task" in meta:
        command = "embed" if config.objective == "retrieve" else "predict"
        raise UserError(
            f"{what} was finetuned (objective={config.objective}) and has no masked-LM "
            f"head; {then or f'bertjax.{command} uses such models'}"
        )


def read_params(checkpoint: Any, head: str = "", weights: str = "") -> Any:
    """Read the parameters that `open_model` found, as numpy arrays.

    weights: see params_part. Raises UserError when they lack the `head` that is asked
    for.
    """
    part = params_part(checkpoint, weights)
    if isinstance(checkpoint, hf.Imported):
        params = checkpoint.params()
    else:
        from bertjax.training.checkpoint import restore_params

        params = restore_params(checkpoint, part=part)
    if head and head not in params:
        name = {"mlm": "masked-LM"}.get(head, head)
        raise UserError(f"{checkpoint} has no {name} head")
    return params

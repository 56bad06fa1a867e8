# SPDX-License-Identifier: Apache-2.0
"""Compare what a workdir contains with the config of a command."""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.checkpoints import manifest, workdir, workdir_kinds
from bertjax.config import serialize
from bertjax.interop import hf_directories
from bertjax.storage.atomic import is_remote, write_file
from bertjax.storage.paths import check_writable
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import Say

FINDINGS = "answers.txt"  # in a workdir
FEW = 5  # changes of a config that a message lists


def write_findings(path: Any, prepared: Any, say: Say) -> None:
    """Write the remarks about a task's text into a workdir, and say where."""
    sets = (*prepared.parts.values(), *prepared.valid.values())
    lines = dict.fromkeys(line for one in sets for line in getattr(one, "findings", ()))
    if lines:
        write_file(path / FINDINGS, "".join(f"{line}\n" for line in lines))
        count = counted(len(lines), "answer")
        say(f"all {count} not where the file says: {FINDINGS}")


def check_place(path: Any) -> None:
    """Refuse a path that cannot be a workdir. Raises UserError."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--workdir={path} is a file")
    config = workdir.read_json(path / "config.json")
    if hf_directories.is_directory(path) and "optim" not in config:
        raise UserError(
            f"--workdir={path} holds a Hugging Face model: take another workdir, with "
            f"--config.init_from={path}"
        )
    if not is_remote(path):
        check_writable(path, f"--workdir={path}")


def check_workdir(path: Any, config: ConfigDict, allow_change: bool) -> None:
    """Refuse a workdir with a sweep, a run of another config, or damaged JSON files.

    The files are run.json and config.json. Raises UserError.
    """
    check_place(path)
    workdir_kinds.check_run(path)
    # records the rules by which rows were made
    workdir_kinds.read_object(path / "run.json")
    file = path / "config.json"
    if not file.exists():
        return
    try:
        changes = serialize.differences(
            serialize.from_json(file.read_text(), file), config
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())}") from e
    if changes and not allow_change:
        lost = explain_lost_source(path, config)
        if lost and any(change.startswith("model.") for change in changes):
            raise UserError(lost)
        advice = "take another workdir, or --allow_config_change to continue this one"
        detail = describe_changes(changes, advice)
        raise UserError(f"--workdir={path} holds a run of another config{detail}")


def explain_lost_source(path: Any, config: ConfigDict) -> str:
    """Explain that a workdir's run or sweep has lost its init_from.

    Returns "" if init_from exists, or nothing has begun.
    """
    source, kind = config.init_from, workdir_kinds.kind(path)
    if not (source and kind) or manifest.as_path(source).exists():
        return ""
    what = {workdir_kinds.SWEEP: "the sweep", workdir_kinds.UNDER_WAY: kind}
    last, end = max(manifest.steps(path), default=0), ""
    where = f"{what.get(kind, 'the run')} in {path}"
    if kind != workdir_kinds.UNDER_WAY:
        done = workdir.is_done(path, last, bool(config.data.valid))
        stands = "done" if done or kind == workdir_kinds.SWEEP else "saved"
        where += f", {stands} at step {last:,},"
        end = f"; other commands, and init_from of another run, need {path} alone"
    return (
        f"init_from={source}: no such directory; {where} reads its model and "
        f"vocabulary there whenever it is started{end}"
    )


def describe_changes(changes: list[str], advice: str) -> str:
    """List in a line what changed, as "KEY: OLD -> NEW", and what to do."""
    more = [f"and {len(changes) - FEW} more"] * (len(changes) > FEW)
    return f": {'; '.join([*changes[:FEW], *more, advice])}"


def reads_same_text(path: Any, config: ConfigDict) -> bool:
    """Return whether this config names a run's running text as the run did.

    It is False for a task, whose rows are read quickly, so that a
    changed table is noticed.
    """
    recorded = workdir.read_json(path / "config.json").get("data", {})
    keys = "train valid vocab similar mask_weights swap segmenter concept control"
    same = all(recorded.get(key, "") == config.data[key] for key in keys.split())
    return same and not tasks.is_task(config)


def known_total(config: ConfigDict, meta: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a checkpoint records for its run.

    None if it records none, or belongs to another config. meta: the
    checkpoint's metadata.
    """
    total = meta.get("total_steps")
    if total is None:
        return None
    before = serialize.from_json(json.dumps(meta["config"]))
    return None if serialize.differences(before, config) else total

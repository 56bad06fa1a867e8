# SPDX-License-Identifier: Apache-2.0
"""The kind of a workdir: a run, a sweep, or a converted or compressed model.

Only a run can resume from a run's checkpoints, and only a sweep from a sweep's, so each
checks the kind first. This module needs no jax.
"""

import json
import re
from typing import Any

from bertjax import UserError
from bertjax.checkpoints import manifest
from bertjax.checkpoints.workdir import read_json

RESULTS = "sweep.json"  # the results of a finished sweep
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MEMBERS = "members"  # the states of a sweep that is not finished
RUN, CONVERTED = "a run", "a converted model"
COMPRESSED = "a compressed model"
SWEEP, UNDER_WAY = "a sweep", "a sweep under way"


def kind(path: Any) -> str:
    """Return the kind of a workdir, one of the names above; "" without a checkpoint."""
    if (path / RESULTS).exists():
        return SWEEP
    if (path / MEMBERS).exists():
        return UNDER_WAY
    saved = manifest.steps(path)
    if not saved:
        return ""
    meta = read_meta(path, saved[-1])
    if "runs" in meta:  # sweep.json is lost
        return SWEEP
    if "compressed" in meta:
        return COMPRESSED
    return CONVERTED if "config" in meta and "stores" not in meta else RUN


def check_run(path: Any) -> None:
    """Raise UserError for a workdir in which no run can begin or resume."""
    what = kind(path)
    if what == UNDER_WAY:
        raise UserError(
            f"--workdir={path} holds {what}: repeat its command to finish it, or take "
            "another workdir"
        )
    if what in (SWEEP, CONVERTED, COMPRESSED):
        raise UserError(
            f"--workdir={path} holds {what}, no state to train on from: take another "
            f"workdir, with --config.init_from={path}"
        )


def check_sweep(path: Any, runs: Any) -> None:
    """Raise UserError if a workdir's checkpoints are not those of the sweep.

    The workdir has no sweep.json; a sweep that was killed at its very end leaves such a
    one, with checkpoints. The sweep's runs are those of its saved members, or `runs`,
    (seed, rate) each, if no member is saved.
    """
    what, members = kind(path), path / MEMBERS / "0"
    saved = [read_meta(members, step).get("runs") for step in manifest.steps(members)]
    known = saved or [[list(run) for run in runs]]
    for step in manifest.steps(path):
        if what != UNDER_WAY:
            raise UserError(f"--workdir={path} holds {what}: take another workdir")
        if read_meta(path, step).get("runs") not in known:
            raise UserError(
                f"--workdir={path}: checkpoints/{step} is not of the sweep under way "
                "there: take another workdir"
            )


def read_meta(path: Any, step: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint; {} if that is damaged."""
    return read_json(path / "checkpoints" / str(step) / manifest.META)


def read_object(file: Any) -> dict[str, Any]:
    """Return the JSON object in a file; {} without the file.

    Raises UserError if the file is damaged.
    """
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or not found:
            raise ValueError("no object with something in it")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        raise UserError(f"{file} cannot be read: {reason}") from e
    return found


def why_no_checkpoint(path: Any, given: str = "") -> str:
    """Return why a path without a checkpoint is no model.

    given: the path as the user wrote it; it may be the name of a model on
    huggingface.co.
    """
    if not path.is_dir():
        if path.exists():
            return f"a file, no directory: give the one it lies in, {path.parent}"
        if not HUB_NAME.fullmatch(given) or (path.parent.is_dir() and "/" in given):
            return "no such directory"
        return (
            "no such directory, and nothing is downloaded: a model of huggingface.co "
            f"is fetched by `hf download {given} --local-dir DIR`; then give DIR"
        )
    if path.name == "checkpoints" and (saved := manifest.steps(path.parent)):
        return (
            f"these are the checkpoints of a run: give the run, {path.parent}, or one "
            f"of them, {path / str(saved[-1])}"
        )
    if kind(path) == UNDER_WAY:
        return f"it holds {UNDER_WAY}: repeat its command to finish it"
    if not (path / "config.json").exists():
        return f"{path} holds no checkpoint, and no config.json{_what_else(path)}"
    what = "empty" if (path / "checkpoints").is_dir() else "missing"
    return f"{path} holds no checkpoint: its config.json is there, checkpoints/ {what}"


def _what_else(path: Any) -> str:
    """Return the end of a message about a directory that holds an adapter or models.

    The cache of huggingface_hub has models in snapshots/; sentence-transformers had
    them in 0_Transformer/.
    """
    if (path / "adapter_config.json").exists():
        return (
            "; it is an adapter: merge it into its model first (merge_and_unload of "
            "peft, then save_pretrained)"
        )
    inner = [*path.iterdir(), *(path / "snapshots").glob("*")]
    models = sorted(
        str(x)
        for x in inner
        if (x / "config.json").exists() and not x.name.endswith("Pooling")
    )
    return f"; there is one in {models[0]}" if models else ""

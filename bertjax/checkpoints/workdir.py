# SPDX-License-Identifier: Apache-2.0
"""The files at the top of a workdir: the configuration and the environment of a run."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, __version__
from bertjax.storage.atomic import write_file
from bertjax.storage.directories import write_directory

PACKAGES = "jax jaxlib flax optax orbax-checkpoint numpy tokenizers sentencepiece"


def read_json(path: Any) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no valid one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth, as JSON has none.

    >>> finite({"loss": float("nan"), "steps": [2, 3]})
    {'loss': None, 'steps': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    odd = isinstance(value, float) and not math.isfinite(value)
    return None if odd else value


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that affect a run's numbers."""
    found = {"python": platform.python_version(), "bertjax": __version__}
    for name in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_commit() -> str | None:
    """Return the commit of the source tree that this code runs from, or None.

    It is None for an installed package, even inside the tree of another project, and
    without git.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def scores_of(workdir: Any, step: int) -> dict[str, Any]:
    """Return a step's evaluation from metrics.jsonl as {"eval/SET/METRIC": value}.

    {} if there is none.
    """
    rows = map(json.loads, rows_up_to(workdir / "metrics.jsonl", step, '"eval/'))
    own = (row.items() for row in rows if row["step"] == step)
    return {k: v for items in own for k, v in items if k.startswith("eval/")}


def rows_up_to(path: Any, step: int, holding: str = "") -> list[str]:
    """Return the complete lines of a metrics file whose step is at most `step`.

    holding: return only lines that contain this text.
    """
    if not path.exists():
        return []
    kept = []
    text = path.read_bytes().decode("utf-8", errors="replace")
    for line in text.splitlines(keepends=True):
        if holding not in line:
            continue
        try:
            row = json.loads(line)
            if line.endswith("\n") and int(row["step"]) <= step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            continue  # an incomplete line, or not a row of metrics
    return kept


def minutes_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up the time of the steps in the rows of metrics.jsonl, for each clock.

    A row has the seconds per step since the previous row; compilation, evaluations and
    saves do not count.

    >>> row = {"perf/step_seconds": 2.0, "perf/processor_seconds": 3.0}
    >>> minutes_of([{"step": 30} | row, {"step": 60} | row, {"step": 60}])
    {'wall': 2.0, 'processor': 3.0}
    """
    found = {"wall": 0.0, "processor": 0.0}
    keys = {"wall": "perf/step_seconds", "processor": "perf/processor_seconds"}
    before = 0
    for row in rows:
        for clock, key in keys.items():
            found[clock] += (row["step"] - before) * row.get(key, 0.0) / 60
        before = row["step"] if keys["wall"] in row else before
    return found


def amend_run(path: Any, **facts: Any) -> None:
    """Add facts to run.json that became known later."""
    write_run(path / "run.json", read_json(path / "run.json") | facts)


def write_run(file: Any, run: Mapping[str, Any]) -> None:
    write_file(file, json.dumps(run, indent=1, sort_keys=True) + "\n")


def is_done(
    path: Any, restored: int | None, scored: bool, longer: bool = False
) -> bool:
    """Return True if the newest checkpoint is the run's last, and has its scores.

    scored: whether the run has evaluations. longer: whether a changed config may make
    the run longer, in which case it is not done.
    """
    if path is None or restored is None or longer:
        return False
    last = restored == read_json(path / "run.json").get("total_steps")
    return last and (not scored or bool(scores_of(path, restored)))


def check_text(
    path: Any,
    before: dict[str, str],
    hashes: dict[str, str],
    others: Sequence[str] = (),
) -> None:
    """Raise UserError if a run would resume with other text than it began with.

    before: the content hashes in the checkpoint; hashes: the present ones. others: keys
    of further files that the rows are made from, and whose paths differ.
    """

    def key(name: str) -> str:
        if name.startswith("data."):
            return name
        return "data.train" if name.partition("/")[0] == "train" else "data.valid"

    # A new validation set does not change the training; anything else does.
    new = {name for name in hashes if key(name) != "data.valid"} - before.keys()
    for name in [*before, *sorted(new)]:
        old, now = before.get(name, "absent"), hashes.get(name, "absent")
        if now != old:
            raise UserError(
                f"{' or '.join([key(name), *others])}: the text or its tokenizer "
                f"changed: {path} was trained "
                f"on {name} {old[:16]}, now it is {now[:16]}; take another workdir"
            )


def begin(
    path: Any,
    texts: dict[str, str],
    facts: dict[str, Any],
    save_tokenizer: Callable[[Path], None],
    counts: np.ndarray,
) -> None:
    """Write the files that describe a run, before its first step.

    texts: the content of files by name. facts: the entries of run.json, without
    versions and the history of starts. counts [V]: how often each id occurs in the
    training text. Raises UserError if the workdir cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_directory(path / "tokenizer", save_tokenizer)
        write_file(path / "unigram.npy", lambda file: np.save(file, counts))
        for name, text in texts.items():
            write_file(path / name, text)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        start = {"time": now, "host": platform.machine(), "versions": versions()}
        starts = [*read_json(path / "run.json").get("starts", []), start]
        run = {**facts, "git": git_commit(), "starts": starts}
        write_run(path / "run.json", run)
    except OSError as e:
        raise UserError(f"--workdir={path} cannot be written: {e}") from e

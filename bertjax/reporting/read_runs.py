# SPDX-License-Identifier: Apache-2.0
"""Read the runs of workdirs: config, facts and every metric. Does not use jax."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.checkpoints import manifest, workdir_kinds
from bertjax.checkpoints.workdir import read_json
from bertjax.config import serialize

CLOCK = ("step", "tokens")  # keys of a row that are not metrics


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric over a run: steps, tokens, values f64 [n]; nan: not finite."""

    steps: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of a workdir.

    text: identifies each set's text and how it was tokenized. sweep: the content of
    sweep.json, {} for a single run (sweeps/score_spread.py).
    """

    name: str
    path: Any
    config: dict[str, Any]  # flat: {"optim.lr": 1e-4}
    overrides: dict[str, Any]
    facts: dict[str, Any]  # run.json
    text: dict[str, str]
    series: dict[str, Series]
    sweep: dict[str, Any]

    @property
    def step(self) -> int:
        """The last step that has a row; 0 before the first."""
        last = self.sweep.get("steps", 0)
        return int(max((s.steps[-1] for s in self.series.values()), default=last))

    @property
    def tokens(self) -> int | None:
        """Real tokens up to that step, for a sweep of one run; None if not counted.

        Runs of a sweep that ended early saw fewer.
        """
        if self.sweep:
            curve = self.sweep.get("curve", [])
            return max((row.get("tokens") or 0 for row in curve), default=0) or None
        return int(max((s.tokens[-1] for s in self.series.values()), default=0))


def read_runs(paths: Sequence[str], log: Callable[[str], None]) -> list[Run]:
    """Read workdirs, in the given order. Raises UserError for other paths."""
    folders = [manifest.as_path(p) for p in paths]
    for i, path in enumerate(folders):
        if path in folders[:i]:
            raise UserError(f"{path} is given twice")
    names = distinct_names([str(p) for p in folders])
    return [read_run(p, n, log) for p, n in zip(folders, names, strict=True)]


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Name each path by as few of its last parts as distinguish them.

    >>> distinct_names(["/a/x/run", "/a/y/run"]), distinct_names(["/a/x", "/a/y"])
    (['x/run', 'y/run'], ['x', 'y'])
    """
    parts = [[q for q in p.split("/") if q] or ["/"] for p in paths]
    longest = max(map(len, parts), default=1)
    for n in range(1, longest + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len({*names}) == len(names):
            break
    return names


def read_run(path: Any, name: str, log: Callable[[str], None]) -> Run:
    """Read one workdir. Raises UserError that names the damaged file and line."""
    if not path.is_dir():
        what = "a file, no workdir" if path.exists() else "no such directory"
        raise UserError(f"{path}: {what}")
    file = path / "config.json"
    if not file.exists():
        raise UserError(f"{path} is not a workdir: it has no config.json")
    config = read_config(file)
    facts = read_json(path / "run.json")
    stores, folder = facts.get("stores"), path / "tokenizer"
    files = manifest.files(folder) if folder.is_dir() else {}
    vocabulary = str({k: manifest.checksum(file) for k, file in files.items()})
    text = {"": vocabulary}
    for key, digest in stores.items() if isinstance(stores, dict) else ():
        text[key] = f"{vocabulary} {digest}"
    return Run(
        name,
        path,
        config,
        read_json(path / "overrides.json"),
        facts,
        text,
        read_metrics(path / "metrics.jsonl", log),
        workdir_kinds.read_object(path / workdir_kinds.RESULTS),
    )


def read_config(file: Any) -> dict[str, Any]:
    """Read a run's config, flat. Raises UserError if it is not one."""
    try:
        text = file.read_text()
        if not {"model", "data", "optim"} <= set(json.loads(text)):
            raise ValueError("no model, data and optim in it")
        return serialize.flatten(serialize.from_json(text, file).to_dict())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        why = " ".join(str(e).split())
        raise UserError(f"{file} is not the config of a run: {why}") from e


def read_metrics(file: Any, log: Callable[[str], None]) -> dict[str, Series]:
    """Read metrics.jsonl as {name: series}, in the order of the steps.

    A run that has just begun has no such file. A partial last line, which a live
    run is still writing, is left out and reported by `log`. Raises UserError for
    any other damaged line.
    """
    if not file.exists():
        return {}
    lines = file.read_bytes().split(b"\n")
    if half := lines.pop():
        try:
            json.loads(half)
            lines.append(half)
        except ValueError:
            log(
                f"{file}:{len(lines) + 1}: half a line at the end, left out: the run "
                "is writing it, or was killed there"
            )
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise UserError(f"{where}: no JSON: {' '.join(str(e).split())}") from e
        if not isinstance(row, dict):
            raise UserError(f"{where}: no object: {line[:60]!r}")
        step = number_of(row, "step", where)
        tokens = number_of(row, "tokens", where) if "tokens" in row else math.nan
        for key in row:
            if key not in CLOCK:
                value = number_of(row, key, where)
                columns.setdefault(key, []).append((step, tokens, value))
    metrics = {}
    for key, rows in columns.items():
        table = np.array(rows, np.float64)
        steps, tokens, values = table[np.argsort(table[:, 0], kind="stable")].T
        # Rows without tokens get the value interpolated at their step.
        known = ~np.isnan(tokens)
        between = np.interp(steps, steps[known], tokens[known]) if known.any() else 0.0
        tokens = np.where(known, tokens, between)
        metrics[key] = Series(steps, tokens, values)
    return metrics


def number_of(row: dict[str, Any], key: str, where: str) -> float:
    """Return a value of a row; nan for null and for values that are not finite.

    Raises UserError for values that are not numbers, and for a missing step.
    """
    value = row.get(key)
    if value is None and key not in CLOCK:
        return math.nan
    if type(value) in (int, float):
        with contextlib.suppress(OverflowError):
            number = float(value)
            if key not in CLOCK or math.isfinite(number):
                return number if math.isfinite(number) else math.nan
    raise UserError(f"{where}: {key}={value!r} is not a number")

# SPDX-License-Identifier: Apache-2.0
"""What is said of runs in numbers: what differs, speed, evaluations; and which curves
share a chart."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import config as c
from bertjax.reporting.collect import Run, Series
from bertjax.training.best import falls, known_directions

# What a loss on masked tokens depends on, beside text and tokenizer: masks and rows.
MASKS = ("masking", "mask_rate", "mask_unit", "mask_lengths", "corruption")
MASKS = tuple(
    f"data.{key}"
    for key in (*MASKS, "replacement", "length", "plan", "packed", "short_seq_prob")
)
ORDER = ("train", "eval", "optim", "perf", "data", "guard", "hosts")


class Table(NamedTuple):
    """Rows of texts and numbers below the heads of their columns."""

    head: list[str]
    rows: list[list[Any]]


class Chart(NamedTuple):
    """One metric of the runs that can be compared in it: (index of run, series)."""

    key: str
    curves: list[tuple[int, Series]]
    constant: float | None  # the value that all of them have, if they do
    alone: bool  # no other runs have it


def overview(runs: Sequence[Run]) -> Table:
    """Say what each run is and how far it came."""
    rows = []
    for run in runs:
        facts, config = run.facts, run.config
        total = facts.get("total_steps")
        rows.append(
            [
                run.name,
                f"{run.step:,} of {total:,}" if isinstance(total, int) else run.step,
                run.tokens,
                config["objective"],
                config["model.family"],
                config["model.size"],
                facts.get("parameters"),
                f"{facts.get('devices', '?')} x {facts.get('device_kind', '?')}",
                started(facts),
            ]
        )
    head = ["run", "step", "tokens", "objective", "family", "size", "parameters"]
    return Table([*head, "devices", "started"], rows)


def started(facts: dict[str, Any]) -> str:
    """Return when a run began, and how often it was started."""
    starts = facts.get("starts")
    if not isinstance(starts, list) or not starts:
        return ""
    first = starts[0].get("time", "") if isinstance(starts[0], dict) else ""
    times = f", {len(starts)} starts" * (len(starts) > 1)
    return f"{first.replace('T', ' ')[:16]}{times}"


# Of a vocabulary that a run trains: nothing where data.vocab gives one.
TRAINED = {"data.tokenizer", "data.vocab_size", "data.vocab_alpha"}


def in_effect(run: Run, key: str) -> Any:
    """Return a run's value of a key; None where it says nothing."""
    given = key in TRAINED and run.config.get("data.vocab")
    return None if given else run.config.get(key)


def differing(runs: Sequence[Run]) -> tuple[Table, Table]:
    """Compare configs: (what matters, what says only where and how runs ran).

    The parting is config.FREE's, as for resuming.
    """
    rows: tuple[list[list[Any]], list[list[Any]]] = ([], [])
    for key in sorted({key for run in runs for key in run.config}):
        values = [in_effect(run, key) for run in runs]
        if any(value != values[0] for value in values):
            rows[bool(c.FREE.fullmatch(key))].append([key, *map(written, values)])
    head = ["key", *(run.name for run in runs)]
    return Table(head, rows[0]), Table(head, rows[1])


def written(value: Any) -> str:
    """Write a value of a config as it would be given; an empty one as a dash."""
    return "–" if value is None or value == "" else str(value)


def speed(runs: Sequence[Run]) -> Table:
    """Give medians over logged rows, the share of time spent waiting for data, and the
    most memory."""
    rows = []
    for run in runs:
        middle = {key: median(run, key) for key in (*SPEED, "data/wait_seconds")}
        seconds, wait = middle["perf/step_seconds"], middle.pop("data/wait_seconds")
        waiting = wait / seconds if seconds and wait is not None else None
        middle["data/fill"], fill = waiting, middle["data/fill"]
        shares = [share(middle[key]) for key in ("perf/mfu", "data/fill")]
        values = [middle["perf/tokens_per_second"], seconds, *shares, share(fill)]
        used = finite(run, "perf/memory_gib")
        rows.append([run.name, *values, float(max(used)) if len(used) else None])
    head = ["run", "tokens/s", "seconds a step", "MFU", "waiting for data", "fill"]
    return Table([*head, "memory, GiB"], rows)


SPEED = ("perf/tokens_per_second", "perf/step_seconds", "perf/mfu", "data/fill")


def median(run: Run, key: str) -> float | None:
    """Return a metric's median over the run; None where it has none."""
    values = finite(run, key)
    return float(np.median(values)) if len(values) else None


def finite(run: Run, key: str) -> np.ndarray:
    """Return a metric's values f64 that are finite; none where the run has none."""
    values = run.series[key].values if key in run.series else np.array([])
    return values[np.isfinite(values)]


def share(x: float | None) -> str | None:
    return None if x is None else f"{100 * x:.1f}%"


def evaluations(runs: Sequence[Run]) -> tuple[Table, set[int]]:
    """List the last and the best value of every eval/<name>/<metric>.

    A threshold is none: it is what scores are best at, and no value of it is better.
    Also returns the rows whose best is the best of the runs that compare with it.
    """
    rows: list[list[Any]] = []
    leading = set()
    for chart in charts(runs):
        if not chart.key.startswith("eval/") or chart.key.endswith("/threshold"):
            continue
        drawn = [runs[i].facts for i, _ in chart.curves]
        lower = any(falls(chart.key, known_directions(facts)) for facts in drawn)
        tops = []
        for i, series in chart.curves:
            seen = np.flatnonzero(np.isfinite(series.values))
            row = [chart.key, runs[i].name]
            if len(seen):
                values, steps = series.values[seen], series.steps[seen].astype(int)
                best = int(np.argmin(values) if lower else np.argmax(values))
                tops.append(values[best])
                row += [float(values[-1]), int(steps[-1])]
                row += [float(values[best]), int(steps[best])]
            else:
                row += [None] * 4
                tops.append(np.inf if lower else -np.inf)
            rows.append([*row, "lowest" if lower else "highest"])
        if len(tops) > 1:
            top = min(tops) if lower else max(tops)
            begin = len(rows) - len(tops)
            leading |= {begin + k for k, x in enumerate(tops) if x == top}
    head = ["metric", "run", "last", "at step", "best", "at step", "best is the"]
    return Table(head, rows), leading


def sweeps(runs: Sequence[Run]) -> Table:
    """List how the scores of sweeps scatter over seeds, by learning rate."""
    keys = ["valid", "lr", "metric", "n", "median", "std", "min", "max"]
    rows = [
        [run.name, *(row.get(key) for key in keys)]
        for run in runs
        for row in run.sweep.get("spread", [])
    ]
    return Table(["run", "set", *keys[1:]], rows)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Lay curves that compare over each other: one chart a metric and kind of run.

    Without those of each host, hosts/3/...: a pod has dozens, whose worst is drawn.
    """
    groups: dict[tuple[str, tuple], list[tuple[int, Series]]] = {}
    keys: dict[str, int] = {}
    for i, run in enumerate(runs):
        for key, series in run.series.items():
            if re.match(r"hosts/\d+/", key):
                continue
            groups.setdefault((key, kind(run, key)), []).append((i, series))
    for key, _ in groups:
        keys[key] = keys.get(key, 0) + 1
    found = []
    for (key, _), curves in groups.items():
        values = np.concatenate([s.values for _, s in curves])
        first = values[0]
        constant = float(first) if np.all(values == first) else None
        if key.split("/")[0] in ("train", "eval"):
            constant = None  # even what never moves is a result
        found.append(Chart(key, curves, constant, keys[key] == 1))
    order = {key: i for i, key in enumerate(keys)}  # as in the rows
    return sorted(found, key=lambda chart: (rank(chart.key), order[chart.key]))


def rank(key: str) -> int:
    """Return the place of a metric's section on the page."""
    head = key.split("/")[0]
    return ORDER.index(head) if head in ORDER else len(ORDER)


def kind(run: Run, key: str) -> tuple:
    """Return what has to be equal for a metric to compare between runs.

    Losses and scores of one tokenizer, with equal masks and lengths, in evaluations
    on one text; what is learnt from, train/loss, of one objective too: it is a sum of
    other terms in each. Everything else always compares.
    """
    head, *middle, _ = key.split("/") if "/" in key else (key, "")
    if head not in ("train", "eval"):
        return ()
    masks = {name: run.config.get(name) for name in MASKS}
    if head == "train":
        own = run.config["objective"] if key == "train/loss" else ""
        return run.text[""], own, *masks.values(), run.config["phases"]
    rate = run.config["eval.mask_rate"]
    masks["data.mask_rate"] = masks["data.mask_rate"] if rate is None else rate
    name = "/".join(middle)
    return run.text.get(name, run.text[""]), *masks.values()

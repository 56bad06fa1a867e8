# SPDX-License-Identifier: Apache-2.0
"""Build tables of runs: differences, speed, evaluations."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.checkpoints.best import falls, known_directions
from bertjax.config import serialize
from bertjax.reporting.charts import group_curves
from bertjax.reporting.read_runs import Run


class Table(NamedTuple):
    """Rows of texts and numbers with the heads of their columns."""

    head: list[str]
    rows: list[list[Any]]


def overview(runs: Sequence[Run]) -> Table:
    """List what each run is and how far it came."""
    sources = [run.config["init_from"].rstrip("/").split("/")[-1] for run in runs]
    rows = []
    for run, source in zip(runs, sources, strict=True):
        facts, config = run.facts, run.config
        total, parameters = facts.get("total_steps"), facts.get("parameters")
        devices = [facts.get("devices"), facts.get("device_kind")]
        row = [
            run.name,
            f"{run.step:,} of {total:,}" if isinstance(total, int) else run.step,
            run.tokens,
            config["objective"],
            config["model.family"],
            serialize.with_defaults(config)["model.size"] or sized(parameters),
            parameters,
            None if None in devices else "{} x {}".format(*devices),
            started(run),
        ]
        rows.append(row + [source or None] * any(sources))
    head = ["run", "step", "tokens", "objective", "family", "size", "parameters"]
    return Table([*head, "devices", "started", *["init_from"] * any(sources)], rows)


def sized(parameters: Any) -> str | None:
    """Name a size that no family has: "22.6M", "591k"; None if unknown."""
    if not isinstance(parameters, int):
        return None
    whole = parameters < 1e6
    return f"{parameters / (1e3 if whole else 1e6):.3g}{'k' if whole else 'M'}"


def started(run: Run) -> str:
    """Return when a run began, and how often it was started.

    A sweep records when it ended and, unless it was resumed, how long it took.
    """
    starts = run.facts.get("starts")
    if not isinstance(starts, list) or not starts or not isinstance(starts[0], dict):
        return ""
    times = f", {len(starts)} starts" * (len(starts) > 1)
    try:
        first = datetime.fromisoformat(starts[0]["time"])
    except (KeyError, TypeError, ValueError):
        return times.removeprefix(", ")
    if not run.sweep:
        return f"{first:%Y-%m-%d %H:%M}{times}"
    seconds = run.sweep.get("seconds")
    if not isinstance(seconds, int | float):
        return f"ended {first:%Y-%m-%d %H:%M}"
    return f"{first - timedelta(seconds=seconds):%Y-%m-%d %H:%M}"


# Keys of a trained vocabulary, without effect if data.vocab names one.
TRAINED = ("data.tokenizer", "data.vocab_size", "data.vocab_alpha")
# the most interesting keys come first
FIRST = "optim.lr", "data.length", "batch_size", "total", "seed"


def differing(runs: Sequence[Run]) -> tuple[Table, Table]:
    """Compare configs; return (differences that matter, differences that do not).

    They are separated as by serialize.NOT_COMPARED for resuming, except that
    another text matters.
    """
    configs = [
        {k: v for k, v in run.config.items() if k not in TRAINED}
        if run.config.get("data.vocab")
        else run.config
        for run in runs
    ]
    whole = [serialize.with_defaults(config) for config in configs]
    rows: tuple[list[list[Any]], list[list[Any]]] = ([], [])

    def place(key: str) -> int:
        heads = [key == name or key.startswith(f"{name}.") for name in FIRST]
        return [*heads, True].index(True)

    for key in sorted(serialize.differing(configs), key=place):
        values = [config.get(key) for config in whole]
        cells = [*map(written, values)]
        if len({*cells}) < len({*map(str, values)}):  # rounding hides the difference
            cells = ["–" if x in (None, "") else str(x) for x in values]
        free = serialize.NOT_COMPARED.fullmatch(key) and not _is_other_text(key, runs)
        rows[bool(free)].append([key, *cells])
    head = ["key", *(run.name for run in runs)]
    return Table(head, rows[0]), Table(head, rows[1])


def _is_other_text(key: str, runs: Sequence[Run]) -> bool:
    """Return whether a difference in the files that rows are made from is one of
    content."""
    if key not in ("data.train", "data.valid", "data.entities", "task.index"):
        return False

    def read(run: Run) -> dict[str, str]:
        stores = run.facts.get("stores") or {}
        train = {k: v for k, v in stores.items() if k.split("/")[0] == "train"}
        files = {"data.similar", "data.mask_weights", "data.swap"}
        valid = {k: v for k, v in stores.items() if k not in {*train, *files}}
        return valid if key == "data.valid" else train

    return any(read(run) != read(runs[0]) for run in runs)


def written(value: Any) -> str:
    """Format a value of a config for readers; an empty one is a dash.

    >>> [written(value) for value in (10 / 9, 2e-05, 100000.0, (0.9, 1 / 3), "")]
    ['1.111', '2e-05', '100000', '(0.9, 0.3333)', '–']
    """
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return f"{value:.0f}" if whole else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(written, value))})"
    return str(value)


SPEED = ("perf/tokens_per_second", "perf/step_seconds", "perf/mfu")
SPEED += ("data/wait_seconds", "data/fill", "perf/memory_gib")


def speed(runs: Sequence[Run]) -> Table:
    """List medians over logged rows, the share of waiting for data, and peak memory."""
    rows = []
    for run in runs:
        logged = {key: run.series[key].values for key in SPEED if key in run.series}
        finite = {key: x[np.isfinite(x)] for key, x in logged.items()}
        medians = {key: float(np.median(x)) for key, x in finite.items() if len(x)}
        tokens, seconds, mfu, wait, fill, memory = map(medians.get, SPEED)
        waiting = wait / seconds if seconds and wait is not None else None
        if memory is not None:
            memory = float(max(finite["perf/memory_gib"]))
        shares = map(share, (mfu, waiting, fill))
        rows.append([run.name, tokens, seconds, *shares, memory])
    head = ["run", "tokens/s", "seconds per step", "MFU", "waiting for data", "fill"]
    return Table([*head, "memory, GiB"], rows)


def share(x: float | None) -> str | None:
    return None if x is None else f"{100 * x:.1f}%"


def evaluations(runs: Sequence[Run]) -> tuple[Table, set[int]]:
    """List the last and the best value of every eval/<name>/<metric>.

    Thresholds are left out: no value of a threshold is better than another. Also
    returns the indices of rows whose best value is the best among comparable runs.
    """
    rows: list[list[Any]] = []
    leading = set()
    for chart in group_curves(runs):
        if not chart.key.startswith("eval/") or chart.key.endswith("/threshold"):
            continue
        drawn = [runs[i].facts for i, _ in chart.curves]
        lower = any(falls(chart.key, known_directions(facts)) for facts in drawn)
        tops = []
        for i, series in chart.curves:
            seen, shown = np.isfinite(series.values), [None] * 4
            tops.append(np.inf if lower else -np.inf)
            if seen.any():
                values, steps = series.values[seen], series.steps[seen]
                best = int(np.argmin(values) if lower else np.argmax(values))
                tops[-1] = values[best]
                shown = [
                    x for at in (-1, best) for x in (float(values[at]), int(steps[at]))
                ]
            rows.append(
                [chart.key, runs[i].name, *shown, "lowest" if lower else "highest"]
            )
        if len(tops) > 1:
            top, begin = min(tops) if lower else max(tops), len(rows) - len(tops)
            leading |= {i for i, x in enumerate(tops, begin) if x == top}
    head = ["metric", "run", "last", "at step", "best", "at step", "best is the"]
    return Table(head, rows), leading


def sweeps(runs: Sequence[Run]) -> Table:
    """List the spread of sweeps' scores over seeds, by learning rate.

    Raises UserError if a sweep.json is damaged.
    """
    keys = ["valid", "lr", "metric", "n", "median", "std", "min", "max"]
    rows = []
    for run in runs:
        try:
            for row in run.sweep.get("spread", []):
                rows.append([run.name, *(row.get(key) for key in keys)])
        except (TypeError, AttributeError) as e:
            raise UserError(
                f"{run.path}/sweep.json holds no spread of a sweep: "
                f"{type(e).__name__}: {e}"
            ) from e
    return Table(["run", "set", *keys[1:]], rows)

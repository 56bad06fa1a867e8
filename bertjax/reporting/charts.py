# SPDX-License-Identifier: Apache-2.0
"""The page's charts: curves that compare, thinned without losing spikes, as pictures.

A chart, as page.js draws it, is {"key", "axis" (of no run's), "curves"}; a curve is
{"run": the number of its colour, "name", "value", and the axis}. Curves of one "group"
share a name and a colour.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.reporting.read_runs import Run, Series
from bertjax.sweeps.score_spread import ABOUT

BUCKETS = 400  # of a curve's width: about one a pixel of a small chart
SPAN = 1 / 40  # of a series: the window of its moving average
FEWEST = 20  # points that are worth smoothing
# What a loss on masked tokens depends on, beside text and tokenizer: masks and rows.
MASKS = "masking mask_rate mask_unit mask_lengths corruption replacement length plan"
MASKS = [f"data.{key}" for key in f"{MASKS} packed short_seq_prob".split()]
# Of a metric's name the first part -> its section of the page, in this order.
SECTIONS = {
    "train": "Training",
    "eval": "Evaluation",
    "optim": "Optimizer",
    "perf": "Speed and memory",
    "data": "Data",
    "guard": "Guard",
    "hosts": "Hosts",
}
# Number of a colour, name, x, y.
Curve = tuple[int, str, Sequence[float], Sequence[float]]


class Chart(NamedTuple):
    """One metric of the runs that can be compared in it: (index of run, series)."""

    key: str
    curves: list[tuple[int, Series]]
    constant: float | None  # the value that all of them have, if they do
    alone: bool  # no other runs have it
    same: list[str]  # metrics of these runs with the very same curves


def group_curves(runs: Sequence[Run]) -> list[Chart]:
    """Lay curves that compare over each other: one chart a metric and kind of run.

    Without those of each host, hosts/3/...: a pod has dozens, whose worst is drawn.
    """
    groups: dict[str, dict[tuple, list[tuple[int, Series]]]] = {}
    for i, run in enumerate(runs):
        for key, series in run.series.items():
            if not re.match(r"hosts/\d+/", key):
                compared = groups.setdefault(key, {}).setdefault(kind(run, key), [])
                compared.append((i, series))
    order = {name: i for i, name in enumerate(SECTIONS)}
    every = []
    for key in sorted(groups, key=lambda k: order.get(k.split("/")[0], len(order))):
        for curves in groups[key].values():
            values = np.concatenate([s.values for _, s in curves])
            # Even what never moves is a result of training and of evaluations.
            is_result = key.split("/")[0] in ("train", "eval")
            moves = is_result or np.any(values != values[0])
            constant = None if moves else float(values[0])
            every.append(Chart(key, curves, constant, len(groups[key]) == 1, []))
    # A term that is all of the loss of its runs is drawn once: the sum has its curve.
    totals = [chart for chart in every if chart.key == "train/loss"]
    left = []
    for chart in every:
        is_term = chart.key.startswith("train/") and chart.key != "train/loss"
        same = next((t for t in totals if is_term and has_curves(t, chart)), None)
        if same:
            same.same.append(chart.key)
        else:
            left.append(chart)
    return left


def has_curves(chart: Chart, other: Chart) -> bool:
    """True where the runs of another chart have the same curves in this one."""
    mine = dict(chart.curves)
    return all(
        i in mine
        and np.array_equal(mine[i].steps, series.steps)
        and np.allclose(mine[i].values, series.values, 1e-6, 0, equal_nan=True)
        for i, series in other.curves
    )


def kind(run: Run, key: str) -> tuple:
    """Return what has to be equal for a metric to compare between runs.

    Losses and scores of one tokenizer, with equal masks and lengths, in evaluations
    on one text; what is learnt from, train/loss, of one objective too: it is a sum of
    other terms in each. Everything else always compares.
    """
    head, *middle, _ = key.split("/") if "/" in key else (key, "")
    if head not in ("train", "eval"):
        return ()
    config = run.config
    if head == "train":
        own = config["objective"] if key == "train/loss" else ""
        return run.text[""], own, *map(config.get, MASKS), config["phases"]
    if (rate := config["eval.mask_rate"]) is not None:
        config = config | {"data.mask_rate": rate}
    text = run.text.get("/".join(middle), run.text[""])
    return text, *map(config.get, MASKS)


def thin(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Return which points to draw, i64 ascending.

    steps ascending f64 [n], values f64 [n]. The steps' range is cut into `buckets`
    equal parts; of each stay the first, least, greatest and last value and the first
    that is not finite. So no extreme, no end and no gap is lost.
    """
    n = len(steps)
    if n <= 4 * buckets:
        return np.arange(n)
    share = (steps - steps[0]) / max(steps[-1] - steps[0], 1)
    bucket = np.minimum((share * buckets).astype(np.int64), buckets - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    ends = np.append(starts[1:], n)
    finite = np.isfinite(values)
    chosen = [starts, ends - 1]
    # Sorted by bucket and then value, the ends of each bucket are its extremes.
    for fill in (np.inf, -np.inf):
        order = np.lexsort((np.where(finite, values, fill), bucket))
        chosen.append(order[starts] if fill > 0 else order[ends - 1])
    gaps = np.flatnonzero(~finite)
    chosen.append(gaps[np.unique(bucket[gaps], return_index=True)[1]])
    return np.unique(np.concatenate(chosen))


def smooth(values: np.ndarray) -> np.ndarray | None:
    """Return the centred moving average over SPAN of a series; None of a short one.

    At its ends the window shrinks on both sides alike. What is not finite does not
    count; where nothing else is in the window, neither is the average.
    """
    n = len(values)
    if n < FEWEST:
        return None
    half = max(1, round(n * SPAN / 2))
    at = np.arange(n)
    reach = np.minimum(half, np.minimum(at, n - 1 - at))
    finite = np.isfinite(values)
    sums = np.cumsum(np.append(0.0, np.where(finite, values, 0.0)))
    counts = np.cumsum(np.append(0, finite))
    low, high = at - reach, at + reach + 1
    count = counts[high] - counts[low]
    return np.where(count, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


def points(series: Series) -> dict[str, list[float | None]]:
    """Return what the page draws of a series: columns, None where not finite."""
    drawn = thin(series.steps, series.values)
    columns = {
        "step": series.steps[drawn],
        "tokens": series.tokens[drawn],
        "value": series.values[drawn],
    }
    average = smooth(series.values)
    if average is not None:
        columns["smooth"] = average[drawn]
    return {name: [shorten(x) for x in column] for name, column in columns.items()}


def shorten(x: float) -> float | None:
    """Write a number with six digits, whole ones whole; None for nan."""
    if not np.isfinite(x):
        return None
    return int(x) if x == int(x) else float(f"{x:.6g}")


def sweep_charts(run: Run) -> list[dict[str, Any]]:
    """Return a chart for each set and metric, as page.js draws them; [] of no sweep.

    Runs of one rate have one colour; with one rate for all, each has its own. Raises
    UserError where sweep.json is damaged.
    """
    # By metric and by (seed, rate), the (step, value) of each row.
    charts: dict[str, dict[tuple[int, float], list[tuple[int, float | None]]]] = {}
    try:
        rows = run.sweep.get("curve", [])
        for row in rows:
            for key in (k for k in row if k not in ABOUT):
                curves = charts.setdefault(f"eval/{row['valid']}/{key}", {})
                curve = curves.setdefault((row["seed"], row["lr"]), [])
                curve.append((row["step"], row[key]))
        rates = [*dict.fromkeys(row["lr"] for row in rows)]
        seeds = [*dict.fromkeys(row["seed"] for row in rows)]

        def draw(seed: int, rate: float, curve: list[Any]) -> dict[str, Any]:
            steps, values = np.array(curve, np.float64).T  # None: nan
            several = len(rates) > 1
            return {
                "run": rates.index(rate) if several else seeds.index(seed),
                "name": f"seed {seed}, lr {rate:g}",
                "group": f"lr {rate:g}" if several else f"seed {seed}",
                **points(Series(steps, steps, values)),
            }

        return [
            {"key": key, "axis": "step", "curves": [draw(*k, c) for k, c in of.items()]}
            for key, of in charts.items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(
            f"{run.path}/sweep.json holds no curve of a sweep: {type(e).__name__}: {e}"
        ) from e


def run_chart(chart: Chart, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a chart of runs as page.js draws it, by steps or by tokens."""
    curves = [
        {"run": i, "name": runs[i].name, **points(series)} for i, series in chart.curves
    ]
    return {"key": chart.key, "curves": curves}


def draw(
    runs: Sequence[Run], probes: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a file, PNG) for each chart of the page.

    probes: as score_files reads them. Names are the metrics', after the kind of a
    probe or the name of a sweep, with "-" for what a file may not be called, and a
    number where several charts have one.
    """
    names: Counter[str] = Counter()
    for title, chart in titled_charts(runs, probes):
        name = re.sub(r"[^\w.]+", "-", title).strip("-.") or "metric"
        names[name] += 1
        number = f"-{names[name]}" if names[name] > 1 else ""
        yield f"{name}{number}.png", picture(title, chart, legend=len(runs) > 1)


def titled_charts(
    runs: Sequence[Run], probes: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, chart as page.js draws it): of metrics, of sweeps, of probes."""
    for chart in group_curves(runs):
        if chart.constant is None:
            yield chart.key, run_chart(chart, runs)
    for run in runs:
        for chart in sweep_charts(run):
            yield f"{run.name} {chart['key']}", chart
    for probe in probes:
        for kind, result in probe["kinds"].items():
            for chart in result["charts"]:
                yield f"{kind} {chart['key']}", chart


def curves_of(chart: dict[str, Any]) -> list[Curve]:
    """Return the curves of a chart; of a group only one has a name."""
    curves, seen = [], set()
    for c in chart["curves"]:
        name = c.get("group", c["name"])
        shown = f"_{name}" if name in seen else name  # which matplotlib does not list
        if "group" in c:
            seen.add(name)
        values = [math.nan if x is None else x for x in c["value"]]
        curves.append((c["run"], shown, c[chart.get("axis", "step")], values))
    return curves


def picture(title: str, chart: dict[str, Any], legend: bool) -> bytes:
    """Draw one chart as a PNG; with several curves it has a legend in any case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = curves_of(chart)
    for i, name, x, y in curves:
        label = name.replace("$", r"\$")  # which begins mathematics
        mark = "o" if len(x) < 30 else ""
        axes.plot(x, y, f"C{i % 10}", label=label, lw=1.2, marker=mark, ms=3)
    axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel(chart.get("axis", "step"))
    axes.grid(alpha=0.3)
    if legend or len(curves) > 1:
        axes.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""Prepare the page's charts: group comparable curves, and thin them, keeping spikes.

A chart for page.js is {"key", "axis" (if it is not one of runs), "curves"}; a curve is
{"run": the number of its color, "name", "value", and the axis}. Curves of one "group"
share a name and a color.
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

BUCKETS = 400  # of a curve's width: about one per pixel of a small chart
SPAN = 1 / 40  # of a series: the window of its moving average
FEWEST = 20  # points that are worth smoothing
# Keys that a loss on masked tokens depends on, besides text and tokenizer.
MASKS = "masking mask_rate mask_unit mask_lengths corruption replacement length plan"
MASKS = [f"data.{key}" for key in f"{MASKS} packed short_seq_prob".split()]
# The first part of a metric's name -> its section of the page, in this order.
SECTIONS = {
    "train": "Training",
    "eval": "Evaluation",
    "optim": "Optimizer",
    "perf": "Speed and memory",
    "data": "Data",
    "guard": "Guard",
    "hosts": "Hosts",
}
# Number of its color, name, x, y.
Curve = tuple[int, str, Sequence[float], Sequence[float]]


class Chart(NamedTuple):
    """A metric of runs that can be compared: (index of the run, series)."""

    key: str
    curves: list[tuple[int, Series]]
    constant: float | None  # the common value of all curves, if there is one
    alone: bool  # no other runs have this metric
    same: list[str]  # metrics of these runs with identical curves


def group_curves(runs: Sequence[Run]) -> list[Chart]:
    """Overlay comparable curves: one chart per metric and kind of run.

    Metrics of single hosts (hosts/3/...) are left out: a pod has dozens, and the worst
    value is drawn.
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
            # Constant values of training and evaluations are results too.
            is_result = key.split("/")[0] in ("train", "eval")
            moves = is_result or np.any(values != values[0])
            constant = None if moves else float(values[0])
            every.append(Chart(key, curves, constant, len(groups[key]) == 1, []))
    # If one term is the whole loss of its runs, draw only the sum.
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
    """Return whether this chart has the same curves for all runs of another chart."""
    mine = dict(chart.curves)
    return all(
        i in mine
        and np.array_equal(mine[i].steps, series.steps)
        and np.allclose(mine[i].values, series.values, 1e-6, 0, equal_nan=True)
        for i, series in other.curves
    )


def kind(run: Run, key: str) -> tuple:
    """Return the values that must agree for a metric to be comparable between runs.

    Losses and scores need one tokenizer and equal masks and lengths, and in evaluations
    the same text. train/loss also needs one objective, since it sums different terms in
    each. Everything else is always comparable.
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
    """Return the indices of the points to draw, i64 ascending.

    steps: f64 [n] ascending; values: f64 [n]. The range of steps is divided into
    `buckets` equal parts. Each keeps its first, smallest, largest and last value and
    the first that is not finite, so that no extreme, end or gap is lost.
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
    # Sorted by bucket and then by value, the ends of each bucket are its extremes.
    for fill in (np.inf, -np.inf):
        order = np.lexsort((np.where(finite, values, fill), bucket))
        chosen.append(order[starts] if fill > 0 else order[ends - 1])
    gaps = np.flatnonzero(~finite)
    chosen.append(gaps[np.unique(bucket[gaps], return_index=True)[1]])
    return np.unique(np.concatenate(chosen))


def smooth(values: np.ndarray) -> np.ndarray | None:
    """Return the centered moving average of a series over SPAN; None for a short one.

    At the ends the window shrinks on both sides. Values that are not finite do not
    count; if the window has no others, the average is not finite either.
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
    """Return the columns of a series that the page draws, with None for non-finite."""
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
    """Round to six digits, with whole numbers as int; None for values not finite."""
    if not np.isfinite(x):
        return None
    return int(x) if x == int(x) else float(f"{x:.6g}")


def sweep_charts(run: Run) -> list[dict[str, Any]]:
    """Return a chart for each set and metric, for page.js; [] without a sweep.

    Runs with the same rate share a color; if all have one rate, each has its own.
    Raises UserError if sweep.json is damaged.
    """
    # By metric and by (seed, rate): the (step, value) of each row.
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
            steps, values = np.array(curve, np.float64).T  # None becomes nan
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
    """Return a chart of runs for page.js, by steps or by tokens."""
    curves = [
        {"run": i, "name": runs[i].name, **points(series)} for i, series in chart.curves
    ]
    return {"key": chart.key, "curves": curves}


def draw(
    runs: Sequence[Run], probes: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, PNG) for each chart of the page.

    probes: as score_files reads them. Names are those of the metrics, after the kind of
    a probe or the name of a sweep. Characters that file names cannot have become "-",
    and equal names get a number.
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
    """Yield (title, chart for page.js) of metrics, sweeps and probes."""
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
    """Return the curves of a chart; only one curve of a group has a name."""
    curves, seen = [], set()
    for c in chart["curves"]:
        name = c.get("group", c["name"])
        # matplotlib does not list such names
        shown = f"_{name}" if name in seen else name
        if "group" in c:
            seen.add(name)
        values = [math.nan if x is None else x for x in c["value"]]
        curves.append((c["run"], shown, c[chart.get("axis", "step")], values))
    return curves


def picture(title: str, chart: dict[str, Any], legend: bool) -> bytes:
    """Draw one chart as a PNG; several curves always get a legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = curves_of(chart)
    for i, name, x, y in curves:
        label = name.replace("$", r"\$")  # otherwise it begins math text
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

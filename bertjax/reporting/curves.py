# SPDX-License-Identifier: Apache-2.0
"""From a series of any length to what a screen can show, without losing spikes."""

from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.reporting.read_runs import Run, Series
from bertjax.sweeps.score_spread import ABOUT

BUCKETS = 400  # of a curve's width: about one a pixel of a small chart
SPAN = 1 / 40  # of a series: the window of its moving average
FEWEST = 20  # points that are worth smoothing


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

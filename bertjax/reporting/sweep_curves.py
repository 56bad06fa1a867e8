# SPDX-License-Identifier: Apache-2.0
"""The evaluations of a sweep's runs as curves."""

from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.reporting.curves import points
from bertjax.reporting.read_runs import Run, Series
from bertjax.sweeps.score_spread import ABOUT


def charts(run: Run) -> list[dict[str, Any]]:
    """Return a chart for each set and metric, as page.js draws them; [] of no sweep.

    Runs of one rate have one colour; with one rate for all, each has its own. Raises
    UserError where sweep.json is damaged.
    """
    try:
        return [*_charts(run.sweep.get("curve", []))]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(
            f"{run.path}/sweep.json holds no curve of a sweep: {type(e).__name__}: {e}"
        ) from e


def _charts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rates = [*dict.fromkeys(row["lr"] for row in rows)]
    seeds = [*dict.fromkeys(row["seed"] for row in rows)]
    keys = [(row["valid"], key) for row in rows for key in row if key not in ABOUT]
    drawn = []
    for valid, key in dict.fromkeys(keys):
        of: dict[tuple[int, float], list[dict[str, Any]]] = {}
        for row in rows:
            if row["valid"] == valid and key in row:
                of.setdefault((row["seed"], row["lr"]), []).append(row)
        curves = []
        for (seed, rate), mine in of.items():
            steps = np.array([row["step"] for row in mine], np.float64)
            values = np.array([row[key] for row in mine], np.float64)  # None: nan
            several = len(rates) > 1
            curves.append(
                {
                    "run": rates.index(rate) if several else seeds.index(seed),
                    "name": f"seed {seed}, lr {rate:g}",
                    "group": f"lr {rate:g}" if several else f"seed {seed}",
                    **points(Series(steps, steps, values)),
                }
            )
        chart = {"key": f"eval/{valid}/{key}", "axis": "step", "curves": curves}
        drawn.append(chart)
    return drawn

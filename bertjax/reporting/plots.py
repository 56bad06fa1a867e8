# SPDX-License-Identifier: Apache-2.0
"""The page's charts as pictures, drawn by matplotlib."""

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax.reporting import run_tables
from bertjax.reporting.curves import points, sweep_charts
from bertjax.reporting.read_runs import Run

# Number of a colour, name, x, y.
Curve = tuple[int, str, Sequence[float], Sequence[float]]


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
        curves = curves_of(chart)
        legend = len(curves) > 1 or len(runs) > 1
        yield f"{name}{number}.png", picture(title, chart["axis"], curves, legend)


def titled_charts(
    runs: Sequence[Run], probes: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, chart as page.js draws it): of metrics, of sweeps, of probes."""
    for chart in run_tables.charts(runs):
        if chart.constant is None:
            curves = [
                {"run": i, "name": runs[i].name, **points(series)}
                for i, series in chart.curves
            ]
            yield chart.key, {"axis": "step", "curves": curves}
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
        curves.append((c["run"], shown, c[chart["axis"]], values))
    return curves


def picture(title: str, axis: str, lines: Sequence[Curve], legend: bool) -> bytes:
    """Draw one chart as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for i, name, x, y in lines:
        label = name.replace("$", r"\$")  # which begins mathematics
        mark = "o" if len(x) < 30 else ""
        axes.plot(x, y, f"C{i % 10}", label=label, lw=1.2, marker=mark, ms=3)
    axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel(axis)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()

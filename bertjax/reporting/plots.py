# SPDX-License-Identifier: Apache-2.0
"""The page's charts as pictures, drawn by matplotlib."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax.reporting import curves, run_tables, sweep_curves
from bertjax.reporting.read_runs import Run

# Number of a colour, name, x, y.
Curve = tuple[int, str, Sequence[float], Sequence[float]]


def draw(runs: Sequence[Run], probes: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a file, PNG) for each chart of the page.

    probes: as reporting.probes reads them. Names are the metrics', after the kind of a
    probe or the name of a sweep, with "-" for what a file may not be called, and a
    number where several charts have one.
    """
    seen: dict[str, int] = {}
    for title, axis, lines in (*of_runs(runs), *of_sweeps(runs), *of_probes(probes)):
        name = re.sub(r"[^\w.]+", "-", title).strip("-.") or "metric"
        seen[name] = seen.get(name, 0) + 1
        number = f"-{seen[name]}" if seen[name] > 1 else ""
        legend = len(lines) > 1 or len(runs) > 1
        yield f"{name}{number}.png", picture(title, axis, lines, legend)


def of_runs(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Curve]]]:
    """Yield (title, name of the x axis, curves) for each metric of the runs."""
    for chart in run_tables.charts(runs):
        if chart.constant is not None:
            continue
        lines = []
        for i, series in chart.curves:
            kept = curves.thin(series.steps, series.values)
            lines.append((i, runs[i].name, series.steps[kept], series.values[kept]))
        yield chart.key, "step", lines


def of_sweeps(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Curve]]]:
    """Yield the same for each metric of the sweeps."""
    for run in runs:
        for chart in sweep_curves.charts(run):
            yield f"{run.name} {chart['key']}", chart["axis"], lines_of(chart)


def of_probes(probes: Sequence[Any]) -> Iterator[tuple[str, str, list[Curve]]]:
    """Yield the same for each chart of the probes."""
    for found in probes:
        for kind, result in found["kinds"].items():
            for chart in result["charts"]:
                yield f"{kind} {chart['key']}", chart["axis"], lines_of(chart)


def lines_of(chart: dict[str, Any]) -> list[Curve]:
    """Return the curves of a chart of the page; of a group only one has a name."""
    lines, seen = [], set()
    for c in chart["curves"]:
        name = c.get("group", c["name"])
        shown = f"_{name}" if name in seen else name  # which matplotlib does not list
        seen.add(name)
        values = [math.nan if x is None else x for x in c["value"]]
        lines.append((c["run"], shown, c[chart["axis"]], values))
    return lines


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

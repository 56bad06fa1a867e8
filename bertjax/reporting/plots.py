# SPDX-License-Identifier: Apache-2.0
"""The page's charts as pictures, drawn by matplotlib."""

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax.reporting import curves, tables
from bertjax.reporting.collect import Run

# Number of a colour, name, x, y.
Curve = tuple[int, str, Sequence[float], Sequence[float]]


def draw(runs: Sequence[Run], probes: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a file, PNG) for each chart of the page.

    probes: as reporting.probes reads them. Names are the metrics', after the kind of a
    probe, with "-" for what a file may not be called, and a number where several charts
    have one.
    """
    seen: dict[str, int] = {}
    for title, axis, lines in (*of_runs(runs), *of_probes(probes)):
        name = re.sub(r"[^\w.]+", "-", title).strip("-.") or "metric"
        seen[name] = seen.get(name, 0) + 1
        number = f"-{seen[name]}" if seen[name] > 1 else ""
        legend = axis != "step" or len(runs) > 1
        yield f"{name}{number}.png", picture(title, axis, lines, legend)


def of_runs(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Curve]]]:
    """Yield (title, name of the x axis, curves) for each metric of the runs."""
    for chart in tables.charts(runs):
        if chart.constant is not None:
            continue
        lines = []
        for i, series in chart.curves:
            kept = curves.thin(series.steps, series.values)
            lines.append((i, runs[i].name, series.steps[kept], series.values[kept]))
        yield chart.key, "step", lines


def of_probes(probes: Sequence[Any]) -> Iterator[tuple[str, str, list[Curve]]]:
    """Yield the same for each chart of the probes."""
    for found in probes:
        for kind, result in found["kinds"].items():
            for chart in result["charts"]:
                lines = [
                    (c["run"], c["name"], c[chart["axis"]], c["value"])
                    for c in chart["curves"]
                ]
                yield f"{kind} {chart['key']}", chart["axis"], lines


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

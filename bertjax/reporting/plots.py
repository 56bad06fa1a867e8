# SPDX-License-Identifier: Apache-2.0
"""The page's charts as pictures, drawn by matplotlib."""

import io
import re
from collections.abc import Iterator, Sequence

from bertjax.reporting import curves, tables
from bertjax.reporting.collect import Run


def draw(runs: Sequence[Run]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a file, PNG) for each chart of the page.

    Names are the metrics' with "-" for what a file may not be called, and a number
    where several charts have one metric.
    """
    from matplotlib.figure import Figure

    seen: dict[str, int] = {}
    for chart in tables.charts(runs):
        if chart.constant is not None:
            continue
        figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
        axes = figure.subplots()
        for i, series in chart.curves:
            kept = curves.thin(series.steps, series.values)
            name = runs[i].name.replace("$", r"\$")  # which begins mathematics
            mark = "o" if len(kept) < 30 else ""
            line = (series.steps[kept], series.values[kept])
            axes.plot(*line, f"C{i % 10}", label=name, lw=1.2, marker=mark, ms=3)
        axes.set_title(chart.key.replace("$", r"\$"))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend(fontsize="small")
        name = re.sub(r"[^\w.]+", "-", chart.key).strip("-.") or "metric"
        seen[name] = seen.get(name, 0) + 1
        number = f"-{seen[name]}" if seen[name] > 1 else ""
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        yield f"{name}{number}.png", picture.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""Probing results as a text table and as a plot by layer."""

import importlib.util
from pathlib import Path
from typing import IO, Any

from bertjax import UserError, counted

COLUMNS = {  # key of a row -> heading, digits after the point
    "layer": ("layer", 0),
    "score": ("{metric}", 3),
    "sd": ("sd", 3),
    "control": ("control", 3),
    "selectivity": ("selectivity", 3),
    "memorised": ("memorised", 3),
    "random": ("random", 3),
    "bits": ("bits", 0),
    "compression": ("compression", 2),
    "random_bits": ("random bits", 0),
}


def describe(results: dict[str, Any]) -> str:
    """Return the results of run_probes as readable text."""
    rows, metric = results["rows"], results["metric"]
    lines = [
        f"{rows['train']:,} {results['of']} for the probes, {rows['valid']:,} for the "
        f"{metric}; {describe_majority(results)}; uniform code: "
        f"{results['uniform_bits']:,.0f} bits, by frequency: "
        f"{results['frequency_bits']:,.0f} bits"
    ]
    seeds = counted(results["seeds"], "seed")
    for kind, result in results["probes"].items():
        lines += ["", f"{kind} probes, {seeds}, {results['pooling']} pooling"]
        lines.append(make_table(result["layers"], metric))
        lines.append(describe_mix(result["mix"], metric))
    return "\n".join(lines)


def make_table(rows: list[dict[str, Any]], metric: str) -> str:
    """Return the rows of a kind of probe as a table, one line per layer.

    None becomes blank.
    """
    columns = {k: v for k, v in COLUMNS.items() if k in rows[0]}
    heads = [head.format(metric=metric) for head, _ in columns.values()]
    cells = [
        ["" if r[k] is None else f"{r[k]:,.{n}f}" for k, (_, n) in columns.items()]
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (heads, *cells)
    )


def describe_majority(results: dict[str, Any]) -> str:
    """Describe the scores of always predicting the largest class."""
    text = f"always the largest class: accuracy {results['majority_accuracy']:.3f}"
    if results["metric"] == "accuracy" or not results["majority"]:
        return text
    return f"{text}, {results['metric']} {results['majority']:.3f}"


def describe_mix(mix: dict[str, Any], metric: str) -> str:
    """Describe the results of a scalar mix of all layers in two lines."""
    weights = " ".join(f"{w:.2f}" for w in mix["weights"])
    expected = mix["expected_layer"]
    layer = "none, nothing is gained" if expected is None else f"{expected:.2f}"
    return (
        f"mix of all layers: {metric} {mix['score']:.3f}, weights {weights}\n"
        f"centre of gravity {mix['centre_of_gravity']:.2f}; expected layer {layer}"
    )


def check_plot() -> None:
    """Raise UserError if matplotlib is missing, before anything is computed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib: pip install 'bertjax[report]'")


def plot(results: dict[str, Any], file: Path | IO[bytes]) -> None:
    """Plot score and code length by layer, with a pair of panels per kind of probe."""
    from matplotlib.figure import Figure

    kinds = results["probes"]
    figure = Figure(figsize=(9, 3.4 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    for (kind, result), (left, right) in zip(kinds.items(), panels, strict=True):
        rows = result["layers"]
        column = {key: [row[key] for row in rows] for key in rows[0]}
        at, deviations = column["layer"], [sd or 0.0 for sd in column["sd"]]
        left.errorbar(at, column["score"], deviations, label="encoder")
        left.plot(at, result["mix"]["cumulative"], ":", label="mix of 0 to l")
        for panel, key, label in (
            (left, "random", "random encoder"),
            (left, "control", "random labels"),
            (right, "bits", "encoder"),
            (right, "random_bits", "random encoder"),
        ):
            if key in column:
                panel.plot(at, column[key], label=label)
        gray = {"color": "gray", "lw": 0.8}
        if results["majority"]:  # a single class has a Matthews correlation of 0
            left.axhline(results["majority"], **gray, label="largest class")
        right.axhline(results["uniform_bits"], **gray, label="uniform")
        left.set(title=f"{kind} probe", xlabel="layer", ylabel=results["metric"])
        right.set(title="online code", xlabel="layer", ylabel="bits")
        for panel in (left, right):
            panel.legend(fontsize="small")
    figure.savefig(file, dpi=150, format="png")

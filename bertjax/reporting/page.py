# SPDX-License-Identifier: Apache-2.0
"""Write the page: one HTML file with style, script and data; it fetches nothing."""

import datetime
import html
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax.config import serialize
from bertjax.reporting import run_tables
from bertjax.reporting.charts import SECTIONS, group_curves, run_chart, sweep_charts
from bertjax.reporting.read_runs import Run
from bertjax.reporting.run_tables import Table

MEDIANS = (
    "<p>Medians over the logged rows. Memory is the most that the fullest device had "
    "in use; on CPUs, the process.</p>"
)
LONG = 20  # tables of scores with more rows are folded


def write_page(
    runs: Sequence[Run],
    notes: Sequence[str] = (),
    blanks: Sequence[dict[str, Any]] = (),
    views: Sequence[dict[str, Any]] = (),
    probes: Sequence[dict[str, Any]] = (),
    scores: Sequence[tuple[str, Sequence[tuple[str, Table]]]] = (),
) -> str:
    """Return the page.

    notes: lines below the list of runs; blanks, views: from predictions.py; probes,
    scores: from score_files.py.
    """
    names = [run.name for run in runs]
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    listed = f"<ul class='notes'>{items}</ul>" if items else ""
    charts: list[dict[str, Any]] = []  # for page.js to draw
    curves = curves_section(runs, charts)
    seeds = ""
    for run in runs:
        if titled := [(chart["key"], chart) for chart in sweep_charts(run)]:
            seeds += f"<h3>Runs of the sweep {text(run.name)}</h3>"
            seeds += figures(titled, charts)
    by_layer = "".join(probe_section(probe, charts) for probe in probes)
    data = {"runs": names, "charts": charts, "views": [v["attention"] for v in views]}
    configs = (
        (text(run.name), key_table(serialize.with_defaults(run.config))) for run in runs
    )
    sections = [
        ("Runs", render(run_tables.overview(runs), marks=True) + listed),
        ("Curves", curves),
        ("What differs", differing_section(runs)),
        ("Evaluations", evaluations_section(runs) + seeds),
        ("Scores", "".join(scores_section(*one) for one in scores)),
        ("Speed and memory", MEDIANS + render(run_tables.speed(runs), marks=True)),
        ("Blanks over training", "".join(map(blanks_section, blanks))),
        ("Probes by layer", by_layer),
        ("A sentence", "".join(view_section(i, v) for i, v in enumerate(views))),
        ("Configs", "".join(folded(*one) for one in configs)),
    ]
    menu = body = ""
    for section, inside in sections:
        if inside:
            slug = section.lower().replace(" ", "-")
            menu += f"<a href='#{slug}'>{section}</a>"
            body += f"<section id='{slug}'><h2>{section}</h2>{inside}</section>"
    title = html.escape(", ".join(names) if len(runs) < 4 else f"{len(runs)} runs")
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return string.Template(read("page.html")).substitute(
        title=title,
        style=read("page.css"),
        time=html.escape(now),
        menu=menu,
        body=body,
        # A "<" could end the element that holds the data.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script=read("page.js"),
    )


def read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


class Markup(str):
    """Complete, escaped HTML."""


def text(value: Any) -> str:
    """Format a value for readers, escaped: 12,345 and 0.01235 and 1.2e-07."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and not 1e-4 <= abs(value) < 1e15:
            return f"{value:.3g}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return html.escape(str(value))


def render(table: Table, leading: set[int] = frozenset(), marks: bool = False) -> str:
    """Format a table that scrolls if it is wide; `marks`: rows are runs, in colors."""
    right = {
        k for r in table.rows for k, x in enumerate(r) if isinstance(x, int | float)
    }
    numeric = [" class='num'" if k in right else "" for k in range(len(table.head))]
    head = "".join(
        f"<th{kind}>{text(x)}</th>" for x, kind in zip(table.head, numeric, strict=True)
    )
    body = ""
    for i, row in enumerate(table.rows):
        body += "<tr class='best'>" if i in leading else "<tr>"
        for k, value in enumerate(row):
            mark = dot(i) if marks and not k else ""
            body += f"<td{numeric[k]}>{mark}{text(value)}</td>"
        body += "</tr>"
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def curves_section(runs: Sequence[Run], charts: list[dict[str, Any]]) -> str:
    """Place the charts; append those that are not constant to `charts`."""
    every = group_curves(runs)
    if not every:  # as for sweeps, whose curves are in another section
        alone = all(run.sweep for run in runs)
        return "" if alone else "<p>No rows of metrics.jsonl yet.</p>"
    chips = "".join(
        f"<label class='chip'><input type='checkbox' data-run='{i}' checked>"
        f"{dot(i)}{text(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    parts = [string.Template(read("curve_controls.html")).substitute(chips=chips)]
    sections: dict[str, tuple[list[str], list[str]]] = {}
    for chart in every:
        name = chart.key.split("/")[0]
        boxes, constants = sections.setdefault(name, ([], []))
        if chart.constant is None:
            # If other runs have the same metric, dots name the runs of this chart.
            dots = "".join(f" {dot(i, runs[i].name)}" for i, _ in chart.curves)
            title = text(", ".join((chart.key, *chart.same)))
            boxes.append(figure(title + dots * (not chart.alone), len(charts)))
            charts.append(run_chart(chart, runs))
        else:
            constants.append(f"{text(chart.key)} {text(chart.constant)}")
    for name, (boxes, constants) in sections.items():
        title = text(SECTIONS.get(name, name))
        parts.append(f"<h3>{title}</h3><div class='charts'>{''.join(boxes)}</div>")
        if constants:
            parts.append(f"<p class='quiet'>Constant: {', '.join(constants)}</p>")
    if any(not chart.alone for chart in every):
        parts.append(
            "<p class='quiet'>Runs share a chart of a loss or score where tokenizer, "
            "masks and length are the same, and in evaluations the text.</p>"
        )
    return "".join(parts)


def figure(caption: str, index: int, below: str = "") -> str:
    """Place a chart by its index in the data of page.js."""
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f"<div class='plot' data-chart='{index}'></div>{below}</figure>"
    )


def dot(run: int, name: str = "") -> str:
    """Return the mark of a run in its color; the name is a tooltip."""
    title = f" title='{html.escape(name)}'" if name else ""
    return f"<i class='dot c{run % 10}'{title}></i>"


def differing_section(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        changed = dict(sorted(runs[0].overrides.items()))
        title = "<p>What the command line changed in the config file:</p>"
        return title + key_table(changed) if changed else ""
    matters, free = run_tables.differing(runs)
    body = render(matters) if matters.rows else "<p>Nothing that matters.</p>"
    if free.rows:
        body += folded("Where and how they ran, without effect", render(free))
    return body


def evaluations_section(runs: Sequence[Run]) -> str:
    table, leading = run_tables.evaluations(runs)
    body = render(table, leading) if table.rows else ""
    sweeps = run_tables.sweeps(runs)
    if sweeps.rows:
        body += f"<p>Seeds of sweeps, by learning rate:</p>{render(sweeps)}"
    return body


def key_table(config: Mapping[str, Any]) -> str:
    """Format keys of a config and their values as a table."""
    rows = [[key, run_tables.written(value)] for key, value in config.items()]
    return render(Table(["key", "value"], rows))


def probe_section(probe: dict[str, Any], charts: list[dict[str, Any]]) -> str:
    """Format the results of probes of each kind; append their charts to `charts`."""
    body = f"<h3>{text(probe['file'])}</h3><p>{text(probe['about'])}</p>"
    for kind, result in probe["kinds"].items():
        body += figures([(f"{kind}: {x['key']}", x) for x in result["charts"]], charts)
        body += f"<p class='quiet'>{text(result['mix'])}</p>{render(result['table'])}"
    return body


def figures(
    titled: Sequence[tuple[str, dict[str, Any]]], charts: list[dict[str, Any]]
) -> str:
    """Place charts that are not of runs, with titles and names; extend `charts`."""
    boxes = ""
    for title, chart in titled:
        groups = {c.get("group", c["name"]): c["run"] for c in chart["curves"]}
        names = (f"<small>{dot(i)}{text(name)}</small>" for name, i in groups.items())
        below = f"<div class='chips'>{''.join(names)}</div>"
        boxes += figure(text(title), len(charts), below)
        charts.append(chart)
    return f"<div class='charts'>{boxes}</div>"


def scores_section(file: str, tables: Sequence[tuple[str, Table]]) -> str:
    """Format the tables of a file of scores; long ones are folded."""
    body = f"<h3>{text(file)}</h3>"
    for title, table in tables:
        if len(table.rows) > LONG:
            name = f"{text(title or 'scores')}, {len(table.rows)} rows"
            body += folded(name, render(table))
        else:
            body += f"<p>{text(title)}</p>" * bool(title) + render(table)
    return body


def guess_cell(guesses: Sequence[dict[str, Any]]) -> Markup:
    """Format guesses for a blank, best first, with probabilities."""
    cells = (
        f"{text(g['token'])} <small>{g['probability']:.3f}</small>" for g in guesses
    )
    return Markup("   ".join(cells))


def blanks_section(filled: dict[str, Any]) -> str:
    """Format a text's guesses, a row per checkpoint: {"run", "text", "rows": [...]}."""
    blanks = max((len(masks) for _, masks in filled["rows"]), default=0)
    head = ["step", *(f"blank {i + 1}" for i in range(blanks))]
    head = head if blanks > 1 else ["step", "guesses"]
    rows = [[step, *map(guess_cell, masks)] for step, masks in filled["rows"]]
    title = f"<h3>{text(filled['text'])} <small>{text(filled['run'])}</small></h3>"
    return title + render(Table(head, rows))


def view_section(index: int, view: dict[str, Any]) -> str:
    """Format a model's view of a sentence: guesses per token, and its attention."""
    rows = [
        [token["token"], token["probability"], guess_cell(token["guesses"])]
        for token in view["tokens"]
    ]
    right = {i for i, t in enumerate(view["tokens"]) if t["right"]}
    head = ["token", "its probability", "guesses when it is masked"]
    step = f"<small>{text(view['run'])}, step {text(view['step'])}</small>"
    return (
        f"<h3>{text(view['text'])} {step}</h3>{render(Table(head, rows), right)}"
        f"<div class='attention' data-view='{index}'></div>"
    )

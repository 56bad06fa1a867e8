# SPDX-License-Identifier: Apache-2.0
"""The page: one HTML file with its style, script and data inside, nothing fetched."""

import datetime
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertjax.config import serialize
from bertjax.reporting import run_tables, sweep_curves
from bertjax.reporting.curves import points
from bertjax.reporting.read_runs import Run
from bertjax.reporting.run_tables import Table

HERE = Path(__file__).parent
# Whatever a name may hold: the browser itself refuses to load anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LONG = 20  # rows of a table of scores that is shown folded
SECTIONS = {
    "train": "Training",
    "eval": "Evaluation",
    "optim": "Optimizer",
    "perf": "Speed and memory",
    "data": "Data",
    "guard": "Guard",
    "hosts": "Hosts",
}


def write_page(
    runs: Sequence[Run],
    notes: Sequence[str] = (),
    blanks: Sequence[dict[str, Any]] = (),
    views: Sequence[dict[str, Any]] = (),
    probes: Sequence[dict[str, Any]] = (),
    scores: Sequence[tuple[str, Sequence[tuple[str, Table]]]] = (),
) -> str:
    """Return the page. notes: lines to say; blanks, views: see guesses.py; probes,
    scores: see the files of these names."""
    names = [run.name for run in runs]
    every = run_tables.charts(runs)
    drawn = [chart for chart in every if chart.constant is None]
    data = {
        "runs": names,
        "charts": [
            {
                "key": chart.key,
                "curves": [{"run": i, **points(s)} for i, s in chart.curves],
            }
            for chart in drawn
        ],
        "views": [view["attention"] for view in views],
    }
    seeds = "".join(sweep_section(run, data["charts"]) for run in runs)
    by_layer = "".join(probe_section(found, data["charts"]) for found in probes)
    sections = [
        ("Runs", runs_section(runs, notes)),
        ("Curves", curves_section(runs, every, drawn)),
        ("What differs", differing_section(runs)),
        ("Evaluations", evaluations_section(runs) + seeds),
        ("Scores", "".join(scores_section(*one) for one in scores)),
        ("Speed and memory", speed_section(runs)),
        ("Blanks over training", "".join(map(blanks_section, blanks))),
        ("Probes by layer", by_layer),
        ("A sentence", "".join(view_section(i, v) for i, v in enumerate(views))),
        ("Configs", configs_section(runs)),
    ]
    sections = [(title, body) for title, body in sections if body]
    menu = "".join(f"<a href='#{slug(t)}'>{t}</a>" for t, _ in sections)
    body = "".join(
        f"<section id='{slug(t)}'><h2>{t}</h2>{b}</section>" for t, b in sections
    )
    title = html.escape(", ".join(names) if len(runs) < 4 else f"{len(runs)} runs")
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    # A "<" could end the element that holds the data.
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{read('page.css')}</style></head>\n"
        f"<body><header><h1>{title}</h1><p>bertjax, {html.escape(now)}</p>"
        f"<nav>{menu}</nav></header>\n<main>{body}</main>\n"
        f"<script type='application/json' id='data'>{told}</script>\n"
        f"<script>{read('page.js')}</script></body></html>\n"
    )


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def slug(title: str) -> str:
    return title.lower().replace(" ", "-")


class Markup(str):
    """HTML that is already whole and escaped."""


def text(value: Any) -> str:
    """Write a value for readers, escaped: 12,345 and 0.01235 and 1.2e-07."""
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


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def render(table: Table, leading: set[int] = frozenset(), marks: bool = False) -> str:
    """Write a table that scrolls when it is wide; `marks`: rows are runs, coloured."""
    right = {k for r in table.rows for k, x in enumerate(r) if is_number(x)}
    numeric = [" class='num'" if k in right else "" for k in range(len(table.head))]
    head = "".join(
        f"<th{kind}>{text(x)}</th>" for x, kind in zip(table.head, numeric, strict=True)
    )
    lines = []
    for i, row in enumerate(table.rows):
        cells = []
        for k, value in enumerate(row):
            mark = dot(i) if marks and not k else ""
            cells.append(f"<td{numeric[k]}>{mark}{text(value)}</td>")
        best = " class='best'" if i in leading else ""
        lines.append(f"<tr{best}>{''.join(cells)}</tr>")
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def runs_section(runs: Sequence[Run], notes: Sequence[str]) -> str:
    said = "".join(f"<li>{text(note)}</li>" for note in notes)
    return render(run_tables.overview(runs), marks=True) + (
        f"<ul class='notes'>{said}</ul>" if said else ""
    )


def curves_section(
    runs: Sequence[Run],
    every: Sequence[run_tables.Chart],
    drawn: Sequence[run_tables.Chart],
) -> str:
    """Place the charts; page.js draws them."""
    if not every:  # as in sweeps, whose curves stand by themselves
        alone = all(run.sweep for run in runs)
        return "" if alone else "<p>No rows of metrics.jsonl yet.</p>"
    chips = "".join(
        f"<label class='chip'><input type='checkbox' data-run='{i}' checked>"
        f"{dot(i)}{text(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    bar = (
        "<div class='bar'><label>x <select id='axis'><option value='step'>steps"
        "</option><option value='tokens'>tokens</option></select></label>"
        "<label><input type='checkbox' id='log'> log scale</label>"
        "<label><input type='checkbox' id='smooth'> smoothing</label>"
        f"<span class='chips'>{chips}</span></div>"
        "<noscript><p>Curves are drawn by a script in this page, which your browser "
        "does not run.</p></noscript>"
    )
    parts = [bar]
    for name in dict.fromkeys(chart.key.split("/")[0] for chart in every):
        boxes = "".join(
            figure(i, chart, runs)
            for i, chart in enumerate(drawn)
            if chart.key.split("/")[0] == name
        )
        still = ", ".join(
            f"{text(chart.key)} {text(chart.constant)}"
            for chart in every
            if chart.constant is not None and chart.key.split("/")[0] == name
        )
        note = f"<p class='quiet'>Constant: {still}</p>" if still else ""
        title = text(SECTIONS.get(name, name))
        parts.append(f"<h3>{title}</h3><div class='charts'>{boxes}</div>{note}")
    if any(not chart.alone for chart in every):
        parts.append(
            "<p class='quiet'>Runs share a chart of a loss or score where tokenizer, "
            "masks and length are the same, and in evaluations the text.</p>"
        )
    return "".join(parts)


def figure(index: int, chart: run_tables.Chart, runs: Sequence[Run]) -> str:
    """Place a chart; where others have the same metric, dots say whose this is."""
    dots = "".join(f" {dot(i, runs[i].name)}" for i, _ in chart.curves)
    names = text(", ".join((chart.key, *chart.same)))
    return (
        f"<figure><figcaption>{names}{'' if chart.alone else dots}</figcaption>"
        f"<div class='plot' data-chart='{index}'></div></figure>"
    )


def dot(run: int, name: str = "") -> str:
    """Return the mark of a run in its colour, which shows the name."""
    title = f" title='{html.escape(name)}'" if name else ""
    return f"<i class='dot c{run % 10}'{title}></i>"


def differing_section(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        given = [
            [k, run_tables.written(v)] for k, v in sorted(runs[0].overrides.items())
        ]
        if not given:
            return ""
        said = "<p>What the command line changed in the config file:</p>"
        return said + render(Table(["key", "value"], given))
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


def speed_section(runs: Sequence[Run]) -> str:
    said = (
        "<p>Medians over the logged rows. Memory is the most that the fullest device "
        "had in use; on CPUs, the process.</p>"
    )
    return said + render(run_tables.speed(runs), marks=True)


def configs_section(runs: Sequence[Run]) -> str:
    return "".join(
        folded(
            text(run.name),
            render(
                Table(
                    ["key", "value"],
                    [
                        [k, run_tables.written(v)]
                        for k, v in serialize.settled(run.config).items()
                    ],
                )
            ),
        )
        for run in runs
    )


def probe_section(found: dict[str, Any], charts: list[dict[str, Any]]) -> str:
    """Show what probes of each kind found; what page.js is to draw goes to `charts`."""
    parts = [f"<h3>{text(found['file'])}</h3><p>{text(found['about'])}</p>"]
    for kind, result in found["kinds"].items():
        titled = [(f"{kind}: {chart['key']}", chart) for chart in result["charts"]]
        parts.append(
            f"{figures(titled, charts)}"
            f"<p class='quiet'>{text(result['mix'])}</p>{render(result['table'])}"
        )
    return "".join(parts)


def sweep_section(run: Run, charts: list[dict[str, Any]]) -> str:
    """Place the curves of a sweep's runs; what page.js is to draw goes to `charts`."""
    titled = [(chart["key"], chart) for chart in sweep_curves.charts(run)]
    title = f"<h3>Runs of the sweep {text(run.name)}</h3>"
    return title + figures(titled, charts) if titled else ""


def figures(
    titled: Sequence[tuple[str, dict[str, Any]]], charts: list[dict[str, Any]]
) -> str:
    """Place charts that are no run's, each with its title and its names below.

    Curves of one "group" share a name and a colour. The charts go to `charts`, all that
    page.js is to draw.
    """
    boxes = []
    for title, chart in titled:
        groups = {c.get("group", c["name"]): c["run"] for c in chart["curves"]}
        names = "".join(
            f"<small>{dot(colour)}{text(name)}</small>"
            for name, colour in groups.items()
        )
        boxes.append(
            f"<figure><figcaption>{text(title)}</figcaption>"
            f"<div class='plot' data-chart='{len(charts)}'></div>"
            f"<div class='chips'>{names}</div></figure>"
        )
        charts.append(chart)
    return f"<div class='charts'>{''.join(boxes)}</div>"


def scores_section(file: str, found: Sequence[tuple[str, Table]]) -> str:
    """Show the tables of a file of scores; long ones are folded."""
    parts = [f"<h3>{text(file)}</h3>"]
    for title, table in found:
        body = render(table)
        if len(table.rows) > LONG:
            body = folded(f"{text(title or 'scores')}, {len(table.rows)} rows", body)
        elif title:
            body = f"<p>{text(title)}</p>{body}"
        parts.append(body)
    return "".join(parts)


def told(guesses: Sequence[dict[str, Any]]) -> Markup:
    """Write guesses for a blank, best first, each with its probability."""
    return Markup(
        "   ".join(
            f"{text(g['token'])} <small>{g['probability']:.3f}</small>" for g in guesses
        )
    )


def blanks_section(found: dict[str, Any]) -> str:
    """Show one text's guesses, a row a checkpoint: {"run", "text", "rows": [...]}."""
    blanks = max((len(masks) for _, masks in found["rows"]), default=0)
    head = ["step", *(f"blank {i + 1}" for i in range(blanks))]
    head = head if blanks > 1 else ["step", "guesses"]
    rows = [[step, *map(told, masks)] for step, masks in found["rows"]]
    title = f"<h3>{text(found['text'])} <small>{text(found['run'])}</small></h3>"
    return title + render(Table(head, rows))


def view_section(index: int, view: dict[str, Any]) -> str:
    """Show what a model sees in a sentence: guesses a token, and its attention."""
    rows = [
        [token["token"], token["probability"], told(token["guesses"])]
        for token in view["tokens"]
    ]
    right = {i for i, t in enumerate(view["tokens"]) if t["right"]}
    head = ["token", "its probability", "guesses when it is masked"]
    step = f"<small>{text(view['run'])}, step {text(view['step'])}</small>"
    return (
        f"<h3>{text(view['text'])} {step}</h3>{render(Table(head, rows), right)}"
        f"<div class='attention' data-view='{index}'></div>"
    )

# SPDX-License-Identifier: Apache-2.0
"""Workdirs written by hand, and a reader of the pages that show them."""

import json
from html.parser import HTMLParser
from pathlib import Path

from bertjax import report
from bertjax.config import schema, serialize

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Read a page: check that elements nest; collect tables, texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.tables, self.texts, self.inside = [], [], {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> is out of place"

    def handle_data(self, data):
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]].append(data)
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def data(self):
        return json.loads(self.inside["script"][0])

    def table(self, *head):
        return next(t[1:] for t in self.tables if t[0][: len(head)] == list(head))


def make_run(folder: Path, rows=None, stores=None, **changed) -> Path:
    """Write a workdir: a config with changes, and rows of metrics."""
    folder.mkdir(parents=True)
    config = schema.base()
    config.update_from_flattened_dict(changed)
    (folder / "config.json").write_text(serialize.to_json(config))
    (folder / "overrides.json").write_text(json.dumps(changed))
    facts = {"total_steps": 30, "parameters": 1234, "stores": stores or {"valid": "x"}}
    (folder / "run.json").write_text(json.dumps(facts))
    rows = some_rows() if rows is None else rows
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def some_rows(n=30, shift=0.0):
    rows = []
    for i in range(1, n + 1):
        row = {"step": i, "tokens": 100 * i, "train/loss": 9 - i / 10 + shift}
        row |= {"perf/step_seconds": 0.5, "perf/tokens_per_second": 200.0 + i}
        row |= {"data/wait_seconds": 0.1, "guard/skipped": 0}
        row["perf/memory_gib"] = 1.0 + (i > 5) / 2
        rows.append(row)
        if i % 10 == 0:
            scores = {"eval/valid/mlm_loss": abs(i - 20) / 10 + 5 + shift}
            scores["eval/valid/mlm_accuracy"] = 0.5 - abs(i - 20) / 100
            rows.append({"step": i, "tokens": 100 * i} | scores)
    return rows


def page_of(*folders, out=None, more=()) -> Page:
    out = out or folders[0].parent / "page.html"
    assert report.main([*map(str, folders), f"--out={out}", *more]) == 0
    text = out.read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "@import" not in text
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "onclick", "onerror", "onload"} & {k for k, _ in page.attributes}
    assert all(v.startswith("#") for k, v in page.attributes if k == "href")
    return page


def make_probes(file: Path, **changed) -> Path:
    """Write a file as bertjax.probe --out does, for three layers."""
    row = {"score": 0.5, "sd": 0.1, "bits": 30.0, "compression": 1.5, "control": 0.25}
    mix = {"score": 0.7, "weights": [0.2, 0.3, 0.5], "cumulative": [0.5, 0.6, 0.7]}
    mix |= {"centre_of_gravity": 1.3, "expected_layer": None}
    layers = [{"layer": i, **row, "random": 0.25 * i} for i in range(3)]
    found = {"model": "runs/<a>", "metric": "f1", "labels": ["a", "b"], "seeds": 3}
    found |= {"rows": {"train": 40, "valid": 9}, "pooling": "mean", "majority": 0.5}
    found |= {"of": "words"}
    found |= {"probes": {"linear": {"layers": layers, "mix": mix}}, "uniform_bits": 40}
    file.write_text(json.dumps(found | changed))
    return file

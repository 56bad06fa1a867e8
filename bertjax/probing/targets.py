# SPDX-License-Identifier: Apache-2.0
"""Labelled spans of sentences, and pairs of spans, out of JSON lines.

An object a line, as the edge probing of jiant has them: a text whose words stand
between spaces (or a list of words), and a list of targets, each with a span of words,
the end not in it, perhaps a second one, and a label:

{"text": "Ann lives in Bonn", "targets": [{"span1": [0, 1], "span2": [3, 4],
 "label": "lives-in"}]}
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.probing.labelled_spans import Say, Spans, choose
from bertjax.tasks import tables
from bertjax.tasks.tables import Row
from bertjax.tasks.tag_files import Sentence
from bertjax.tasks.task_rows import Form
from bertjax.tasks.text_rows import cell, read_labels
from bertjax.tasks.types import tag

NAMES = ("span1", "span2")
SCORES = "a probe tells classes, and these look like scores"


class Target(NamedTuple):
    """spans: (first word, end) of each; row: the cells that hold its label."""

    spans: tuple[tuple[int, int], ...]
    row: Row


def read_spans(
    values: Mapping[str, str],
    columns: Mapping[str, str],
    form: Form,
    tokenizer: Any,
    most: int,
    seed: int,
    say: Say,
) -> list[Spans]:
    """Read sentences with targets, each of which is an example.

    values: {flag: files}, of the training sentences and then of others. columns: {flag:
    column}, of the text and of the targets. most: examples of each, see `choose`.
    Raises UserError, naming the place.
    """
    (_, text), (flag_of_targets, column) = columns.items()
    read, parts = [], []
    for flag, value in values.items():
        rows = tables.read_rows(value, flag, columns, say)
        parsed = [parse(row, text, column) for row in rows]
        if not any(targets for _, targets in parsed):
            raise UserError(f"{flag}={value}: there is no span")
        read.append(parsed)
    numbers = {len(t.spans): t for part in read for _, ts in part for t in ts}
    if len(numbers) > 1:
        raise UserError(f"{numbers[1].row.place}: other targets have a second span")
    if not form.labels:
        rows = [target.row for _, targets in read[0] for target in targets]
        labels = read_labels(rows, "label", SCORES, flag_of_targets)
        form = form._replace(label="label", labels=labels)
    for flag, parsed in zip(values, read, strict=True):
        taken = choose([len(targets) for _, targets in parsed], most, seed, flag, say)
        some = [parsed[i] for i in taken]
        words = tag.make_tags([s for s, _ in some], form, tokenizer, False, say)
        at = np.repeat(words.sentences[:-1], [len(targets) for _, targets in some])
        targets = [target for _, targets in some for target in targets]
        places = np.array([target.spans for target in targets]) + at[:, None, None]
        parts.append(Spans(words, places, find_classes(targets, form)))
    return parts


def parse(row: Row, text: str, column: str) -> tuple[Sentence, list[Target]]:
    """Read a row's words and targets. Raises UserError."""
    words, targets = row.cells[text], row.cells[column]
    if isinstance(words, str):
        words = words.split()
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise UserError(f"{row.place}: {text} is no text, nor a list of words")
    if not isinstance(targets, list) or not all(isinstance(t, dict) for t in targets):
        raise UserError(f"{row.place}: {column} is no list of objects")
    name, _, line = row.place.rpartition(":")
    sentence = Sentence(words, None, name, int(line) if line.isdecimal() else 0)
    return sentence, [
        parse_target(target, f"{row.place}, target {i}", len(words))
        for i, target in enumerate(targets, 1)
    ]


def parse_target(target: Mapping[str, Any], place: str, words: int) -> Target:
    """Read one of a sentence of so many words. Raises UserError."""
    for name in ("span1", "label"):
        if name not in target:
            raise UserError(f"{place}: there is no {name}")
    spans = []
    for name in NAMES:
        if name not in target:
            continue
        span = target[name]
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise UserError(f"{place}: {name} is no [first word, end] but {span!r}")
        if not 0 <= span[0] < span[1] <= words:
            raise UserError(f"{place}: {name}={span} is no span of {words} words")
        spans.append((span[0], span[1]))
    return Target(tuple(spans), Row(target, place))


def find_classes(targets: Sequence[Target], form: Form) -> np.ndarray:
    """Return what the labels are among the form's: i32 [n]. Raises UserError."""
    index = {label: i for i, label in enumerate(form.labels)}
    classes = []
    for target in targets:
        label = cell(target.row, "label")
        if label not in index:
            error = registry.unknown("--labels: the label", label, form.labels)
            raise UserError(f"{target.row.place}: {error}")
        classes.append(index[label])
    return np.array(classes, np.int32)

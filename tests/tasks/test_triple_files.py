# SPDX-License-Identifier: Apache-2.0
"""Files of triples and of names: reading, reports, refusals."""

import gzip
import json

import pytest

from bertjax import UserError
from bertjax.tasks.graphs import Graph
from bertjax.tasks.open_graph import number_triples
from bertjax.tasks.task_rows import Form
from bertjax.tasks.triple_files import (
    Described,
    parse_triples,
    read_descriptions,
    read_triples,
)

LINES = "subject\tpredicate\tobject\na\tr\tb\r\n\nb\tr\t c d \n"


def test_triples_are_read_packed_or_not(tmp_path):
    said = []
    (tmp_path / "a.tsv").write_text(LINES)
    with gzip.open(tmp_path / "b.tsv.gz", "wt") as file:
        file.write("x\ty\tz\n")
    value = f"{tmp_path}/a.tsv,{tmp_path}/b.tsv.gz"
    found = read_triples(value, "data.train", {}, said.append)
    parts = [(t.head, t.relation, t.tail) for t in found]
    assert parts == [("a", "r", "b"), ("b", "r", "c d"), ("x", "y", "z")]
    assert found[1].place == f"{tmp_path}/a.tsv:4"
    assert any("names the columns" in line for line in said)
    assert any("1 empty line, skipped" in line for line in said)


def test_objects_may_leave_out_what_is_asked_for():
    lines = [
        {"head": "a", "relation": "r", "tail": None},
        {"tail": "b", "relation": "r"},
    ]
    lines[1]["head"] = "?"
    found = parse_triples("\n".join(map(json.dumps, lines)), "rows")
    assert [(t.head, t.tail) for t in found] == [("a", "?"), ("?", "b")]


@pytest.mark.parametrize(
    "text, words",
    [
        ("a\tr\tb\nonly two\tfields\n", ":2: a triple is head, .* has 2 cells"),
        ("a\tr\tb\tc\n", ":1: .* has 4 cells"),
        ("a\t\tb\n", ":1: .* has 3 cells, 1 of them empty"),
        ("a\tr\tb\t\n", ":1: .* has 4 cells, 1 of them empty"),
        ('{"head": "a"}\n', ":1: there is no relation"),
        ('{"head": "a", "relation": 3, "tail": "b"}\n', ":1: .* have to be texts"),
        ("\n", "there are no triples"),
    ],
)
def test_what_is_no_triple_is_named(tmp_path, text, words):
    (tmp_path / "bad.tsv").write_text(text)
    with pytest.raises(UserError, match=f"bad.tsv.*{words}|{words}"):
        read_triples(str(tmp_path / "bad.tsv"), "data.train", {})


def test_names_of_both_kinds_of_files(tmp_path):
    (tmp_path / "a.tsv").write_text("q1\tBonn\ta city\nq2\tRhine\n")
    objects = [
        {"id": "p1", "label": "lies on"},
        {"id": "q3", "label": None, "text": "x"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, objects)))
    said = []
    value = f"{tmp_path}/a.tsv,{tmp_path}/b.jsonl"
    found = read_descriptions(value, "data.entities", said.append)
    assert found == {
        "q1": Described("Bonn", "a city"),
        "q2": Described("Rhine"),
        "p1": Described("lies on"),
        "q3": Described("q3", "x"),
    }
    assert "1 id without a name" in said[0]
    (tmp_path / "c.tsv").write_text("q1\tBonn\nq1\tBonn\n")
    with pytest.raises(UserError, match=r"c.tsv:2: the id 'q1' occurs twice"):
        read_descriptions(str(tmp_path / "c.tsv"), "data.entities")
    (tmp_path / "d.tsv").write_text("q1\n")
    with pytest.raises(UserError, match=r"d.tsv:1: .* has 1 cell"):
        read_descriptions(str(tmp_path / "d.tsv"), "data.entities")


def make_form(train, texts=(), is_open=False):
    graph = Graph.of(train, [], dict(texts), is_open)
    return Form((), "", (), 1, (), graph=graph)


def test_repeated_triples_count_once():
    train = parse_triples("a\tr\tb\nb\tr\ta\na\tr\tb\n", "t.tsv")
    said = []
    form, triples = number_triples(train, make_form(train), True, said.append)
    assert triples.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert said == ["1 triple that came before, counted once: t.tsv:3"]
    assert form.graph.known_triples.tolist() == triples.tolist()


@pytest.mark.parametrize(
    "line, labelled, words",
    [
        ("a\tr\t?", True, "say what is right"),
        ("a\tr\tb", False, "in place of the head"),
        ("?\tr\t?", False, "and nowhere else"),
        (
            "a\tnever_seen\tb",
            True,
            "the relation 'never_seen' is in no training triple",
        ),
        ("anne\tr\tb", True, "the entity 'anne' .*; did you mean 'anna'"),
    ],
)
def test_what_cannot_be_asked_is_named(line, labelled, words):
    train = parse_triples("a\tr\tb\nanna\tr\tb\n", "t.tsv")
    form = make_form(train)
    with pytest.raises(UserError, match=f"q.tsv:1: .*{words}"):
        number_triples(parse_triples(line, "q.tsv"), form, labelled, print)

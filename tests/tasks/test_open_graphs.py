# SPDX-License-Identifier: Apache-2.0
"""Graphs with entities that are not trained on: what is saved and read of them."""

import json
from types import SimpleNamespace

import pytest

from bertjax import UserError
from bertjax.config.schema import base
from bertjax.tasks.graphs import Graph
from bertjax.tasks.open_graph import make_graph, number_triples
from bertjax.tasks.task_rows import Form
from bertjax.tasks.task_type import load_task_type
from bertjax.tasks.triple_files import Described, parse_triples

TEXTS = {"Q1": Described("Paris", "a city"), "Q9": Described("Lyon", "a city too")}


def reads_triples(graph):
    pytest.fail("the triples were read")


@pytest.mark.parametrize("is_open", [True, False])
def test_what_is_said_of_entities_is_kept_where_they_may_be_asked_for(is_open):
    triples = parse_triples("Q1\tin\tQ2\n", "t.tsv")
    graph = Graph.of(triples, [], TEXTS, is_open)
    facts = json.loads(json.dumps(graph.to_json()))
    again = Graph.from_json(facts, reads_triples, reads_triples, {})
    assert again.describe("Q1") == TEXTS["Q1"]
    wider = again.with_names(["Q9"], [])  # reads no triples
    assert wider.entities == ["Q1", "Q2", "Q9"]
    assert wider.describe("Q9").name == ("Lyon" if is_open else "Q9")


def test_a_name_is_that_of_one_entity_though_no_triple_has_it():
    facts = {"Q1": Described("Paris"), "Q8": Described("Paris", "a town")}
    facts |= {"Q9": Described("Lyon", "a city"), "P1": Described("lies in")}
    graph = Graph.of(parse_triples("Q1\tP1\tQ2\n", "t.tsv"), [], facts, is_open=True)
    graph = Graph.from_json(graph.to_json(), reads_triples, reads_triples, {})
    assert graph.entity_id("Lyon", "-") == graph.entity_id("Q9", "-") == "Q9"
    assert graph.entity_id("Oslo", "-") == "Oslo"
    assert graph.relation_id("lies in", "-") == "P1"
    assert graph.relation("lies in", "-") == 0
    # The name of a relation does not name an entity.
    assert graph.entity_id("lies in", "-") == "lies in"
    with pytest.raises(UserError, match=r"x:1: 2 entities .* 'Paris'.* \(Q1, Q8\)"):
        graph.entity_id("Paris", "x:1")


def test_held_out_triples_that_are_learnt_too_are_said():
    train = parse_triples("a\tr\tb\nb\tr\tc\n", "train.tsv")
    others = parse_triples("a\tr\tc\nb\tr\tc\n", "dev.tsv")
    said = []
    make_graph(base(), train, others, said.append)
    assert said == ["1 triple of data.valid that data.train has too: dev.tsv:2"]


@pytest.mark.parametrize("is_open", [True, False])
def test_triples_with_names_are_those_of_the_ids(tmp_path, is_open):
    names = tmp_path / "names.tsv"
    names.write_text("Q1\tParis\nQ2\tFrance\nP1\tlies in\n")
    config = base()
    config.data.entities = str(names)
    train = parse_triples("Q1\tP1\tQ2\n", "train.tsv")
    others = parse_triples("Paris\tlies in\tFrance\nParis\tP1\tQ1\n", "dev.tsv")
    said = []
    make_graph(config, train, others, said.append, is_open)
    assert said[0] == "1 triple of data.valid that data.train has too: dev.tsv:1"


def test_held_out_triples_may_have_names():
    """The names stand for the entities that have them, and add no entities."""
    train = parse_triples("Q1\tP1\tQ2\n", "train.tsv")
    texts = TEXTS | {"P1": Described("lies in")}
    others = parse_triples("Paris\tlies in\tOslo\nLyon\tP1\tQ2\n", "dev.tsv")
    graph = Graph.of(train, others, texts, is_open=True)
    assert graph.entities == ["Q1", "Q2", "Oslo", "Q9"]
    assert graph.relations == ["P1"]
    assert graph.numbers(others).tolist() == [[0, 0, 2], [3, 0, 1]]
    texts["Q8"] = Described("Paris")
    with pytest.raises(UserError, match=r"dev.tsv:1: 2 entities .* 'Paris'"):
        Graph.of(train, others, texts, is_open=True)


@pytest.mark.parametrize("name", ["complete", "edges", "mlmlm"])
def test_scored_triples_that_were_learnt_are_said(name, tmp_path):
    (tmp_path / "train.tsv").write_text("a\tr\tb\nb\tr\tc\nb\tr\tc\n")
    config = base()
    config.data.train = str(tmp_path / "train.tsv")
    kept = {"graph": {"entities": ["a", "b", "c"], "relations": ["r"], "texts": {}}}
    task_type = load_task_type(name)
    graph = task_type.open_graph(config, kept)
    read = parse_triples("a\tr\tc\nb\tr\tc\n", "test.tsv")
    asks = "relation" if name == "edges" else "head, or of the tail"
    said = []
    number_triples(read, Form((), "", (), 1, (), graph=graph), True, said.append, asks)
    assert said == ["1 triple that data.train has too: test.tsv:2"]


@pytest.mark.parametrize("name", ["complete", "edges", "mlmlm"])
def test_what_sees_nothing_behind_it_completes_no_triples(name):
    config = base()
    config.objective, config.model.is_decoder = name, True
    with pytest.raises(UserError, match="is_decoder=True: objective="):
        load_task_type(name).check(config)


def test_entities_are_spelled_by_a_vocabulary_that_has_a_mask():
    form, tokenizer = Form((), "", (), 1, ()), SimpleNamespace(has_mask=False)
    with pytest.raises(UserError, match="mlmlm spells entities in the place of masks"):
        load_task_type("mlmlm").make_rows([], form, tokenizer, True)

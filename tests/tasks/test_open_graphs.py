# SPDX-License-Identifier: Apache-2.0
"""Graphs whose entities need not be learnt from: what is kept of them, and read."""

import json

import pytest

from bertjax.tasks.graphs import Graph
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
    wider = again.with_names(["Q9"], [])  # which reads no triple
    assert wider.entities == ["Q1", "Q2", "Q9"]
    assert wider.describe("Q9").name == ("Lyon" if is_open else "Q9")

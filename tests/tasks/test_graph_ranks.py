# SPDX-License-Identifier: Apache-2.0
"""Filtered ranks: against pykeen, against brute force, and with equal scores."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bertjax.objectives.entity_ranks import best_candidates, count_above
from bertjax.tasks.graphs import (
    HEAD,
    METRICS,
    TAIL,
    Graph,
    Queries,
    both_sides,
    ranking_scores,
    score_sides,
)
from bertjax.tasks.known_answers import KnownAnswers

GOLDEN = Path(__file__).parents[1] / "testdata/ranking_golden.npz"


def counts_of(scores, queries, triples):
    known = KnownAnswers(triples, scores.shape[1])
    others = known.others(queries, known.most(queries))
    found = jax.jit(count_above)(scores, queries.answers, others)
    return {name: np.asarray(values) for name, values in found.items()}


def test_ranks_are_those_of_pykeen():
    """tests/testdata/make_ranking_golden.py computed them with pykeen's
    RankBasedEvaluator in f32."""
    golden = np.load(GOLDEN)
    held_out = golden["held_out"].astype(np.int32)
    scores = np.concatenate([golden["tail_scores"], golden["head_scores"]])
    sides = np.repeat([TAIL, HEAD], len(held_out))
    queries = Queries(np.concatenate([held_out, held_out]), sides)
    found = counts_of(scores, queries, golden["triples"])
    assert (found["equal"] > 0).mean() > 0.8  # the rules differ only for equal scores
    metrics = ranking_scores(found["greater"], found["equal"])
    assert metrics.keys() == {*METRICS}
    for name in METRICS:
        assert metrics[name] == pytest.approx(float(golden[name]), rel=1e-6), name
    of_sides = score_sides(found, sides, ["mrr"])
    for side in ("head", "tail"):
        assert of_sides[side]["mrr"] == pytest.approx(float(golden[f"{side}_mrr"]))


def brute_force(scores, triples, queries):
    """Compare every entity with the right one, except other right ones."""
    known = {tuple(t) for t in triples.tolist()}
    for row, triple, side in zip(scores, *queries, strict=True):
        greater = equal = 0
        for entity, score in enumerate(row):
            other = triple.copy()
            other[side] = entity
            if entity == triple[side] or tuple(other.tolist()) in known:
                continue
            greater += score > row[triple[side]]
            equal += score == row[triple[side]]
        yield greater, equal


@pytest.mark.parametrize("entities, relations, n", [(12, 1, 60), (40, 4, 200)])
def test_ranks_are_those_of_a_brute_force(entities, relations, n):
    draw = np.random.default_rng(n)
    size = [entities, relations, entities]
    triples = np.unique(draw.integers(0, size, (n, 3)), axis=0).astype(np.int32)
    queries = both_sides(triples[: n // 3])
    shape = len(queries.sides), entities
    scores = draw.integers(0, 6, shape).astype(np.float32)
    found = counts_of(scores, queries, triples)
    wanted = np.array([*brute_force(scores, triples, queries)])
    np.testing.assert_array_equal(found["greater"], wanted[:, 0])
    np.testing.assert_array_equal(found["equal"], wanted[:, 1])
    raw = jax.jit(count_above)(scores, queries.answers)
    assert np.all(raw["greater"] >= found["greater"])
    assert np.any(raw["greater"] > found["greater"])
    # Renumbering entities changes nothing; a sort that orders ties would.
    order = draw.permutation(entities)
    renamed = triples.copy()
    renamed[:, [0, 2]] = order[triples[:, [0, 2]]]
    moved = np.empty_like(scores)
    moved[:, order] = scores
    again = counts_of(moved, both_sides(renamed[: n // 3]), renamed)
    for name, values in found.items():
        np.testing.assert_array_equal(again[name], values)


def test_alike_scores_have_the_ranks_of_chance():
    n = 101
    ranks = ranking_scores(np.zeros(5), np.full(5, n - 1))
    assert ranks["mean_rank"] == (n + 1) / 2
    assert (ranks["mrr_optimistic"], ranks["mrr_pessimistic"]) == (1, 1 / n)
    assert ranks["hits@10"] == 0


def test_a_model_of_no_numbers_has_no_rank():
    scores = np.zeros((3, 5), np.float32)
    scores[1, 2] = np.nan
    scores[2, 0] = -np.inf
    found = count_above(scores, np.zeros(3, np.int32))
    np.testing.assert_array_equal(np.isnan(found["greater"]), [False, True, False])
    assert found["greater"][2] == 4


def test_the_best_come_first():
    scores = np.array([[0.1, 0.7, 0.2]], np.float32)
    found = best_candidates(scores, scores, 5)
    assert found["top_ids"].tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(found["top_probabilities"], [[0.7, 0.2, 0.1]])


def test_names_are_found_and_told_apart():
    from bertjax import UserError
    from bertjax.tasks.triple_files import Described, Triple

    train = [Triple("q1", "p", "q2", "t.tsv", 1), Triple("q1", "p", "q3", "t.tsv", 2)]
    texts = {
        "q1": Described("Bonn"),
        "q2": Described("Jordan"),
        "q3": Described("Jordan"),
    }
    graph = Graph.of(train, [], texts, is_open=False)
    assert graph.numbers([Triple("Bonn", "p", "?", "q.tsv", 1)]).tolist() == [
        [0, 0, -1]
    ]
    for name, words in (("Jordan", "q2, q3"), ("Bon", "did you mean 'Bonn'")):
        with pytest.raises(UserError, match=f"q.tsv:4: .*{words}"):
            graph.numbers([Triple(name, "p", "?", "q.tsv", 4)])


def test_what_depends_on_names_is_made_again_for_others():
    graph = Graph(["a", "b"], ["r"])
    tokenizer = SimpleNamespace(identity="words")
    tables = [
        known.cached("table", lambda known=known: known.entities, tokenizer)
        for known in (graph, graph.with_names(["c"], []), graph.with_names(["d"], []))
    ]
    assert [[*table][-1] for table in tables] == ["b", "c", "d"]
    assert graph.with_names(["a"], []).cached("table", list, tokenizer) is tables[0]

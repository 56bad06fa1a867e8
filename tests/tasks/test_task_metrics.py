# SPDX-License-Identifier: Apache-2.0
"""Metrics against scipy, their definitions and examples by hand."""

import doctest
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.tasks import metrics, search_measures, squad_metrics
from bertjax.tasks.metrics import bio_violations, entity_scores
from bertjax.tasks.squad_metrics import cmrc_scores, squad_scores

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2)


@pytest.mark.parametrize("module", [metrics, squad_metrics])
def test_examples(module):
    done = doctest.testmod(module)
    assert done.attempted > 3 and not done.failed


@settings(max_examples=60, deadline=None)
@given(PAIRS)
def test_correlations_agree_with_scipy_and_ties_share_a_rank(pairs):
    a, b = np.array(pairs, np.float64).T
    if len(set(a)) > 1 and len(set(b)) > 1:
        want = scipy.stats.pearsonr(a, b)[0], scipy.stats.spearmanr(a, b)[0]
    else:
        want = 0, 0
    assert (metrics.pearson(a, b), metrics.spearman(a, b)) == pytest.approx(want)
    # phi is the correlation of the class indicators.
    if want[0] and len(set(a) | set(b)) == 2:
        assert metrics.matthews(a, b) == pytest.approx(want[0])


def test_what_is_undefined_is_zero():
    none, same, other = np.array([]), np.full(3, 0.1), np.array([1.0, 2, 3])
    for score in metrics.METRICS.values():
        assert score(none, none) == 0.0
    for score in (metrics.pearson, metrics.spearman, metrics.matthews):
        assert score(same, other) == score(other, same) == 0.0
    assert metrics.pearson(np.array([1, np.nan, 2]), other) == 0.0
    assert metrics.spearman(np.array([1, np.nan, 2]), other) == 0.0
    assert metrics.f1(np.array([0, 0]), np.array([0, 0])) == 0.0
    # Numbers that are too small to be squared.
    assert metrics.pearson(other * 1e-300, other) == pytest.approx(1)
    with pytest.raises(ValueError, match="differ"):
        metrics.accuracy(np.zeros((2, 1)), np.zeros(2))


def test_classes():
    said, true = np.array([0, 1, 2, 2, 1, 0]), np.array([0, 2, 2, 2, 1, 1])
    assert metrics.accuracy(said, true) == pytest.approx(4 / 6)
    # The F1 is 2/3 for class 0, 1/2 for class 1, 4/5 for class 2.
    assert metrics.macro_f1(said, true) == pytest.approx((2 / 3 + 1 / 2 + 4 / 5) / 3)
    # Covariances of the indicators: (4 * 6 - 12) / sqrt((36 - 12) (36 - 14))
    assert metrics.matthews(said, true) == pytest.approx(12 / math.sqrt(24 * 22))


def test_entities_as_conlleval_reads_them():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["I-LOC", "I-PER", "B-PER", "O"], []]
    said = [["B-PER", "I-PER", "O", "I-LOC"], ["I-LOC", "I-LOC", "B-PER", "O"], []]
    scores = entity_scores(said, gold)
    # gold: PER, LOC; LOC, PER, PER; predicted: PER, LOC; LOC (too long), PER
    assert scores["precision"] == 3 / 4 and scores["recall"] == 3 / 5
    assert scores["f1"] == pytest.approx(6 / 9)
    assert scores["types"]["LOC"] == dict(precision=0.5, recall=0.5, f1=0.5, support=2)
    assert scores["types"]["PER"]["support"] == 3
    assert entity_scores([["O"]], [["O"]])["f1"] == 0.0
    assert bio_violations(gold) == [(1, 0), (1, 1)]
    with pytest.raises(UserError, match="'S-PER'"):
        entity_scores([["S-PER"]], [["O"]])
    with pytest.raises(ValueError, match="length"):
        entity_scores([["O"]], [["O", "O"]])


def test_rankings():
    ranked, relevant = np.array([0.0, 1, 0, 2]), np.array([1.0, 2])
    gains = 1 / np.log2([2, 3, 4, 5])
    best = 2 * gains[0] + gains[1]
    want = (gains[1] + 2 * gains[3]) / best
    assert search_measures.ndcg_at_k(ranked, relevant, 10) == pytest.approx(want)
    assert search_measures.ndcg_at_k(ranked, relevant, 3) == pytest.approx(
        gains[1] / best
    )
    assert search_measures.ndcg_at_k(ranked, relevant, 1) == 0
    assert search_measures.recall_at_k(ranked, relevant, 2) == 0.5
    assert search_measures.recall_at_k(ranked, relevant, 9) == 1
    assert search_measures.reciprocal_rank(ranked, relevant, 9) == 0.5
    assert search_measures.reciprocal_rank(ranked, relevant, 1) == 0
    nothing = np.zeros(0)
    assert {
        measure(nothing, relevant) for measure in search_measures.MEASURES.values()
    } == {0}


def test_measures_of_queries():
    """Passages with a grade of 0 or below, or without a grade, are not relevant."""
    found = search_measures.measure(
        [np.array([3, 7]), np.array([], int)], [{7: 1, 3: 0}, {1: 2}]
    )
    assert found["mrr@10"].tolist() == [0.5, 0]
    assert found["recall@1"].tolist() == [0, 0] and found["recall@5"].tolist() == [1, 0]


def test_answers_of_version_1():
    golds = {"a": ["the Eiffel Tower", "Tower"], "b": ["1889"], "c": ["Zürich"]}
    said = {"a": "a Tower, in Paris", "c": "ZÜRICH—"}  # the dash is not ASCII
    found = squad_scores(said, golds)
    assert found["exact"] == 0
    assert found["f1"] == pytest.approx(100 * (1 / 2) / 3)
    # "The" normalizes to "": equal, but without a common word.
    assert squad_scores({"a": "a!"}, {"a": ["The"]}) == {"exact": 100, "f1": 0}


def test_answers_of_version_2():
    golds = {"a": ["one two"], "b": [], "c": [], "d": ["the", "x"]}
    said = {"a": "two", "b": "", "c": "two", "d": ""}
    found = squad_scores(said, golds, {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.5})
    third = 100 * (2 / 3)
    assert found["exact"] == 25 and found["f1"] == pytest.approx((third + 100) / 4)
    assert found["HasAns_exact"] == 0 and found["HasAns_f1"] == pytest.approx(third / 2)
    assert found["NoAns_exact"] == found["NoAns_f1"] == 50
    assert found["best_f1"] == pytest.approx((third + 200) / 4)
    assert found["best_f1_thresh"] == 0.1
    assert found["best_exact"] == 50 and found["best_exact_thresh"] < 0.1
    # "the" alone normalizes to "": then the right answer is "".
    assert squad_scores({"d": ""}, {"d": ["the"], "b": []})["HasAns_exact"] == 100


def test_equal_doubts_change_sides_together():
    golds = {"a": ["x"], "b": []}
    found = squad_scores({"a": "x", "b": "x"}, golds, {"a": 0.5, "b": 0.5})
    assert found["best_exact"] == 50 and 0.49 < found["best_exact_thresh"] < 0.5


def test_the_best_threshold_scores_what_it_says():
    """The threshold gives the best score, also with texts that normalize to ""."""
    golds = {"a": ["the"], "b": ["dog"], "c": [], "d": []}
    said, doubts = (
        {"a": "cat", "b": "cat", "c": "an", "d": "x"},
        dict(zip("abcd", range(4), strict=True)),
    )
    found = squad_scores(said, golds, doubts)
    threshold = found["best_exact_thresh"]
    kept = {name: "" if doubts[name] > threshold else said[name] for name in said}
    assert found["best_exact"] == squad_scores(kept, golds)["exact"] == 75


def test_answers_in_chinese():
    golds = {"a": ["《跑跑》"], "b": ["2009年 Apple Inc"], "c": ["x"]}
    said = {"a": "跑跑。", "b": "年Apple"}
    found = cmrc_scores(said, golds)
    # b has 2 common units, of 2 and of 4; c has no prediction.
    assert found["exact"] == pytest.approx(100 / 3)
    assert found["f1"] == pytest.approx(100 * (1 + 4 / 6) / 3)
    assert cmrc_scores({"a": "，"}, {"a": ["字"]}) == {"exact": 0.0, "f1": 0.0}
    assert squad_metrics.cmrc_units("Roy H. Re (3.5%)，1,000人.") == [
        *("roy", "h.", "re", "(", "3.5", "%", ")", "1,000", "人", ".")
    ]

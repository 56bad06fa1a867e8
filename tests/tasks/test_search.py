# SPDX-License-Identifier: Apache-2.0
"""Exact search among vectors of each kind, compressed vectors, and metrics."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from bertjax import UserError
from bertjax.tasks import search, search_measures
from bertjax.tasks.search import Binary, Dense, Int8, MultiVectors, Sparse


def brute_force(scores, leave, k):
    """Rank all passages by score, then by number."""
    out = []
    for row, left in zip(np.nan_to_num(scores, nan=-np.inf), leave, strict=True):
        order = sorted(range(len(row)), key=lambda p: (-row[p], p))
        out.append([p for p in order if p != left and np.isfinite(row[p])][:k])
    return out


def found_of(numbers):
    """Leave out the padding, -1."""
    return [row[row >= 0].tolist() for row in numbers]


@pytest.mark.parametrize("tile", [7 * 40, 2**25], ids=["tiles", "whole"])
def test_dense_is_exact_and_ties_go_to_the_first(monkeypatch, tile):
    draw = np.random.default_rng(0)
    queries = draw.integers(-2, 3, (40, 4)).astype(np.float32)
    passages = draw.integers(-2, 3, (90, 4)).astype(np.float32)
    leave = draw.integers(-1, 90, 40)
    passages[17] = np.nan  # passages with NaN are never found
    monkeypatch.setattr(search, "SCORES", tile)
    numbers, scores = Dense(passages).search(Dense(queries), leave, 10)
    products = queries @ passages.T
    assert found_of(numbers) == brute_force(products, leave, 10)
    np.testing.assert_array_equal(scores, np.take_along_axis(products, numbers, 1))
    few = Dense(passages[:3]).search(Dense(queries[:2]), k=10)[0]
    assert [sorted(row) for row in few.tolist()] == [[0, 1, 2]] * 2
    queries[0] = np.nan
    assert set(Dense(passages).search(Dense(queries), leave, 10)[0][0]) == {-1}


def test_sparse_and_many_vectors_are_exact(monkeypatch):
    draw = np.random.default_rng(1)
    monkeypatch.setattr(search, "SCORES", 4000)
    weights = draw.integers(0, 3, (70, 30)) * (draw.random((70, 30)) < 0.2)
    index = Sparse(csr_array(weights.astype(np.float32)))
    queries, passages = index.split(20)
    products = weights[:20] @ weights[20:].T
    leave = draw.integers(-1, 50, 20)
    found = passages.search(queries, leave, 6)[0]
    assert found_of(found) == brute_force(products, leave, 6)
    texts = [draw.integers(-2, 3, (n, 4)).astype("f4") for n in draw.integers(1, 9, 70)]
    queries, passages = MultiVectors.of(texts).split(20)
    products = np.array(
        [[(q @ p.T).max(1).sum() for p in texts[20:]] for q in texts[:20]]
    )
    found, scores = passages.search(queries, leave, 6)
    assert found_of(found) == brute_force(products, leave, 6)
    np.testing.assert_array_equal(scores, np.take_along_axis(products, found, 1))


def test_equal_scores_of_a_tile_are_not_all_kept(monkeypatch):
    """Most SPLADE queries share pieces with few passages; all others score 0."""
    scores = np.zeros((3, 500), np.float32)
    scores[0, [7, 400]], scores[1, 3:20], scores[2, 450] = (1, 2), 1, -1
    sizes, lexsort = [], np.lexsort
    monkeypatch.setattr(
        np, "lexsort", lambda keys: (sizes.append(len(keys[0])), lexsort(keys))[1]
    )
    own = np.full((3, 8), -1, np.int64), np.full((3, 8), -np.inf, np.float32)
    search.merge(own, scores, 0)
    assert own[0].tolist() == brute_force(scores, [-1] * 3, 8)
    assert sizes == [3 * 8 + 3 * 8]


def test_the_largest_weights_make_sparse_vectors():
    weights = np.array([[3, 1, 0], [2, 0, 0]], np.float32)
    terms = np.array([[4, 1, 0], [0, 1, 2]], np.int32)
    dense = Sparse.of_top(weights, terms, 6).weights.toarray()
    assert dense.tolist() == [[0, 1, 0, 0, 3, 0], [2, 0, 0, 0, 0, 0]]


def test_few_bytes_find_nearly_the_same():
    """8 bits find all but few passages, signs find some, and rescoring finds most."""
    draw = np.random.default_rng(2)
    passages = draw.normal(size=(3000, 64)).astype(np.float32)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    noise = draw.normal(size=(50, 64)).astype(np.float32)
    queries = Dense(passages[:50] + noise * 0.1)
    exact = Dense(passages).search(queries, k=10)[0]

    def recall(found):
        both = zip(found.tolist(), exact.tolist(), strict=True)
        return np.mean([len({*a} & {*b}) / 10 for a, b in both])

    small, signs = Int8.of(passages), Binary.of(passages)
    assert small.nbytes == 3000 * 64 + 64 * 4 and signs.nbytes == 3000 * 8
    assert (
        np.abs(small.codes * small.scale - passages).max() <= small.scale.max() / 1.99
    )
    coarse = signs.search(queries, k=100)[0]
    recalls = [
        recall(small.search(queries, k=10)[0]),
        recall(coarse[:, :10]),
        recall(search.rescore(coarse, queries, passages, 10)[0]),
    ]
    assert recalls[0] > 0.95 and recalls[1] < recalls[2] and recalls[2] > 0.8
    again, scores = search.rescore(exact, queries, passages, 10)
    assert (again == exact).all() and (np.diff(scores) <= 0).all()


def test_measures_by_hand():
    found = [np.array([4, 1, 2]), np.array([3])]
    grades = [{1: 2, 2: 1, 9: 0}, {7: 1}]
    told = search_measures.measure(found, grades)
    gain = 2 / np.log2(3) + 1 / 2
    assert told["ndcg@10"].tolist() == pytest.approx([gain / (2 + 1 / np.log2(3)), 0])
    assert told["mrr@10"].tolist() == [0.5, 0]
    assert told["recall@1"].tolist() == [0, 0] and told["recall@5"].tolist() == [1, 0]


def test_few_bytes_keep_no_numbers_that_are_not_finite():
    vectors = np.ones((3, 8), np.float32)
    vectors[1, 2] = np.nan
    for make in (search.Int8.of, search.Binary.of):
        with pytest.raises(UserError, match="not finite"):
            make(vectors)
    queries = search.Dense(np.ones((1, 8), np.float32))
    found = search.rescore(np.array([[0, 1, 2]]), queries, vectors, 3)[0]
    assert found.tolist() == [[0, 2, -1]]

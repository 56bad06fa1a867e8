# SPDX-License-Identifier: Apache-2.0
"""Metrics of search results, as trec_eval defines them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np


def recall_at_k(ranked: np.ndarray, relevant: np.ndarray, k: int) -> float:
    """Return the share of a query's relevant passages among the first k.

    ranked: the grades of the results, f64, best first; relevant: all of the query's
    grades above 0, in any order. It is trec_eval's recall_K, which BEIR reports.

    >>> recall_at_k(np.array([0.0, 1, 0]), relevant=np.ones(2), k=2)
    0.5
    """
    return float((ranked[:k] > 0).sum() / len(relevant))


def reciprocal_rank(ranked: np.ndarray, relevant: np.ndarray, k: int) -> float:
    """Return 1 / rank of the first relevant passage, 0 if none is among the first k.

    >>> reciprocal_rank(np.array([0.0, 1]), relevant=np.ones(1), k=10)
    0.5
    """
    hits = np.flatnonzero(ranked[:k] > 0)
    return 1 / (int(hits[0]) + 1) if len(hits) else 0.0


def ndcg_at_k(ranked: np.ndarray, relevant: np.ndarray, k: int) -> float:
    """Return the normalized discounted cumulative gain of the first k.

    It is trec_eval's ndcg_cut_K, BEIR's metric: the gain of a passage is its grade (not
    2^grade - 1), divided by log2(rank + 1); the best order of all of the query's
    passages scores 1 (Jarvelin and Kekalainen 2002).

    >>> ndcg_at_k(np.array([0.0, 1]), relevant=np.ones(1), k=10)
    0.6309297535714575
    """

    def gain(grades: np.ndarray) -> float:
        grades = np.maximum(grades[:k], 0)
        return float(grades @ (1 / np.log2(np.arange(len(grades)) + 2)))

    return gain(ranked) / gain(-np.sort(-relevant))


MEASURES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "ndcg@10": partial(ndcg_at_k, k=10),
    "mrr@10": partial(reciprocal_rank, k=10),
    **{f"recall@{k}": partial(recall_at_k, k=k) for k in (1, 5, 10, 100)},
}
DEEPEST = 100  # the lowest rank that any of them looks at


def measure(
    found: Sequence[np.ndarray],
    grades: Sequence[Mapping[int, int]],
    names: Sequence[str] = tuple(MEASURES),
) -> dict[str, np.ndarray]:
    """Compute metrics per query: {name of MEASURES: f64 [queries]}.

    found: the passages found for each query, best first, -1 for none. grades: per
    query, {passage: grade}, with at least one above 0.

    >>> measure([np.array([3, 7])], [{7: 1}], ["mrr@10"])
    {'mrr@10': array([0.5])}
    """
    queries = [
        (
            np.array([of.get(passage, 0) for passage in passages.tolist()], float),
            np.array([grade for grade in of.values() if grade > 0], float),
        )
        for passages, of in zip(found, grades, strict=True)
    ]
    return {name: np.array([MEASURES[name](*q) for q in queries]) for name in names}

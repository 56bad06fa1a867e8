# SPDX-License-Identifier: Apache-2.0
"""Exact search by inner products, and scores of what it finds.

numpy is the library: every passage is looked at, so nothing is approximate.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from bertjax.tasks.metrics import mrr, ndcg_at_k, recall_at_k

SCORES = 2**26  # looked at together, which bounds memory: 256 MiB
MEASURES: Mapping[str, Callable[..., float]] = {
    "ndcg@10": partial(ndcg_at_k, k=10),
    "mrr@10": partial(mrr, k=10),
    **{f"recall@{k}": partial(recall_at_k, k=k) for k in (1, 5, 10, 100)},
}
DEEPEST = 100  # of them


def search(
    queries: np.ndarray,
    passages: np.ndarray,
    k: int = DEEPEST,
    leave: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Return the k best passages of each query, best first: i64 [k] each.

    queries f32 [q, D], passages f32 [p, D]; the larger the inner product the better, of
    equals the earlier passage. leave: of each query a passage that is none of its
    results, or -1. What is no number is never found.

    >>> search(np.eye(2), np.array([[1.0, 0], [0, 1], [2, 0]]), k=2)[0].tolist()
    [2, 0]
    """
    found = []
    k = min(k, len(passages))
    block = max(1, SCORES // len(passages))
    for begin in range(0, len(queries), block):
        scores = queries[begin : begin + block] @ passages.T
        scores[np.isnan(scores)] = -np.inf
        if leave is not None:
            left = np.asarray(leave[begin : begin + block])
            rows = np.flatnonzero(left >= 0)
            scores[rows, left[rows]] = -np.inf
        least = np.partition(scores, len(passages) - k, axis=1)[:, len(passages) - k]
        for row, bound in zip(scores, least, strict=True):
            among = np.flatnonzero((row >= bound) & (row > -np.inf))
            found.append(among[np.argsort(-row[among], kind="stable")][:k])
    return found


def measure(
    found: Sequence[np.ndarray],
    grades: Sequence[Mapping[int, int]],
    names: Sequence[str] = tuple(MEASURES),
) -> dict[str, np.ndarray]:
    """Score what was found of each query: {name of MEASURES: f64 [queries]}.

    grades: of each query {passage: grade}, with an answer.

    >>> measure([np.array([3, 7])], [{7: 1}], ["mrr@10"])
    {'mrr@10': array([0.5])}
    """
    pairs = [*zip(found, grades, strict=True)]
    return {
        name: np.array([MEASURES[name]({0: f.tolist()}, {0: g}) for f, g in pairs])
        for name in names
    }

# SPDX-License-Identifier: Apache-2.0
"""Choose hard negatives: wrong passages that a search finds for a query."""

from collections.abc import Mapping, Sequence

import numpy as np


def choose_negatives(
    found: np.ndarray,
    scores: np.ndarray,
    grades: Sequence[Mapping[int, int]],
    passages: Sequence[str],
    count: int,
    margin: float,
) -> list[list[int]]:
    """Return up to `count` negatives per query, hardest first.

    found i64 [q, k], scores f32 [q, k]: the results of a search, best first, -1 for
    none. A passage that answers the query, or has the same text as one that does, is
    not a negative. Neither is a passage that scores more than s - margin |s|, where s
    is the lowest score of an answer among the results: it is often an unmarked answer
    (de Souza P. Moreira et al. 2024, arXiv 2407.15831, TopK-PercPos). A query without
    an answer among the results has no such bound.

    >>> found, scores = np.array([[4, 7, 2, 5]]), np.array([[1, 0.99, 0.8, 0.5]])
    >>> choose_negatives(found, scores, [{4: 1}], "abcdefgh", 2, margin=0.05)
    [[2, 5]]
    """
    out = []
    for numbers, values, of in zip(
        found.tolist(), scores.tolist(), grades, strict=True
    ):
        right = {passages[p] for p, grade in of.items() if grade > 0}
        at = [s for p, s in zip(numbers, values, strict=True) if of.get(p, 0) > 0]
        bound = min(at) - margin * abs(min(at)) if at else np.inf
        out.append(
            [
                p
                for p, s in zip(numbers, values, strict=True)
                if p >= 0 and s <= bound and passages[p] not in right
            ][:count]
        )
    return out

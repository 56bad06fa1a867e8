# SPDX-License-Identifier: Apache-2.0
"""Choose hard negatives: what a search finds for a query and is wrong."""

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
    """Return up to `count` negatives of each query, the hardest first.

    found i64 [q, k], scores f32 [q, k]: what a search finds, best first, -1 for none.
    What answers a query, or has the text of what does, is none; nor is what scores more
    than the least of the query's answers among these less the share `margin` of its
    size: often an answer that nobody has marked (de Souza P. Moreira et al. 2024, arXiv
    2407.15831, TopK-PercPos). A query without an answer among these has no bound.

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

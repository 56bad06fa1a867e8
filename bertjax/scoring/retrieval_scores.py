# SPDX-License-Identifier: Apache-2.0
"""How well a model's vectors find the passages that answer queries."""

from collections.abc import Callable
from typing import Any

import numpy as np

from bertjax.scoring.confidence import half_width
from bertjax.tasks import search


def score(
    model: Any, whole: Any, batch_size: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Return measures over queries, *_ci95 their intervals, and how many there are.

    model: an embed.Embedder; whole: a tasks.collection. Vectors are compared by their
    angle, or by inner products where the model was made for them.
    """
    texts = [*whole.queries, *whole.passages]
    vectors, cut = model.embed(texts, batch_size)
    if cut:
        say(f"{cut:,} texts cut at {model.how.longest} tokens")
    if not model.how.dot:
        sizes = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.maximum(sizes, 1e-12)
    queries, passages = np.split(vectors, [len(whole.queries)])
    ranked = search.search(queries, passages, leave=whole.own)
    # Queries with the same answer resemble each other: they are one draw.
    same = np.array([min(p for p in of if of[p] > 0) for of in whole.grades])
    values: dict[str, float] = {"queries": len(queries), "passages": len(passages)}
    for measure, each in search.measure(ranked, whole.grades).items():
        values[measure] = float(each.mean())
        width = half_width(each, np.ones_like(each), same)
        if width is not None:
            values[f"{measure}_ci95"] = width
    return values

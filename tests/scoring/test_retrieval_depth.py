# SPDX-License-Identifier: Apache-2.0
"""How many of the passages that a search finds a cross-encoder reranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.interop.sentence_transformers import Sentences
from bertjax.scoring import retrieval
from bertjax.tasks.passages import Collection
from bertjax.tasks.search import Dense


@pytest.mark.parametrize("depth, found", [(None, 0), (100, 0), (130, 1)])
def test_a_cross_encoder_orders_as_many_as_depth_says(depth, found, monkeypatch):
    n, answer = 150, 120  # passages in order of similarity; the right one
    vectors = np.arange(n, 0, -1, dtype=np.float32)[:, None]
    collection = Collection([""] * n, [""], [{answer: 1}], [-1])

    def make_index(texts, batch_size):
        return Dense(np.concatenate([vectors[:1], vectors])), 0

    config = SimpleNamespace(task=SimpleNamespace(widths=""))
    model = SimpleNamespace(
        how=Sentences(), config=config, make_index=make_index, meta={}
    )
    model.of_passages = lambda: model
    cross = SimpleNamespace(score=lambda q, p, pairs, size: pairs[:, 1] == answer)
    monkeypatch.setattr(retrieval.embed_texts, "open_embedder", lambda *args: model)
    monkeypatch.setattr(retrieval, "CrossEncoder", lambda *args: cross)
    monkeypatch.setattr(retrieval, "read_sets", lambda *args: {"x": collection})
    args = dict.fromkeys([*retrieval.FLAGS, "dtype", "weights", "batch_size"])
    args |= {"workdir": "", "model": "m", "rerank": "r", "depth": depth}
    scores = retrieval.score(SimpleNamespace(**args), "m", "--model").objects[0]
    assert scores["mrr@10"] == scores["recall@100"] == found


def test_scores_that_are_all_the_same_have_no_interval():
    collection = Collection([""] * 3, [""] * 3, [{0: 1}, {1: 1}, {2: 1}], [-1] * 3)
    found = np.array([[0, 1, 2], [1, 0, 2], [0, 1, 2]])
    scores = retrieval.measure(collection, found, True)
    assert scores["recall@1"] == pytest.approx(2 / 3) and scores["recall@1_ci95"] > 0
    assert scores["recall@5"] == 1 and "recall@5_ci95" not in scores

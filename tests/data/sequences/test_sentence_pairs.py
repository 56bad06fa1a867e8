# SPDX-License-Identifier: Apache-2.0
"""Why sentence order: topic predicts next-sentence labels, but not the order.

Lan et al. 2020 (ALBERT), section 3.1. A classifier on what two bags of words share is
well above chance for NSP and at chance for SOP.
"""

import numpy as np
import pytest
from host_half import make_half
from scipy import stats

from bertjax.data.batches import Batches
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.token_store.prepare_data import prepare_data

N = 4000


@pytest.fixture(scope="module")
def text(corpus, vocabulary, tmp_path_factory):
    """Return Python's help on its syntax, as a store."""
    prepared = prepare_data(
        train=str(corpus / "train.txt"), valid="", vocab=str(vocabulary),
        tokenizer_kind="", vocab_size=0, lower_case=None,
        cache=str(tmp_path_factory.mktemp("pairs")), workers=1, say=lambda _: None,
    )  # fmt: skip
    return prepared.tokenizer, prepared.parts["train"]


def draw(text, rule):
    """Return the rows' features and labels [N].

    Features [N, 3]: what the bags of A and B share; [N, 4]: the numbers of tokens of A
    and B, which predict the order slightly: the last sentence of a chunk exceeds its
    target, so that the second half is longer.
    """
    tokenizer, store = text
    plan = make_plan(store, "pairs", 128, 0, short_seq_prob=0.0, pair_rule=rule)
    made = Batches(
        (plan,), make_mixture({"train": plan.n}), make_half(rule, tokenizer, 128),
        tokenizer, N, 0,
    ).batch(0)  # fmt: skip
    ids, types = made["input_ids"], made["token_type_ids"]
    weight = np.log(len(store.tokens) / np.maximum(store.counts, 1))
    weight[tokenizer.special_ids] = 0
    bags = np.zeros((2, N, tokenizer.vocab_size))
    for part in (0, 1):
        row, column = np.nonzero((types == part) & (made["attention_mask"] > 0))
        bags[part, row, ids[row, column]] = 1
    bags *= np.sqrt(weight)
    a, b = bags
    shared = (a * b).sum(axis=1)
    size = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1)) + 1e-9
    topic = np.stack([shared / size, shared, np.ones(N)], axis=1)
    real = made["attention_mask"].sum(axis=1)
    b_size = made["token_type_ids"].sum(axis=1)
    a_size = real - b_size
    sizes = np.stack([a_size, b_size, a_size > b_size, np.ones(N)], axis=1)
    return topic, sizes.astype(float), made[f"{rule}_labels"]


def accuracy(features, labels):
    """Fit a logistic regression to one half by Newton's method; score the other."""
    half = N // 2
    x = features / np.abs(features).max(axis=0)
    w = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x[:half] @ w))
        slope = x[:half].T @ (labels[:half] - p) - 1e-3 * w
        curve = (x[:half] * (p * (1 - p))[:, None]).T @ x[:half]
        w += np.linalg.solve(curve + 1e-3 * np.eye(len(w)), slope)
    return float(((x[half:] @ w > 0) == labels[half:]).mean())


def is_chance(features, labels):
    right = round(accuracy(features, labels) * (N // 2))
    return stats.binomtest(right, N // 2, 0.5).pvalue > 1e-3


def test_topic_tells_next_sentences_and_not_their_order(text):
    topic, _, nsp = draw(text, "nsp")
    majority = max(nsp.mean(), 1 - nsp.mean())
    assert accuracy(topic, nsp) > majority + 0.15
    topic, sizes, sop = draw(text, "sop")
    assert is_chance(topic, sop)
    assert accuracy(sizes, sop) < 0.6
    assert stats.binomtest(int(sop.sum()), N, 0.5).pvalue > 1e-3

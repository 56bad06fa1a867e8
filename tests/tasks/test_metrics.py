# SPDX-License-Identifier: Apache-2.0
"""Metrics against hand cases and against scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bertjax.tasks.metrics import METRICS, f1, matthews, pearson, spearman

NUMBERS = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=3)


@given(NUMBERS)
def test_correlations_are_scipys(pairs):
    a, b = np.array(pairs, np.float64).T
    if len({*a}) == 1 or len({*b}) == 1:
        assert pearson(a, b) == spearman(a, b) == 0.0
        return
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b)[0], abs=1e-12)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b)[0], abs=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_two_classes(pairs):
    said, true = np.array(pairs, np.int64).T
    tp, fp = np.sum(said & true), np.sum(said & ~true & 1)
    fn, tn = np.sum(~said & true & 1), np.sum((said | true) == 0)
    assert f1(said, true) == pytest.approx(tp / max(tp + (fp + fn) / 2, 0.5))
    root = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    wanted = (tp * tn - fp * fn) / root if root else 0.0
    assert matthews(said, true) == pytest.approx(wanted, abs=1e-12)
    assert METRICS["accuracy"](said, true) == pytest.approx((tp + tn) / len(pairs))


def test_matthews_of_three_classes():
    """Worked by hand: 4 of 6 right, confusion rows (2,0,0), (0,1,1), (1,0,1)."""
    true = np.array([0, 0, 1, 1, 2, 2])
    said = np.array([0, 0, 1, 2, 0, 2])
    # c s - sum p_k t_k = 4 x 6 - 2 x (3 + 1 + 2) = 12; s^2 - sum p^2 = 22, t: 24
    assert matthews(said, true) == pytest.approx(12 / np.sqrt(22 * 24))

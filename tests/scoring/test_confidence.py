# SPDX-License-Identifier: Apache-2.0
"""Coverage of intervals, calibration by hand, characters of pieces."""

import types

import numpy as np
import pytest

from bertjax import UserError
from bertjax.scoring.confidence import BINS, Calibration, half_width
from bertjax.scoring.mlm_loss import count_characters


def test_intervals_over_documents_cover():
    """Rows of a document are correlated: an interval over rows would be too narrow."""
    rng = np.random.default_rng(0)
    covered = narrow = 0
    for _ in range(400):
        documents = np.repeat(np.arange(20), rng.integers(1, 9, 20))
        n = len(documents)
        weights = rng.integers(1, 20, n).astype(float)
        mean = 3.0 + rng.normal(0, 1, 20)[documents] + rng.normal(0, 0.3, n)
        found = abs((weights * mean).sum() / weights.sum() - 3.0)
        covered += found <= half_width(weights * mean, weights, documents)
        narrow += found <= half_width(weights * mean, weights, np.arange(n))
    assert 0.90 < covered / 400 < 0.98
    assert narrow / 400 < 0.85


def test_an_interval_by_hand():
    values, weights = np.array([1.0, 2.0, 6.0]), np.array([1.0, 1.0, 2.0])
    # The mean is 9/4; the documents' residuals are 3 - 2 * 9/4 and its negative.
    got = half_width(values, weights, np.array([5, 5, 9]))
    assert got == pytest.approx(12.706 * np.sqrt(2 * 2 * 1.5**2) / 4, rel=1e-4)
    assert half_width(values, weights, np.zeros(3)) is None
    assert half_width(values, np.array([1.0, 1.0, 0.0]), np.array([1, 1, 2])) is None


def test_calibration_by_hand():
    made = Calibration()
    assert made.error() == 0
    sure = np.array([[0.95, 0.95], [0.35, 1.0]])
    right = np.array([[True, False], [False, True]])
    made.add(sure, right, np.array([[1.0, 1.0], [2.0, 0.0]]))
    # Two guesses at 0.95, one right: off by 0.45. Two at 0.35, none right. One has
    # weight 0.
    assert made.error() == pytest.approx((2 * 0.45 + 2 * 0.35) / 4)
    made.add(np.ones(4), np.ones(4, bool), np.ones(4))
    assert made.error() == pytest.approx((abs(5 - 5.9) + 2 * 0.35) / 8)
    assert made.sums.shape == (3, BINS)
    with pytest.raises(UserError, match="not finite"):
        made.add(np.array([0.5, np.nan]), np.ones(2, bool), np.ones(2))


@pytest.mark.parametrize(
    "kind, pieces, counts",
    [
        ("wordpiece", ["[PAD]", "una", "##ffa", "#", "\u00e9"], [0, 3, 3, 1, 1]),
        (
            "byte_bpe",
            ["<pad>", "\u0120a", "\u010a", "\u00c3", "\u00a9b"],
            [0, 1, 0, 1, 1],
        ),
        (
            "unigram",
            ["<pad>", "\u2581the", "\u2581", "<0xC3>", "<0xA9>"],
            [0, 3, 0, 1, 0],
        ),
    ],
)
def test_characters_of_pieces(kind, pieces, counts):
    tokenizer = types.SimpleNamespace(kind=kind, pieces=pieces, special_ids=[0])
    assert count_characters(tokenizer).tolist() == counts
    assert count_characters(types.SimpleNamespace(kind="ids")) is None

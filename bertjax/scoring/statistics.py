# SPDX-License-Identifier: Apache-2.0
"""How sure a mean is, and how far probabilities can be believed."""

import math

import numpy as np

from bertjax import UserError

BINS = 15


def half_width(
    values: np.ndarray, weights: np.ndarray, groups: np.ndarray, level: float = 0.95
) -> float | None:
    """Return the half-width of the confidence interval of sum(values) / sum(weights).

    values, weights: f64 [n], sums over rows; groups: i64 [n], the documents they are
    of. Documents are the draws: rows of one resemble each other. The normal
    approximation of a ratio of sums (Cochran 1977, Sampling Techniques, on ratio
    estimators), with Student's t for few documents; no resampling, since nothing here
    is as skewed as to need it, and so nothing is drawn. None for fewer than two
    documents.
    """
    from scipy.special import stdtrit

    _, at = np.unique(groups, return_inverse=True)
    value, weight = np.bincount(at, values), np.bincount(at, weights)
    value, weight = value[weight > 0], weight[weight > 0]
    n = len(value)
    if n < 2:
        return None
    rest = value - value.sum() / weight.sum() * weight
    error = math.sqrt(n / (n - 1) * np.square(rest).sum()) / weight.sum()
    return float(error * stdtrit(n - 1, (1 + level) / 2))


class Calibration:
    """Compares how sure guesses are with how often they are right.

    The expected calibration error over bins of equal width (Guo et al. 2017): the mean
    over guesses of |accuracy - confidence| of their bin.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, BINS))  # weight, confidence, right guesses

    def add(
        self, confidence: np.ndarray, right: np.ndarray, weight: np.ndarray
    ) -> None:
        """Count guesses: f64 in [0, 1], bool, f64, all of one shape.

        Raises UserError for what is no number: the model's parameters are broken.
        """
        if not np.isfinite(confidence).all():
            raise UserError("the model's probabilities are not finite (NaN)")
        at = np.minimum((confidence * BINS).astype(np.int64), BINS - 1).ravel()
        for row, each in zip(
            self.sums, (weight, weight * confidence, weight * right), strict=True
        ):
            row += np.bincount(at, each.ravel(), BINS)

    def error(self) -> float:
        """Return the expected calibration error; 0 without guesses."""
        weight, confidence, right = self.sums
        return float(np.abs(right - confidence).sum() / max(weight.sum(), 1e-300))

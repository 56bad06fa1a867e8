# SPDX-License-Identifier: Apache-2.0
"""Compute confidence intervals of means and correlations, and calibration errors."""

import math
from collections.abc import Callable

import numpy as np

from bertjax import UserError

BINS = 15


def half_width(
    values: np.ndarray, weights: np.ndarray, groups: np.ndarray
) -> float | None:
    """Return the half-width of the 95% interval of sum(values) / sum(weights).

    values, weights: f64 [n], sums over rows; groups: i64 [n], the documents of the
    rows. Documents are the independent draws, because rows of one document resemble
    each other. It uses the normal approximation of a ratio of sums (Cochran 1977,
    Sampling Techniques, on ratio estimators), with Student's t for few documents.
    Nothing here is so skewed that it needs resampling, so no random numbers are needed.
    None for fewer than two documents.
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
    return float(error * stdtrit(n - 1, 0.975))


def interval(name: str, width: float | None) -> dict[str, float]:
    """Return the entry NAME_ci95 of results, none if the half-width is not known."""
    return {} if width is None else {f"{name}_ci95": width}


def correlation_half_width(a: np.ndarray, b: np.ndarray, ranked: bool) -> float | None:
    """Return the half-width of the 95% confidence interval of a correlation.

    a, b: f64 [n], pairs that are independent draws. ranked: Spearman's, otherwise
    Pearson's. Like `half_width` it linearizes, by each pair's influence on the
    correlation (Devlin, Gnanadesikan and Kettenring 1975); for ranks that includes the
    pair's effect on the others' ranks. None if there is no correlation.
    """
    if len(a) < 2 or not np.ptp(a) or not np.ptp(b):
        return None
    if ranked:
        (a, push_a), (b, push_b) = map(_shares_below, (a, b))
    u, v = ((x - x.mean()) / x.std() for x in (a, b))
    r = np.mean(u * v)
    influence = u * v - r * (u * u + v * v) / 2
    if ranked:
        influence += push_a(v - r * u) / a.std() + push_b(u - r * v) / b.std()
    return half_width(influence, np.ones_like(influence), np.arange(len(influence)))


def _shares_below(x: np.ndarray) -> tuple[np.ndarray, Callable]:
    """Return the share of values below each value, and a function `push`.

    Equal values count half. push(g), of f64 [n], returns for each value the mean of g
    over all values above it, with half of g for equal values: how much the sum of g
    times the shares grows with that value.
    """
    _, at, count = np.unique(x, return_inverse=True, return_counts=True)
    shares = (np.cumsum(count) - count / 2)[at] / len(x)

    def push(g: np.ndarray) -> np.ndarray:
        own = np.bincount(at, g)
        return (own.sum() - np.cumsum(own) + own / 2)[at] / len(x)

    return shares, push


class Calibration:
    """Compare the confidence of guesses with how often they are right.

    It computes the expected calibration error over bins of equal width (Guo et al.
    2017): the mean over guesses of |accuracy - confidence| of their bin.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, BINS))  # weight, confidence, right guesses

    def add(
        self, confidence: np.ndarray, right: np.ndarray, weight: np.ndarray
    ) -> None:
        """Count guesses: f64 in [0, 1], bool, f64, all of one shape.

        Raises UserError for NaN, which shows that the model's parameters are broken.
        """
        if not np.isfinite(confidence).all():
            raise UserError("the model's probabilities are not finite (NaN)")
        at = np.minimum((confidence * BINS).astype(np.int64), BINS - 1).ravel()
        each = weight, weight * confidence, weight * right
        self.sums += [np.bincount(at, one.ravel(), BINS) for one in each]

    def error(self) -> float:
        """Return the expected calibration error; 0 without guesses."""
        weight, confidence, right = self.sums
        return float(np.abs(right - confidence).sum() / max(weight.sum(), 1e-300))

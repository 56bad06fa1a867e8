# SPDX-License-Identifier: Apache-2.0
"""Metrics of whole evaluation sets, on the host."""

from collections.abc import Callable, Mapping

import numpy as np


def accuracy(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the share of right classes, both i64 [n]."""
    return float(np.mean(predicted == gold))


def f1(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return F1 of class 1, i64 [n]; 0 where nobody says 1 (GLUE's MRPC, QQP)."""
    right = np.sum((predicted == 1) & (gold == 1))
    both = np.sum(predicted == 1) + np.sum(gold == 1)
    return float(2 * right / both) if both else 0.0


def matthews(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return Matthews' correlation of classes i64 [n], any number of them.

    Gorodkin 2004's R_K: the correlation of the indicators. 0 where one side is
    constant, which tells nothing.
    """
    classes = np.union1d(predicted, gold)
    a, b = (x[:, None] == classes for x in (predicted, gold))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale else 0.0


def pearson(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the correlation of f64 [n]; 0 where one side is constant."""
    a, b = (x - x.mean() for x in (np.float64(predicted), np.float64(gold)))
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale else 0.0


def spearman(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the correlation of the ranks; equal values share their mean rank."""

    def ranks(x: np.ndarray) -> np.ndarray:
        _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[which]

    return pearson(ranks(predicted), ranks(gold))


METRICS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}

# SPDX-License-Identifier: Apache-2.0
"""Pruning by SparseGPT, Wanda or magnitude: a share of all weights, or 2 of 4.

These are pure functions of weights [in, out] and of the Hessian [in, in] of their
inputs. All return the pruned weights, f32 [in, out], with 0 for removed ones.
"""

from typing import NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.compression.columns import (
    BLOCK,
    Round,
    inverse_factor,
    sweep,
    without_dead,
)


class Pattern(NamedTuple):
    """The weights to remove: a share of all, or n of each group of m inputs.

    share: 0 < share < 1; group: m, or 0 without groups; removed: n.
    """

    share: float
    group: int = 0
    removed: int = 0

    def __str__(self) -> str:
        return f"{self.removed}:{self.group}" if self.group else f"{self.share:g}"


def read_pattern(text: str) -> Pattern:
    """Parse --sparsity, such as 0.5 or 2:4. Raises UserError for other values.

    >>> read_pattern("2:4")
    Pattern(share=0.5, group=4, removed=2)
    """
    if text == "2:4":
        return Pattern(0.5, 4, 2)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(f"--sparsity={text}: give a share between 0 and 1, or 2:4")
    return Pattern(share)


def least(scores: np.ndarray, share: float) -> np.ndarray:
    """Mark the given share of the lowest scores: bool, in the shape of `scores`.

    Their number is always round(share x size); of equal scores the first ones are
    marked. (IST-DASLab/sparsegpt marks all up to the score at index int(size x share),
    which is one more than the share, and even more if scores are equal.)
    """
    flat = scores.reshape(-1)
    count = round(share * flat.size)
    marked = np.zeros(flat.size, bool)
    if count:
        limit = np.partition(flat, count - 1)[count - 1]
        marked = flat < limit
        equal = np.flatnonzero(flat == limit)
        marked[equal[: count - int(marked.sum())]] = True
    return marked.reshape(scores.shape)


def least_of_groups(scores: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Mark the lowest `pattern.removed` scores of each group of inputs: [in, out]."""
    groups = scores.reshape(-1, pattern.group, scores.shape[1])
    order = np.argsort(groups, axis=1, kind="stable")[:, : pattern.removed]
    marked = np.zeros(groups.shape, bool)
    np.put_along_axis(marked, order, True, axis=1)
    return marked.reshape(scores.shape)


def magnitude(weights: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Remove the smallest weights of the matrix, or of each group."""
    scores = np.abs(weights)
    if pattern.group:
        marked = least_of_groups(scores, pattern)
    else:
        marked = least(scores, pattern.share)
    return np.where(marked, 0, weights).astype(np.float32)


def wanda(weights: np.ndarray, hessian: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Remove the weights with the smallest |w| ||x|| of each output.

    The other weights do not change (Wanda: Sun et al. 2024, arXiv 2306.11695, equation
    1).
    """
    norms = np.sqrt(np.diag(hessian)).astype(np.float32)
    scores = np.abs(weights) * norms[:, None]
    if not pattern.group:  # all inputs are one group
        n = len(weights)
        pattern = Pattern(pattern.share, n, round(pattern.share * n))
    marked = least_of_groups(scores, pattern)
    return np.where(marked, 0, weights).astype(np.float32)


def sparsegpt(weights: np.ndarray, hessian: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Remove weights, and compensate for them with later inputs' weights.

    (SparseGPT: Frantar and Alistarh 2023, arXiv 2301.00774, algorithm 1.) The scores
    are w^2 / U_ii^2. With a share, exactly that share of each block of 128 inputs is
    removed, selected when the sweep arrives there. With groups, the weights of a group
    are selected when the sweep reaches it.
    """
    pruned = without_dead(weights, hessian)
    factor = inverse_factor(hessian)
    scales = np.diag(factor)[:, None]

    def begin(current: np.ndarray, first: int, last: int) -> Round:
        marked = np.zeros((last - first, current.shape[1]), bool)
        if not pattern.group:
            scores = (current[first:last] / scales[first:last]) ** 2
            marked[:] = least(scores, pattern.share)

        def round_input(i: int) -> np.ndarray:
            if pattern.group and i % pattern.group == 0:
                end = i + pattern.group
                scores = (current[i:end] / scales[i:end]) ** 2
                marked[i - first : end - first] = least_of_groups(scores, pattern)
            return np.where(marked[i - first], np.float32(0), current[i])

        return round_input

    sweep(pruned, factor, begin, list(range(0, len(pruned), BLOCK)))
    return pruned

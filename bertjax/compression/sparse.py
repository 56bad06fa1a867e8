# SPDX-License-Identifier: Apache-2.0
"""Pruning: SparseGPT, Wanda, magnitude; a share of all weights, or 2 of 4.

Pure functions of weights [in, out] and of the Hessian [in, in] of their inputs. All
return the pruned weights, f32 [in, out], removed ones being 0.
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
    """What is removed: a share of the weights, or n of each group of m inputs.

    share: 0 < share < 1; group: m, or 0, without groups; removed: n.
    """

    share: float
    group: int = 0
    removed: int = 0

    def __str__(self) -> str:
        return f"{self.removed}:{self.group}" if self.group else f"{self.share:g}"


def read_pattern(text: str) -> Pattern:
    """Read 0.5, or 2:4. Raises UserError.

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

    Their number is round(share x size), whatever is equal: of equal scores those that
    stand first are marked. (IST-DASLab/sparsegpt marks all up to the score at index
    int(size x share), one more than the share, and more where scores are equal.)
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
    """Remove the smallest weights of the matrix (of each group)."""
    scores = np.abs(weights)
    if pattern.group:
        marked = least_of_groups(scores, pattern)
    else:
        marked = least(scores, pattern.share)
    return np.where(marked, 0, weights).astype(np.float32)


def wanda(weights: np.ndarray, hessian: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Remove of each output the weights with the smallest |w| ||x|| (Sun et al. 2024,
    arXiv 2306.11695, equation 1); the others stay as they are."""
    norms = np.sqrt(np.diag(hessian)).astype(np.float32)
    scores = np.abs(weights) * norms[:, None]
    if not pattern.group:  # all inputs are one
        n = len(weights)
        pattern = Pattern(pattern.share, n, round(pattern.share * n))
    marked = least_of_groups(scores, pattern)
    return np.where(marked, 0, weights).astype(np.float32)


def sparsegpt(weights: np.ndarray, hessian: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Remove weights and let the others make good for them (Frantar and Alistarh 2023,
    arXiv 2301.00774, algorithm 1).

    The scores are w^2 / U_ii^2. Of a share, each block of 128 inputs loses exactly it,
    chosen when the sweep arrives there; of groups, each is chosen when it is reached.
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

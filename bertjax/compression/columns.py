# SPDX-License-Identifier: Apache-2.0
"""The sweep that SparseGPT and GPTQ share: inputs one by one, errors passed on.

Optimal brain surgery (Hassibi and Stork 1993) for a product x W whose inputs have the
Hessian H = E[x x^T]: what rounding or removing the weights of one input does to the
outputs, the weights of later inputs make good (Frantar and Alistarh 2023, SparseGPT,
section 3; Frantar et al. 2023, GPTQ, section 3). Weights are [in, out] here, as kernels
are; the papers' and PyTorch's are [out, in], so that their columns are rows of these.
"""

from collections.abc import Callable

import numpy as np
from scipy.linalg import cholesky, lapack

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
BLOCK = 128  # inputs between two updates of all that follow

# (weights [in, out], first, last) -> what rounds the inputs [first, last): a function
# of an input's number that returns the weights it is to have, [out]. It reads the
# weights as the inputs before have left them.
Round = Callable[[int], np.ndarray]
BeginBlock = Callable[[np.ndarray, int, int], Round]


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Return the upper triangular U with U^T U = (H + damping)^-1: f32 [in, in].

    hessian: [in, in], of any scale; an input that was never active has a zero on its
    diagonal, which counts as 1. In float64, and without the inverse itself: of the
    Cholesky factor R R^T = H, R upper triangular, U is the inverse. Raises
    numpy.linalg.LinAlgError where H is not positive definite or not finite.
    """
    # In reverse order; in memory as LAPACK has it, which works in place then.
    h = np.array(hessian[::-1, ::-1], np.float64, order="F")
    diagonal = np.einsum("ii->i", h)
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    if not np.isfinite(diagonal).all():
        raise np.linalg.LinAlgError("the Hessian is not finite")
    # The lower factor of that, in reverse order again, is R.
    lower = cholesky(h, lower=True, overwrite_a=True, check_finite=False)
    inverse, info = lapack.dtrtri(lower, lower=1, overwrite_c=1)
    if info:
        raise np.linalg.LinAlgError("the Hessian has no inverse")
    return np.ascontiguousarray(inverse[::-1, ::-1], np.float32)


def without_dead(weights: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return a copy, f32, with zeros for the inputs that were never active."""
    alive = np.diag(hessian) != 0
    return np.asarray(weights, np.float32) * alive[:, None].astype(np.float32)


def sweep(
    weights: np.ndarray, factor: np.ndarray, begin: BeginBlock, edges: list[int]
) -> None:
    """Round all inputs of `weights`, f32 [in, out], in place.

    factor: of inverse_factor. edges: where blocks begin; within one each input's error
    is passed on at once, to what follows the block when it ends, so that other edges
    change no result, but for float rounding and what `begin` reads of later weights.
    """
    for first, last in zip(edges, [*edges[1:], len(weights)], strict=True):
        errors = np.empty((last - first, weights.shape[1]), np.float32)
        round_input = begin(weights, first, last)
        for i in range(first, last):
            rounded = round_input(i)
            error = errors[i - first]
            np.subtract(weights[i], rounded, out=error)
            error /= factor[i, i]
            weights[i] = rounded
            weights[i + 1 : last] -= factor[i, i + 1 : last, None] * error
        weights[last:] -= factor[first:last, last:].T @ errors

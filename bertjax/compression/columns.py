# SPDX-License-Identifier: Apache-2.0
"""The sweep over inputs that SparseGPT and GPTQ share, with error compensation.

It is Optimal Brain Surgeon (Hassibi and Stork 1993) for a product x W whose inputs have
the Hessian H = E[x x^T]. The weights of one input after the other are rounded or
removed, and the weights of later inputs are changed to compensate for the error in the
outputs (Frantar and Alistarh 2023, SparseGPT, section 3; Frantar et al. 2023, GPTQ,
section 3). Weights are [in, out] here, like kernels; those of the papers and of PyTorch
are [out, in], so their columns are our rows.
"""

from collections.abc import Callable

import numpy as np
from scipy.linalg import cholesky, lapack

DAMPING = 0.01  # this fraction of the mean of the Hessian's diagonal is added to it
BLOCK = 128  # inputs between two updates of all later weights

# BeginBlock(weights [in, out], first, last) returns the Round for the inputs [first,
# last). Round(i) returns the new weights of input i, [out]. It reads the weights as
# they are after the earlier inputs.
Round = Callable[[int], np.ndarray]
BeginBlock = Callable[[np.ndarray, int, int], Round]


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Return the upper triangular U with U^T U = (H + damping)^-1: f32 [in, in].

    hessian: [in, in], of any scale. An input that was never active has a zero on the
    diagonal, and counts as 0 in the mean for the damping, so that the result does not
    depend on the scale (the official codes count it as 1). It is computed in float64,
    without (H + damping)^-1: U is the inverse of the Cholesky factor R, R upper
    triangular with R R^T = H + damping. Raises numpy.linalg.LinAlgError if H is not
    positive definite or not finite.
    """
    # Reverse the order, and use LAPACK's memory layout, so that it works in place.
    h = np.array(hessian[::-1, ::-1], np.float64, order="F")
    diagonal = np.einsum("ii->i", h)
    dead = diagonal == 0
    diagonal += DAMPING * diagonal.mean()
    diagonal[dead] = 1.0  # any number will do: the rest of the row is 0
    if not np.isfinite(diagonal).all():
        raise np.linalg.LinAlgError("the Hessian is not finite")
    # Its lower factor, in reverse order again, is R.
    lower = cholesky(h, lower=True, overwrite_a=True, check_finite=False)
    inverse, info = lapack.dtrtri(lower, lower=1, overwrite_c=1)
    if info:
        raise np.linalg.LinAlgError("the Hessian has no inverse")
    return np.ascontiguousarray(inverse[::-1, ::-1], np.float32)


def without_dead(weights: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return an f32 copy with zero weights for inputs that were never active."""
    alive = np.diag(hessian) != 0
    return np.asarray(weights, np.float32) * alive[:, None].astype(np.float32)


def sweep(
    weights: np.ndarray, factor: np.ndarray, begin: BeginBlock, edges: list[int]
) -> None:
    """Round (or prune) all inputs of `weights`, f32 [in, out], in place.

    factor: from inverse_factor. edges: the first inputs of blocks. An input's error
    changes the later weights of its block at once, and those after the block when the
    block ends. So other edges change no result, except for float rounding and for what
    `begin` reads of later weights.
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

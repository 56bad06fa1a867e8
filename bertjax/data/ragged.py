# SPDX-License-Identifier: Apache-2.0
"""Arrays that concatenate runs of different sizes."""

import numpy as np


def ramps(size: np.ndarray) -> np.ndarray:
    """Count 0, 1, ... within runs of these sizes, i64 [sum of sizes].

    >>> ramps(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)

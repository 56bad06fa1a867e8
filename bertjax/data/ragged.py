# SPDX-License-Identifier: Apache-2.0
"""Arrays that hold stretches of unlike sizes, one after the other."""

import numpy as np


def ramps(size: np.ndarray) -> np.ndarray:
    """Count 0, 1, ... within each of the stretches of these sizes, i64 [their sum].

    >>> ramps(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)

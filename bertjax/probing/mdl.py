# SPDX-License-Identifier: Apache-2.0
"""How many bits labels take by the online code, and labels that mean nothing."""

import hashlib

import numpy as np

from bertjax.data import counter_rng

# Those of Voita and Titov 2020: what of the rows each probe has learned from.
SHARES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)


def portions(n: int) -> np.ndarray:
    """Return (rows learned, end of the rows coded next): i32 [amounts, 2].

    The last learns all n and codes nothing. Shares of few rows that are the same
    number of rows are one.

    >>> portions(40).tolist()
    [[1, 3], [3, 5], [5, 10], [10, 20], [20, 40], [40, 40]]
    """
    ends = sorted({max(1, round(share * n)) for share in SHARES})
    return np.array(list(zip(ends, [*ends[1:], n], strict=True)), np.int32)


def uniform_bits(n: int, classes: int) -> float:
    """Return what n labels take where each class is as likely."""
    return float(n * np.log2(classes))


def frequency_bits(labels: np.ndarray) -> float:
    """Return what labels i32 [n] take where their frequencies alone are known.

    >>> frequency_bits(np.array([0, 0, 0, 1, 2, 2, 2, 1]))
    12.490224995673063
    """
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    return float(-counts @ np.log2(counts / counts.sum()))


def online_bits(bits: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Return the length of the online code (Voita and Titov 2020).

    bits: [amounts, ...] of the rows from counts[i, 0] to counts[i, 1] under a probe of
    those before. The first rows, which no probe has seen, cost log2(classes) each.
    """
    first = uniform_bits(int(counts[0, 0]), classes)
    return first + np.asarray(bits, np.float64).sum(0)


def text_types(texts: list[np.ndarray]) -> np.ndarray:
    """Number what rows are, the same for the same ids: u64 [n].

    texts: for each row its ids, of both texts.
    """
    return np.array(
        [
            int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
            for ids in texts
        ],
        np.uint64,
    )


def control_labels(
    types: np.ndarray, labels: np.ndarray, seed: int, draw: int
) -> np.ndarray:
    """Draw a control task's labels (Hewitt and Liang 2019): i32 [n].

    A label depends on the input's type alone and means nothing. Its distribution is
    that of `labels`.
    """
    keys = counter_rng.fold(seed, "control", draw, types)
    return labels[counter_rng.below(keys, 0, len(labels))]

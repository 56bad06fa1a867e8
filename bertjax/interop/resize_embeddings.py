# SPDX-License-Identifier: Apache-2.0
"""Add rows of parameters for new pieces of a vocabulary, and drop padding rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.interop.tensor_layout import unflatten, walk

ROWS = ("embeddings/word", "mlm/bias", "mlm/decoder")  # leaves [V, ...]


def grow_rows(
    params: Mapping[str, Any], pieces: int, origins: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return parameters in which new pieces are the means of their old pieces.

    params: our tree, with leaves [V, ...], V >= `pieces`, the size of the old
    vocabulary; padding rows are used first. origins: the old ids of each new piece,
    whose own ids begin at `pieces`.
    """
    leaves = dict(walk(params))
    for path, leaf in leaves.items():
        if path.endswith(ROWS):
            new = [leaf[np.array(i)].mean(axis=0, dtype=np.float64) for i in origins]
            old, rest = leaf[:pieces], leaf[pieces + len(new) :]
            leaves[path] = np.concatenate([old, np.asarray(new, leaf.dtype), rest])
    return unflatten(leaves.items())


def drop_rows(params: Mapping[str, Any], pieces: int) -> dict[str, Any]:
    """Return parameters without the rows from `pieces` on in leaves [V, ...]."""
    leaves = walk(params)
    return unflatten((p, x[:pieces] if p.endswith(ROWS) else x) for p, x in leaves)

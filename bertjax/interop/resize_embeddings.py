# SPDX-License-Identifier: Apache-2.0
"""Rows of parameters for the pieces of a vocabulary: new ones, and none for padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.interop.tensor_layout import unflatten, walk

ROWS = ("embeddings/word", "mlm/bias", "mlm/decoder")  # leaves [V, ...]


def grow_rows(
    params: Mapping[str, Any], pieces: int, origins: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return parameters in which new pieces are the means of their old ones.

    params: our tree, its leaves [V, ...] with V >= `pieces`, the vocabulary until now;
    rows of padding are used first. origins: old ids of the new pieces, whose ids begin
    at `pieces`.
    """
    leaves = dict(walk(params))
    for path, leaf in leaves.items():
        if path.endswith(ROWS):
            new = [leaf[np.array(i)].mean(axis=0, dtype=np.float64) for i in origins]
            old, rest = leaf[:pieces], leaf[pieces + len(new) :]
            leaves[path] = np.concatenate([old, np.asarray(new, leaf.dtype), rest])
    return unflatten(leaves.items())


def drop_rows(params: Mapping[str, Any], pieces: int) -> dict[str, Any]:
    """Return parameters without the rows of leaves [V, ...] from `pieces` on."""
    leaves = walk(params)
    return unflatten((p, x[:pieces] if p.endswith(ROWS) else x) for p, x in leaves)

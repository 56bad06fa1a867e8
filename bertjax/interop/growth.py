# SPDX-License-Identifier: Apache-2.0
"""New rows of parameters for new pieces of a vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.interop.layout import put, walk

ROWS = ("embeddings/word", "mlm/bias", "mlm/decoder")  # leaves [V, ...]


def grow_rows(
    params: Mapping[str, Any], pieces: int, origins: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return parameters in which new pieces are the means of their old ones.

    params: our tree, its leaves [V, ...] with V >= `pieces`, the vocabulary until now;
    rows of padding are used first. origins: old ids of the new pieces, whose ids begin
    at `pieces`.
    """
    grown: dict[str, Any] = {}
    for path, leaf in walk(params):
        if path.endswith(ROWS):
            new = [
                leaf[np.array(ids)].mean(axis=0, dtype=np.float64) for ids in origins
            ]
            rest = leaf[pieces + len(new) :]
            old = leaf[:pieces]
            leaf = np.concatenate([old, np.asarray(new, leaf.dtype), rest])
        put(grown, path, leaf)
    return grown

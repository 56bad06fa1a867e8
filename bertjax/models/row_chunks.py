# SPDX-License-Identifier: Apache-2.0
"""Work on a batch part by part, so that memory holds one part's activations."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.parallel.sharding import size_along


def map_rows(function: Callable[..., Any], chunks: int, batch: Any) -> Any:
    """Run function(rows, number of the chunk) on `chunks` parts of a batch, in turn.

    batch: a tree of arrays [B, ...]; function: row by row, to a tree of arrays
    [B / chunks, ...]. Returns what it returns, [B, ...]. A gradient runs each part
    again, so that nothing but the results is kept of all parts (GradCache: Gao et al.
    2021, arXiv 2101.06983). Part i has every chunks-th row: rows stay on their device.
    Raises ValueError where `chunks` does not divide B.
    """
    if chunks == 1:
        return function(batch, 0)

    def part(x: jax.Array) -> jax.Array:
        if len(x) % chunks:
            raise ValueError(f"{len(x)} rows are not {chunks} equal parts")
        return x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    parts = jax.tree.map(part, batch), jnp.arange(chunks)
    one = jax.checkpoint(function, prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(lambda rows: one(*rows), parts))


def count_row_chunks(rows: int, floats_a_row: int, megabytes: int) -> int:
    """Return how many parts a batch is worked on in, a divisor of a device's rows.

    A part of a device has at most so many megabytes in f32, where rows can be parted so
    far; 0: whatever it takes.
    """
    if not megabytes:
        return 1
    own = max(1, rows // size_along("batch"))
    wanted = max(1, math.ceil(4 * own * floats_a_row / (megabytes * 2**20)))
    return next((n for n in range(wanted, own) if own % n == 0), own)

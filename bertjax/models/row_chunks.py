# SPDX-License-Identifier: Apache-2.0
"""Process a batch in chunks, so that memory holds the activations of one chunk only."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.parallel.sharding import size_along


def map_rows(function: Callable[..., Any], chunks: int, batch: Any) -> Any:
    """Run function(rows, number of the chunk) on each chunk of a batch in turn.

    batch: a tree of arrays [B, ...]; function: maps each row independently, and returns
    a tree of arrays [B / chunks, ...]. Returns the joined results, [B, ...]. The
    backward pass runs each chunk again, so only the results of all chunks are stored
    (GradCache: Gao et al. 2021, arXiv 2101.06983). A chunk has every chunks-th row, so
    rows stay on their device. Raises ValueError if `chunks` does not divide B.
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
    """Return the number of chunks for a batch, a divisor of the rows per device.

    A device's part of a chunk takes at most `megabytes` in f32, unless a single row
    takes more. megabytes=0: one chunk.
    """
    if not megabytes:
        return 1
    own = max(1, rows // size_along("batch"))
    wanted = max(1, math.ceil(4 * own * floats_a_row / (megabytes * 2**20)))
    return next((n for n in range(wanted, own) if own % n == 0), own)

# SPDX-License-Identifier: Apache-2.0
"""Exact maximum inner product search in a table whose rows are sharded over devices.

A device scores its own rows tile by tile and keeps the k best; the k best of every
device are then merged. Of rows with equal scores the earlier one comes first. Rows that
pad the last part, and rows with NaN scores, are never found.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.parallel.sharding import index_along, per_device, size_along

TILE = 2**14  # the number of a device's rows that are scored at once
NONE = np.iinfo(np.int32).max  # stands for "no row"; larger than all row numbers


def split_rows(n: int, parts: int) -> tuple[int, int]:
    """Return the rows per device and the rows per tile, for n rows on `parts` devices.

    The rows per device are a multiple of the rows per tile.
    """
    share = -(-n // parts)
    tile = min(TILE, max(1, share))
    return -(-share // tile) * tile, tile


def nearest(
    table: jax.Array, queries: jax.Array, n: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return each query's k best rows, best first: numbers i32, scores f32 [B, k].

    table: f32 [N, D], sharded over the mesh's "batch" and padded (`split_rows`); its
    first n rows are searched. queries: f32 [B, D]. If fewer than k rows are found, the
    other numbers are NONE and their scores -inf. No gradient flows through this.
    """
    table, queries = map(jax.lax.stop_gradient, (table, queries))
    tile = split_rows(n, size_along("batch"))[1]

    def local(own: jax.Array, queries: jax.Array) -> Any:
        first = jnp.int32(index_along("batch") * len(own))
        return search_part(own, queries, first, n, k, tile)

    run = per_device(local, ["batch _", "_ _"], "_ batch")
    numbers, scores = run(table, queries)
    return take_best(numbers, scores, k)


def search_part(
    own: jax.Array,
    queries: jax.Array,
    first: jax.Array,
    n: int,
    k: int,
    tile: int,
    left: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the k best rows of a part of a table: numbers i32, scores f32 [q, k].

    own: f32 [rows, D], rows a multiple of `tile`; first: the number of its first row,
    i32 []. left: a row that each query skips, i32 [q], -1 for none.
    """

    def step(best: Any, i: jax.Array) -> tuple[Any, None]:
        part = jax.lax.dynamic_slice_in_dim(own, i * tile, tile)
        precise = jax.lax.Precision.HIGHEST
        scores = jnp.matmul(queries, part.T, precision=precise)
        numbers = first + i * tile + jnp.arange(tile, dtype=jnp.int32)
        hidden = (numbers >= n) | jnp.isnan(scores)
        if left is not None:
            hidden = hidden | (numbers == left[:, None])
        scores = jnp.where(hidden, -jnp.inf, scores)
        numbers = jnp.where(hidden, NONE, numbers)
        numbers = jnp.concatenate([best[0], numbers], axis=1)
        scores = jnp.concatenate([best[1], scores], axis=1)
        return take_best(numbers, scores, k), None

    # Adding 0 * first marks these as varying between devices, as shard_map requires of
    # a loop's initial values if its results vary.
    none = jnp.full((len(queries), k), NONE, jnp.int32) + 0 * first
    start = none, jnp.full(none.shape, -jnp.inf) + 0 * first.astype(jnp.float32)
    best, _ = jax.lax.scan(step, start, jnp.arange(len(own) // tile))
    return best


def take_best(
    numbers: jax.Array, scores: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return the k best of each row, preferring smaller numbers if scores are equal.

    Columns with equal scores must be in the order of their numbers, because lax.top_k
    prefers the first of equals.
    """
    values, at = jax.lax.top_k(scores, k)
    return jnp.take_along_axis(numbers, at, axis=1), values

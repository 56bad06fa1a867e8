# SPDX-License-Identifier: Apache-2.0
"""The vectors with the largest inner products, of a table whose rows devices share.

A device scores its own rows tile by tile and keeps the k best; the k best of every
device are then put together. Of equal scores the earlier row comes first, and rows that
fill up the last part, or are no numbers, are never found.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.parallel.sharding import index_along, per_device, size_along

TILE = 2**14  # rows of a device whose scores are made at once
NONE = np.iinfo(np.int32).max  # the number of no row: after all others


def split_rows(n: int, parts: int) -> tuple[int, int]:
    """Return how many rows each of so many devices holds of n, and those of a tile,
    which divides them."""
    share = -(-n // parts)
    tile = min(TILE, max(1, share))
    return -(-share // tile) * tile, tile


def nearest(
    table: jax.Array, queries: jax.Array, n: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return the k rows that are nearest to each query, best first: numbers i32 and
    scores f32 [B, k].

    table: f32 [N, D], of which the first n rows count, split over the mesh's "batch"
    and filled up (`split_rows`); queries: f32 [B, D]. Where there are less than k the
    others are NONE, with scores of -inf. Nothing is differentiated.
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

    own: f32 [rows, D], a multiple of a tile; first: the number of its first row, i32
    []. left: a row that each query leaves out, i32 [q], -1 for none.
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

    # They differ between devices in jax's eyes, as the loop's results do.
    none = jnp.full((len(queries), k), NONE, jnp.int32) + 0 * first
    start = none, jnp.full(none.shape, -jnp.inf) + 0 * first.astype(jnp.float32)
    best, _ = jax.lax.scan(step, start, jnp.arange(len(own) // tile))
    return best


def take_best(
    numbers: jax.Array, scores: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return the k best of each row, of equal scores the smaller numbers.

    Columns are in the order of their numbers where scores are equal: lax.top_k prefers
    the first of equals.
    """
    values, at = jax.lax.top_k(scores, k)
    return jnp.take_along_axis(numbers, at, axis=1), values

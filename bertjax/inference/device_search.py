# SPDX-License-Identifier: Apache-2.0
"""Exact search on devices: each holds its part of the vectors.

A device takes its passages tile by tile and keeps the k best; the k best of every
device are then put together. The result is that of tasks/search.py's Dense, up to
rounding: of equal scores the earlier passage comes first, and rows that fill up the
last part, or are no numbers, are never found.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax.tasks.search import Dense

__all__ = ["DeviceIndex", "place", "take_best"]

TILE = 2**14  # passages of a device whose scores are made at once
QUERIES = 256  # at once
NONE = np.iinfo(np.int32).max  # the number of no passage: after all others


def place(index: Any) -> Any:
    """Return what searches an index's vectors: accelerators, where there are some and a
    text has one vector, else the index itself."""
    if isinstance(index, Dense) and jax.default_backend() != "cpu":
        return DeviceIndex(index.vectors)
    return index


class DeviceIndex:
    """Vectors f32 [n, D] on the devices; devices: all there are, unless given."""

    def __init__(
        self, vectors: np.ndarray, devices: Sequence[Any] | None = None
    ) -> None:
        devices = jax.devices() if devices is None else devices
        self.n, width = vectors.shape
        share = -(-self.n // len(devices))
        self.tile = min(TILE, max(1, share))
        share = -(-share // self.tile) * self.tile
        self.mesh = Mesh(np.array(devices), ("passages",))
        rows = NamedSharding(self.mesh, P("passages"))

        def part(index: Any) -> Any:
            own = np.zeros((share, width), np.float32)
            begin = index[0].start or 0
            found = np.asarray(vectors[begin : begin + share], np.float32)
            own[: len(found)] = found
            return own

        shape = share * len(devices), width
        self.vectors = jax.make_array_from_callback(shape, rows, part)

    def __len__(self) -> int:
        return self.n

    def search(
        self, queries: Dense, leave: Sequence[int] | None = None, k: int = 100
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best of queries, as tasks/search.py's Index does."""
        k, asked = min(k, self.n), queries.tile(slice(None))
        left = np.full(len(asked), -1) if leave is None else np.asarray(leave)
        rows = max(1, min(QUERIES, len(asked)))
        numbers, scores = [], []
        for begin in range(0, max(1, len(asked)), rows):
            part = np.zeros((rows, asked.shape[1]), np.float32)
            own = np.full(rows, -1, np.int32)
            block = asked[begin : begin + rows]
            part[: len(block)], own[: len(block)] = block, left[begin : begin + rows]
            how = k, self.n, self.tile, self.mesh
            found = _search(self.vectors, part, own, *how)
            numbers.append(np.asarray(found[0])[: len(block)])
            scores.append(np.asarray(found[1])[: len(block)])
        ids, values = np.concatenate(numbers).astype(np.int64), np.concatenate(scores)
        return np.where(np.isneginf(values), -1, ids), values


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _search(
    vectors: jax.Array, queries: Any, left: Any, k: int, n: int, tile: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    def local(own: jax.Array, queries: jax.Array, left: jax.Array) -> Any:
        first = jax.lax.axis_index("passages") * len(own)

        def step(best: Any, i: jax.Array) -> tuple[Any, None]:
            part = jax.lax.dynamic_slice_in_dim(own, i * tile, tile)
            precise = jax.lax.Precision.HIGHEST
            scores = jnp.matmul(queries, part.T, precision=precise)
            numbers = first + i * tile + jnp.arange(tile, dtype=jnp.int32)
            hidden = (numbers >= n) | (numbers == left[:, None]) | jnp.isnan(scores)
            scores = jnp.where(hidden, -jnp.inf, scores)
            numbers = jnp.broadcast_to(numbers, scores.shape)
            numbers = jnp.concatenate([best[0], numbers], axis=1)
            scores = jnp.concatenate([best[1], scores], axis=1)
            return take_best(numbers, scores, k), None

        none = jnp.full((len(queries), k), NONE, jnp.int32)
        start = jax.tree.map(vary, (none, jnp.full((len(queries), k), -jnp.inf)))
        best, _ = jax.lax.scan(step, start, jnp.arange(len(own) // tile))
        return best

    def vary(x: jax.Array) -> jax.Array:
        """Make x differ between devices in jax's eyes, as the loop's results do."""
        return x + 0 * jax.lax.axis_index("passages").astype(x.dtype)

    split = P(None, "passages")
    numbers, scores = jax.shard_map(
        local, mesh=mesh, in_specs=(P("passages"), P(), P()), out_specs=(split, split)
    )(vectors, queries, left)
    return take_best(numbers, scores, k)


def take_best(
    numbers: jax.Array, scores: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return the k best of each row, of equal scores the smaller numbers.

    Columns are in the order of their numbers where scores are equal: lax.top_k prefers
    the first of equals.
    """
    values, at = jax.lax.top_k(scores, k)
    return jnp.take_along_axis(numbers, at, axis=1), values

# SPDX-License-Identifier: Apache-2.0
"""Exact search on devices, each of which holds a part of the vectors.

The result is that of Dense in tasks/search.py, up to rounding (models/nearest.py).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax.models.nearest import search_part, split_rows, take_best
from bertjax.tasks.search import Dense

__all__ = ["DeviceIndex", "place"]

QUERIES = 256  # queries per call


def place(index: Any) -> Any:
    """Return a DeviceIndex if there are accelerators and a text has one vector.

    Otherwise return the index itself.
    """
    if isinstance(index, Dense) and jax.default_backend() != "cpu":
        return DeviceIndex(index.vectors)
    return index


class DeviceIndex:
    """Vectors f32 [n, D] on devices, by default on all."""

    def __init__(
        self, vectors: np.ndarray, devices: Sequence[Any] | None = None
    ) -> None:
        devices = jax.devices() if devices is None else devices
        self.n, width = vectors.shape
        share, self.tile = split_rows(self.n, len(devices))
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
        """Return the k best vectors for queries, like Index in tasks/search.py."""
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
        return search_part(own, queries, first, n, k, tile, left)

    split = P(None, "passages")
    numbers, scores = jax.shard_map(
        local, mesh=mesh, in_specs=(P("passages"), P(), P()), out_specs=(split, split)
    )(vectors, queries, left)
    return take_best(numbers, scores, k)

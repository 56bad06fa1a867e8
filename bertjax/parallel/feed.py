# SPDX-License-Identifier: Apache-2.0
"""Conversion of host batches, and of tables of rows, to global arrays."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax import UserError, counted
from bertjax.parallel.sharding import batch_sharding


def check_batch_size(
    mesh: Mesh, batch_size: int, accumulate: int, group: int = 1
) -> None:
    """Raise UserError if the mesh or accumulation does not divide the batch.

    group: for an objective that mixes by rows, the number of rows that must be on one
    device.
    """
    parts = math.prod(mesh.shape[axis] for axis in ("data", "fsdp"))
    if accumulate < 1 or batch_size % accumulate:
        raise UserError(f"{accumulate=} does not divide {batch_size=}")
    rows = batch_size // accumulate
    if rows % parts:
        raise UserError(
            f"{batch_size=} over {accumulate=} is {counted(rows, 'row')}, not "
            f"divisible by the mesh's data x fsdp = {parts}"
        )
    if rows // parts % group:
        raise UserError(
            f"{batch_size=} is {counted(rows // parts, 'row')} a device and "
            f"micro-batch, not divisible by the {group} of a group, of which each "
            "objective has its own"
        )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the rows of the global batch that this process must produce, ascending.

    They need not be contiguous: on several slices jax orders devices by their position
    in the torus, not by host.
    """
    where = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    parts = {index[0].indices(batch_size)[:2] for index in where.values()}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(parts)])


def to_devices(
    batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, batch_sizes: Iterable[int]
) -> Iterator[dict[str, jax.Array]]:
    """Convert each host batch (its local rows) to global arrays [batch_size, ...].

    batch_sizes: the sizes of the batches in order, at least one per batch.
    """
    where = batch_sharding(mesh)
    for batch, batch_size in zip(batches, batch_sizes, strict=False):
        if jax.process_count() == 1:  # All rows are here: one call for all arrays.
            with jax.transfer_guard_host_to_device("allow"):
                fed = jax.device_put(dict(batch), where)
        else:
            fed = {
                name: put(where, rows, (batch_size, *rows.shape[1:]))
                for name, rows in batch.items()
            }
        yield fed  # outside of the `with`, because the guard applies to the thread


def put(where: NamedSharding, rows: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """Create a global array from this process's rows; the transfer guard allows it."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(where, rows, shape)


def value_per_device(mesh: Mesh, value: np.generic) -> jax.Array:
    """Create an array [devices] of each process's value, which a step can reduce."""
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local = np.full(len(mesh.local_devices), value)
    return put(where, local, (mesh.devices.size,))


def with_flag(
    batches: Iterable[dict[str, jax.Array]], mesh: Mesh, raised: Callable[[], bool]
) -> Iterator[dict[str, jax.Array]]:
    """Add `stop` to each batch, i32 [devices], 1 where a process's flag is raised.

    A signal may reach only one of several processes. The flag is sent with the batches,
    so that all processes see it at the same step. A single process does not need it.
    """
    for batch in batches:
        if jax.process_count() > 1:
            batch["stop"] = value_per_device(mesh, np.int32(raised()))
        yield batch


def place_rows(abstract: Any, tables: Mapping[str, np.ndarray]) -> Any:
    """Convert numpy tables, which may be memory-mapped, to sharded arrays.

    abstract: their shapes and shardings, by name. Only the rows of each device are read
    for it; rows beyond the end of a table are zeros.
    """

    def one(name: str, leaf: Any) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(leaf.shape[0])
            own = np.zeros((last - first, *leaf.shape[1:]), leaf.dtype)
            found = tables[name][first:last]
            own[: len(found)] = found
            return own

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return {name: one(name, leaf) for name, leaf in abstract.items()}

# SPDX-License-Identifier: Apache-2.0
"""From host batches, and tables of rows, to global arrays."""

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
    """Refuse a batch that the mesh or accumulation does not divide.

    group: rows that have to lie on one device, of an objective that mixes by rows.
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
    """Return the rows of the global batch that this process has to make, ascending.

    They need not be contiguous: on many slices jax orders devices by their place in
    the torus, not by host.
    """
    where = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    parts = {index[0].indices(batch_size)[:2] for index in where.values()}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(parts)])


def to_devices(
    batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, batch_sizes: Iterable[int]
) -> Iterator[dict[str, jax.Array]]:
    """Make each host batch (its local rows) global arrays [batch_size, ...].

    batch_sizes: of one batch after the other, at least as many as there are batches.
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
        yield fed  # outside of what is allowed above: the guard is the thread's


def put(where: NamedSharding, rows: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """Make a global array of this process's rows; allowed under the transfer guard."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(where, rows, shape)


def value_per_device(mesh: Mesh, value: np.generic) -> jax.Array:
    """Make [devices] of each process's value: reduced in a step, all hosts know it."""
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local = np.full(len(mesh.local_devices), value)
    return put(where, local, (mesh.devices.size,))


def with_flag(
    batches: Iterable[dict[str, jax.Array]], mesh: Mesh, raised: Callable[[], bool]
) -> Iterator[dict[str, jax.Array]]:
    """Give each batch `stop`, i32 [devices], 1 where a process's flag is raised.

    A signal may reach one process of many: it travels with the batches, so that all
    learn of it at the same step. A single process need not wait for that.
    """
    for batch in batches:
        if jax.process_count() > 1:
            batch["stop"] = value_per_device(mesh, np.int32(raised()))
        yield batch


def place_rows(abstract: Any, tables: Mapping[str, np.ndarray]) -> Any:
    """Put tables of numpy, which may lie in files, where shapes and shardings say: each
    device reads its rows alone, and has zeros behind the last one."""

    def one(name: str, leaf: Any) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(leaf.shape[0])
            own = np.zeros((last - first, *leaf.shape[1:]), leaf.dtype)
            found = tables[name][first:last]
            own[: len(found)] = found
            return own

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return {name: one(name, leaf) for name, leaf in abstract.items()}

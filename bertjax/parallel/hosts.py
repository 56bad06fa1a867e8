# SPDX-License-Identifier: Apache-2.0
"""Processes of one run: starting, agreeing, waiting."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils


def initialize(
    limit: float, heartbeats: float
) -> tuple[Any, int, int, Callable[[], None]]:
    """Join the other processes (`--multihost`).

    On Cloud TPU, Slurm and Open MPI jax finds the others by itself; elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say where they are.
    Failures surface: a run must not fall apart into n single ones. limit: seconds
    without a sign of life that end a process, heartbeats: those that jax's own ones
    get (watch.py has both). Returns what watch.py needs: the client of jax's
    coordination service, this process's index, their number, and how to part at the
    end.
    """
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM from training/signals.py, and is not used.
    jax.config.update("jax_enable_preemption_service", False)
    number, index = (
        os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    )
    jax.distributed.initialize(
        num_processes=None if number is None else int(number),
        process_id=None if index is None else int(index),
        heartbeat_timeout_seconds=max(10, math.ceil(heartbeats)),
        shutdown_timeout_seconds=max(10, math.ceil(limit)),
    )
    client = distributed.global_state.client
    return client, jax.process_index(), jax.process_count(), jax.distributed.shutdown


def is_primary() -> bool:
    """True on the process that writes files and speaks."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_primary(value: Any) -> Any:
    """Give process 0's JSON-like value to all."""
    if jax.process_count() == 1:
        return value
    said = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with jax.transfer_guard("allow"):
        size = int(multihost_utils.broadcast_one_to_all(np.int32(said.size)))
        padded = np.zeros(size, np.uint8)
        padded[: min(size, said.size)] = said[:size]
        return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))


def gather(values: list[float]) -> list[list[float]]:
    """Return every process's list of the same length, by process."""
    if jax.process_count() == 1:
        return [values]
    with jax.transfer_guard("allow"):
        return multihost_utils.process_allgather(np.float32(values)).tolist()


def check_equal(what: str, value: Any) -> None:
    """Raise RuntimeError when processes differ in a JSON-like value."""
    if from_primary(value) != value:
        raise RuntimeError(f"process {jax.process_index()} differs in {what}: {value}")

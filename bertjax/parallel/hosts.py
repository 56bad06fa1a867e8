# SPDX-License-Identifier: Apache-2.0
"""Processes of one run: starting, agreeing, waiting."""

import json
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from bertjax import RunError, UserError

ADDRESS, NUMBER, INDEX = (
    f"JAX_{name}" for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
)


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
    end. Raises UserError where nothing says who the others are.
    """
    address = os.environ.get(ADDRESS)
    if address and not re.fullmatch(r".+:\d+", address):
        raise UserError(f"{ADDRESS}={address} is not HOST:PORT")
    number, index = _count(NUMBER), _count(INDEX)
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM from training/signals.py, and is not used.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            num_processes=number,
            process_id=index,
            heartbeat_timeout_seconds=max(10, math.ceil(heartbeats)),
            shutdown_timeout_seconds=max(10, math.ceil(limit)),
        )
    except ValueError as e:  # of jax's own checks, before it speaks to anybody
        said = " ".join(str(e).split()).rstrip(".")
        raise UserError(
            f"--multihost: {said}; Cloud TPU, Slurm and Open MPI say who the others "
            f"are, elsewhere {ADDRESS}, {NUMBER} and {INDEX} do (docs/gpu.md)"
        ) from e
    client = distributed.global_state.client
    return client, jax.process_index(), jax.process_count(), jax.distributed.shutdown


def _count(name: str) -> int | None:
    """Read a whole number of the environment. Raises UserError where it is none."""
    said = os.environ.get(name)
    if said is not None and not re.fullmatch(r"\s*\d+\s*", said):
        raise UserError(f"{name}={said} is no whole number")
    return None if said is None else int(said)


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
    """Raise RunError when processes differ in a JSON-like value."""
    if from_primary(value) != value:
        raise RunError(f"process {jax.process_index()} differs in {what}: {value}")

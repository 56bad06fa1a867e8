# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: starting, agreeing, waiting."""

import json
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bertjax import RunError, UserError

ADDRESS, NUMBER, INDEX = (
    f"JAX_{name}" for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
)

# All processes must have joined within this many times the limit: 300 s for a limit of
# 120 s, which is jax's default.
JOINING = 2.5


def initialize(
    limit: float, heartbeats: float
) -> tuple[Any, int, int, Callable[[], None]]:
    """Join the other processes (`--multihost`).

    On Cloud TPU, Slurm and Open MPI jax finds the others by itself; elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set. Failures
    are errors: a run must not fall apart into n independent runs. limit: the seconds
    without a sign of life after which a process ends; heartbeats: the timeout of jax's
    own heartbeats (both from watch.py). Returns what watch.py needs: the client of
    jax's coordination service, this process's index, the number of processes, and the
    function that shuts down. Raises UserError if no setting says who the others are,
    RunError if they cannot be joined. If they do not join in time, it prints one line
    and ends the process.
    """
    # jax.distributed (0.10 to 0.12) starts and ends its coordination service, but its
    # public API has neither the coordinator's address nor the client.
    try:
        from jax._src.distributed import global_state as known
    except ImportError:
        known = None
    _having(known, "client", "coordinator_address", "process_id", "num_processes")
    address = os.environ.get(ADDRESS)
    if address and not re.fullmatch(r".+:\d+", address):
        raise UserError(f"{ADDRESS}={address} is not HOST:PORT")
    number, index = _count(NUMBER), _count(INDEX)
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The preemption service is not used, and would take SIGTERM away from
    # training/signals.py.
    jax.config.update("jax_enable_preemption_service", False)
    # At its own timeout jax aborts with a page of C++ frames, so ours is shorter.
    patience = JOINING * limit
    alarm = threading.Timer(patience, _give_up, [patience, known])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            num_processes=number,
            process_id=index,
            initialization_timeout=math.ceil(patience) + 30,
            heartbeat_timeout_seconds=max(10, math.ceil(heartbeats)),
            # Host 0 may be writing the checksums of a large checkpoint meanwhile.
            shutdown_timeout_seconds=max(10, math.ceil(10 * limit)),
        )
    except ValueError as e:  # from jax's own checks, before it connects to anything
        reason = " ".join(str(e).split()).rstrip(".")
        raise UserError(
            f"--multihost: {reason}; Cloud TPU, Slurm and Open MPI say who the others "
            f"are, elsewhere {ADDRESS}, {NUMBER} and {INDEX} do (docs/gpu.md)"
        ) from e
    except RuntimeError as e:  # from jaxlib: the port is taken, the network refuses
        reason = " ".join(str(e).split())[:300]
        raise RunError(
            f"--multihost: {_place(known)} cannot join the others: {reason}"
        ) from e
    finally:
        alarm.cancel()
    client = _having(known.client, "key_value_set", "key_value_dir_get")
    return client, jax.process_index(), jax.process_count(), jax.distributed.shutdown


def _having(part: Any, *names: str) -> Any:
    """Return a private part of jax. Raises UserError if it lacks any of the names."""
    if lacking := [name for name in names if not hasattr(part, name)]:
        raise UserError(
            f"--multihost: jax {jax.__version__} has its coordination service "
            f"elsewhere than 0.10 to 0.12 (no {' '.join(lacking)}): install one of them"
        )
    return part


def _place(known: Any) -> str:
    """Describe this process and the address of the coordinator."""
    if known.coordinator_address is None:
        return "this host"
    return (
        f"host {known.process_id} of {known.num_processes} "
        f"({ADDRESS}={known.coordinator_address})"
    )


def _give_up(seconds: float, known: Any) -> None:
    """End this process, because the others did not join within `seconds`."""
    address = known.coordinator_address
    if address is None:
        missing = "no setting tells where the others are"
    elif known.process_id and not _answers(address):
        missing = "host 0, which coordinates, does not answer there"
    else:
        missing = f"not all of the {known.num_processes} hosts came there"
    print(
        f"error: --multihost: {_place(known)}: {missing} in {seconds:g} s "
        f"({JOINING:g} x hosts.timeout)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _answers(address: str) -> bool:
    """Return True if something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _count(name: str) -> int | None:
    """Read a whole number from an environment variable; None if it is not set.

    Raises UserError for any other value.
    """
    value = os.environ.get(name)
    if value is not None and not re.fullmatch(r"\s*\d+\s*", value):
        raise UserError(f"{name}={value} is not a whole number")
    return None if value is None else int(value)


def is_primary() -> bool:
    """Return True on process 0, which writes files and prints."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has reached this barrier."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_primary(value: Any) -> Any:
    """Return process 0's JSON-like value on all processes."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with jax.transfer_guard("allow"):
        size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
        padded = np.zeros(size, np.uint8)
        padded[: min(size, text.size)] = text[:size]
        return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))


def gather(values: list[float]) -> list[list[float]]:
    """Return the lists of all processes, which have the same length, by process."""
    if jax.process_count() == 1:
        return [values]
    with jax.transfer_guard("allow"):
        return multihost_utils.process_allgather(np.float32(values)).tolist()


def check_settings(own: Mapping[str, Any]) -> None:
    """Raise UserError if the settings differ from those of process 0.

    own: JSON-like values by name. Each process compiles its own program: with other
    numbers in it the devices would train several models, and with other calls they
    would wait for each other forever.
    """
    first, own = from_primary({**own}), json.loads(json.dumps(own))
    names = [k for k in sorted({*first, *own}) if first.get(k) != own.get(k)]
    if names:
        changes = "; ".join(f"{k}: {first.get(k)} -> {own.get(k)}" for k in names[:5])
        raise UserError(
            f"--multihost: host {jax.process_index()} has other settings than host 0: "
            f"{changes}; give all hosts one command, one config file and one version"
        )


def check_equal(what: str, value: Any) -> None:
    """Raise RunError if a JSON-like value differs from that of process 0."""
    if from_primary(value) != value:
        raise RunError(f"process {jax.process_index()} differs in {what}: {value}")

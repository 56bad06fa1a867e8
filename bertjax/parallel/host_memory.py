# SPDX-License-Identifier: Apache-2.0
"""The host: its cores, their instructions, and malloc settings for the CPU."""

import contextlib
import ctypes
import os
from pathlib import Path

# The parameters of mallopt in malloc.h, and the values that we set.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
SETTINGS = {
    # One arena, set before the first thread: other arenas are too small to keep much.
    ARENA_MAX: 1,
    MMAP_MAX: 0,  # large arrays come from the heap too
    TRIM_THRESHOLD: 2**31 - 1,  # the heap returns nothing to the kernel
    TOP_PAD: 2**28,  # it grows by 256 MB of addresses; only used ones take memory
}
ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")  # in /dev


def count_cores() -> int:
    """Return the number of cores on which this process may run."""
    pinned = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(pinned(0)) if pinned else os.cpu_count() or 1


def cpu_has(*names: str, facts: str = "/proc/cpuinfo") -> bool:
    """Return whether this CPU has one of these features, as Linux names them.

    facts: the file that lists them; False if it cannot be read, as on other systems.
    """
    with contextlib.suppress(OSError), open(facts) as file:
        return not set(names).isdisjoint(file.read().split())
    return False


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory if the CPU is the device; return whether it does.

    XLA allocates the temporaries of each step anew. By default glibc returns arrays of
    megabytes to the kernel at once, and the kernel clears each of their pages at the
    next step, which takes a tenth to a fifth of a step. Call this before threads begin.
    It does nothing if there is an accelerator, because the host then creates batches in
    many threads, if the user has set MALLOC_ variables, or if the C library is not
    glibc.
    """
    cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    if not cpu and any(p for name in ACCELERATORS for p in Path("/dev").glob(name)):
        return False
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    taken = [mallopt(key, value) for key, value in SETTINGS.items()]
    return all(taken)

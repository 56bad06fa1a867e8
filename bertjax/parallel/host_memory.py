# SPDX-License-Identifier: Apache-2.0
"""The host where the CPU is the device: its cores, and memory of the process."""

import ctypes
import os
from pathlib import Path

# What mallopt's parameters are called in malloc.h, and their values here.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
SETTINGS = {
    ARENA_MAX: 1,  # before the first thread: others' arenas are too small to keep much
    MMAP_MAX: 0,  # large arrays come from the heap too
    TRIM_THRESHOLD: 2**31 - 1,  # which gives nothing back
    TOP_PAD: 2**28,  # and grows by 256 MB of addresses, of which only used ones count
}
ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")  # in /dev


def count_cores() -> int:
    """Return on how many cores this process may run."""
    pinned = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(pinned(0)) if pinned else os.cpu_count() or 1


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, where the CPU computes; return whether it does.

    XLA takes the temporaries of each step anew. By default glibc returns arrays of
    megabytes to the kernel at once, which clears each page of them at the next step: a
    tenth to a fifth of the time of a step. Call it before threads begin. Nothing is
    done beside an accelerator, where the host makes batches in many threads, where the
    user has chosen (MALLOC_ variables), or where the C library is another.
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

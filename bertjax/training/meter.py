# SPDX-License-Identifier: Apache-2.0
"""The speed of a run: perf/ and data/ values over the steps since the last row.

Seconds are wall-clock time. Processor seconds are the CPU time of this process on all
cores together, which other work on a shared machine does not change.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


class Meter:
    """Counts steps, real tokens, and seconds of waiting for data or for devices.

    peak: the mesh's peak FLOP/s, or None; memory: returns the peak bytes in use so far.
    """

    def __init__(self, peak: float | None, memory: Callable[[], int]) -> None:
        self.peak, self.memory = peak, memory
        self.begin()

    def begin(self) -> None:
        """Begin a new window."""
        self.begun, self.computed = time.monotonic(), time.process_time()
        self.steps = self.tokens = self.slots = 0
        self.flops = 0.0
        self.waited = self.blocked = self.paused = 0.0

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return call(*args), and add its seconds to `waited` (data) or `blocked`."""
        begun = time.monotonic()
        result = call(*args)
        setattr(self, name, getattr(self, name) + time.monotonic() - begun)
        return result

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the seconds of a `with` block from the window."""
        begun, computed = time.monotonic(), time.process_time()
        yield
        self.paused += time.monotonic() - begun
        self.computed += time.process_time() - computed

    def count(self, tokens: int, slots: int, flops: float) -> None:
        """Count a finished step: its real tokens, slots, and FLOPs."""
        self.steps += 1
        self.tokens += tokens
        self.slots += slots
        self.flops += flops

    def row(self, gather: Callable[[list[float]], Any]) -> dict[str, float]:
        """Return the values of the window and begin the next; {} without a step.

        gather: returns every process's list, [processes, n]. All processes call this at
        the same step. If there are several, hosts/ values are added: each host's
        seconds per step of waiting for data and of its own work (all but waiting for
        data or devices), the maximum of both over the hosts, and the index of the host
        that spent most on them, for which the others wait.
        """
        if not self.steps:
            return {}
        steps = self.steps
        ended, computed = time.monotonic(), time.process_time()
        seconds = max(ended - self.begun - self.paused, 1e-9)
        row = {
            "perf/step_seconds": seconds / steps,
            "perf/processor_seconds": (computed - self.computed) / steps,
            "perf/tokens_per_second": self.tokens / seconds,
            "perf/memory_gib": self.memory() / 2**30,
            "data/wait_seconds": self.waited / steps,
            "data/fill": self.tokens / self.slots,
        }
        if self.peak:
            row["perf/mfu"] = self.flops / seconds / self.peak
        own = max(seconds - self.waited - self.blocked, 0.0)
        each = gather([self.waited / steps, own / steps])
        if len(each) > 1:
            names = "data_wait_seconds", "own_seconds"
            for name, values in zip(names, zip(*each, strict=True), strict=True):
                row[f"hosts/{name}_max"] = float(max(values))
                for host, value in enumerate(values):
                    row[f"hosts/{host}/{name}"] = float(value)
            spent = [sum(pair) for pair in each]
            row["hosts/slowest"] = spent.index(max(spent))
        self.begin()
        # `gather` waits for the step in flight, so its seconds belong to the next
        # window.
        self.blocked = self.begun - ended
        self.begun, self.computed = ended, computed
        return row

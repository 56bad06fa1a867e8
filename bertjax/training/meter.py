# SPDX-License-Identifier: Apache-2.0
"""How fast a run is: perf/ and data/ values, over the steps since the last row."""

import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Counts steps, real tokens, and seconds spent waiting for data or standing still.

    peak: the mesh's FLOP/s or None; memory: gives the most bytes in use so far.
    """

    def __init__(self, peak: float | None, memory: Callable[[], int]) -> None:
        self.peak, self.memory = peak, memory
        self.begin()

    def begin(self) -> None:
        """Begin a window anew."""
        self.begun = time.monotonic()
        self.steps = self.tokens = self.slots = 0
        self.flops = 0.0
        self.waited = self.blocked = self.paused = 0.0

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return call(*args); its seconds count as `waited` (data) or `blocked`."""
        begun = time.monotonic()
        result = call(*args)
        setattr(self, name, getattr(self, name) + time.monotonic() - begun)
        return result

    def count(self, tokens: int, slots: int, flops: float) -> None:
        """Count a finished step: its real tokens, B x L slots, and FLOPs."""
        self.steps += 1
        self.tokens += tokens
        self.slots += slots
        self.flops += flops

    def row(self, gather: Callable[[list[float]], Any]) -> dict[str, float]:
        """Return the values of the window, if a step is in it, and begin the next.

        gather: gives every process's list, [processes, n]. All processes call this at
        the same step. Of several, hosts/ values follow: the longest wait for data a
        step, the longest work of a host's own (all but waiting for data or devices),
        and the index of the host that spent most on both, which the others wait for.
        """
        if not self.steps:
            return {}
        steps = self.steps
        seconds = max(time.monotonic() - self.begun - self.paused, 1e-9)
        row = {
            "perf/step_seconds": seconds / steps,
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
            row["hosts/data_wait_seconds_max"] = float(max(wait for wait, _ in each))
            row["hosts/own_seconds_max"] = float(max(work for _, work in each))
            spent = [sum(pair) for pair in each]
            row["hosts/slowest"] = spent.index(max(spent))
        self.begin()
        return row

# SPDX-License-Identifier: Apache-2.0
"""How fast a run is: perf/ and data/ values, over the steps since the last row."""

import time


class Meter:
    """Counts steps, real tokens, and seconds spent waiting for data or standing still.

    peak: the mesh's FLOP/s or None.
    """

    def __init__(self, peak: float | None) -> None:
        self.peak = peak
        self.begin()

    def begin(self) -> None:
        """Begin a window anew."""
        self.begun = time.monotonic()
        self.steps = self.tokens = self.slots = 0
        self.flops = 0.0
        self.waited = self.paused = 0.0

    def count(self, tokens: int, slots: int, flops: float) -> None:
        """Count a finished step: its real tokens, B x L slots, and FLOPs."""
        self.steps += 1
        self.tokens += tokens
        self.slots += slots
        self.flops += flops

    def row(self) -> dict[str, float]:
        """Return the values of the window, if a step is in it, and begin the next."""
        if not self.steps:
            return {}
        steps = self.steps
        seconds = max(time.monotonic() - self.begun - self.paused, 1e-9)
        row = {
            "perf/step_seconds": seconds / steps,
            "perf/tokens_per_second": self.tokens / seconds,
            "data/wait_seconds": self.waited / steps,
            "data/fill": self.tokens / self.slots,
        }
        if self.peak:
            row["perf/mfu"] = self.flops / seconds / self.peak
        self.begin()
        return row

# SPDX-License-Identifier: Apache-2.0
"""How fast a run is: perf/ and data/ values, over the steps since the last row."""

import time


class Meter:
    """Counts steps, real tokens, and seconds spent waiting for data or standing still.

    slots: batch_size x length; flops: of one step; peak: the mesh's FLOP/s or None.
    """

    def __init__(self, slots: int, flops: float, peak: float | None) -> None:
        self.slots, self.flops, self.peak = slots, flops, peak
        self.begin()

    def begin(self) -> None:
        """Begin a window anew."""
        self.begun = time.monotonic()
        self.steps = self.tokens = 0
        self.waited = self.paused = 0.0

    def count(self, tokens: int) -> None:
        """Count a finished step."""
        self.steps += 1
        self.tokens += tokens

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
            "data/fill": self.tokens / (steps * self.slots),
        }
        if self.peak:
            row["perf/mfu"] = self.flops * steps / seconds / self.peak
        self.begin()
        return row

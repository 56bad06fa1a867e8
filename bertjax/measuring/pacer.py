# SPDX-License-Identifier: Apache-2.0
"""A writer of metrics that paces a training loop from outside."""

import json
import os
import statistics
import sys
import time
from typing import Any

from bertjax.measuring.results import peak_rss_mb

SETTLE = 3  # steps of the loop that are not counted after a pause


def speak(reply: dict[str, Any]) -> None:
    """Write a line of the protocol of alternate.py."""
    print(json.dumps(reply), flush=True)


class Pacer:
    """A writer of metrics that lets the loop run as many steps as stdin says.

    The steps in flight and batches made ahead while it stood still are not counted.
    """

    facts: dict[str, Any]

    def __init__(self, workdir: Any, step: int) -> None:
        self.rows: list[tuple[float, float]] = []
        self.target = 0

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append((time.perf_counter(), row.get("data/wait_seconds", 0.0)))
        if row["step"] == 1:
            speak(self.facts)
        elif len(self.rows) < self.target:
            return
        else:
            (begun, _), *counted = self.rows[SETTLE - 1 :]
            seconds = {
                "step": (counted[-1][0] - begun) / len(counted),
                "wait": statistics.mean(w for _, w in counted),
            }
            self.rest()
            speak({"seconds": seconds, "peak_rss_mb": peak_rss_mb()})
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the comparison is over, and cleans up the workdir
        self.rows, self.target = [], int(line) + SETTLE

    def rest(self) -> None:
        """Wait for the step in flight: it must not compute while the other does."""
        import jax

        jax.block_until_ready(jax.live_arrays())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGINT: finish the step, save it, leave with 143 or 130."""

import os
import signal
import time
from types import FrameType

GRACE = 10.0  # seconds; a preempted machine has about 30 in all


class StopSignal:
    """Remembers a signal; before training has begun it leaves at once.

    Install it first thing, and again after jax.distributed.initialize, which puts a
    SIGTERM handler of its own in place. SIGINT is taken explicitly too: a process
    started in the background inherits it ignored.
    """

    def __init__(self) -> None:
        self.number = 0
        self.at = 0.0
        self.training = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number, self.at = number, time.monotonic()
        if not self.training:
            os._exit(128 + number)

    @property
    def overdue(self) -> bool:
        """True when so much time has passed that an evaluation has to be broken off."""
        return bool(self.number) and time.monotonic() - self.at > GRACE

    @property
    def status(self) -> int:
        """The exit status: 143 for SIGTERM (another host's signal too), 130 SIGINT."""
        return 128 + (self.number or signal.SIGTERM)

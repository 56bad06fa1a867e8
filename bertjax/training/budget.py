# SPDX-License-Identifier: Apache-2.0
"""Runs with a time budget: the schedule follows elapsed time instead of steps.

WORKDIR/clock.txt holds one line per update: the seconds of training at which it began,
written before it runs. A resumed run reads there the times of the updates that it
repeats, and continues to count from the last line; start-up and time between two starts
do not count. The seconds are wall-clock time or processor time. Processor time is that
of this process on all cores together, so other work on a shared machine does not use up
the budget.

Cramming (Geiping and Goldstein 2022, arXiv 2212.14034) and 24hBERT (Izsak et al. 2021,
arXiv 2104.07705) train in this way.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bertjax import RunError
from bertjax.parallel import feed
from bertjax.parallel.host_memory import count_cores
from bertjax.storage.atomic import append_line, is_remote, write_file
from bertjax.training.schedules import CLOCK_UPDATES

CLOCKS = {"wall": time.monotonic, "cpu": time.process_time}  # seconds
UNITS = {"wall": "minutes,", "cpu": "minutes of processor time, of all cores,"}


def describe_budget(
    minutes: float, total: int, clock: str = "wall", ramps: Sequence[str] = ()
) -> str:
    """Return the line that explains a run's budget when it starts.

    ramps: settings that change with the steps, such as mask_rate=0.3:0.15.
    """
    line = (
        f"budget_minutes={minutes:g}: training ends after {minutes:g} {UNITS[clock]} "
        f"or after {total:,} steps (total) if that comes first; the learning rate "
        "follows the clock"
    )
    if not ramps:
        return line
    return f"{line}; these follow the steps, up to total: {', '.join(ramps)}"


def least_seconds(seconds: float, clock: str) -> float:
    """Return the wall-clock seconds that a budget lasts with all cores busy."""
    if clock == "wall":
        return seconds
    return seconds / count_cores()


class Clock:
    """The clock of a budget of `seconds` from update `step` on, kept by process 0."""

    def __init__(
        self,
        workdir: Any,
        seconds: float,
        mesh: Mesh,
        step: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = workdir / "clock.txt"
        self.seconds, self.mesh, self.now = seconds, mesh, now
        self.primary = jax.process_index() == 0
        self.lines: list[float] = []
        if self.primary and self.path.exists():
            # An unfinished last line is ignored.
            whole = self.path.read_text().rpartition("\n")[0]
            self.lines = [float(line) for line in whole.split()]
        self.base, self.begun = (self.lines or [0.0])[-1], now()
        # Updates before `step` that ran without a budget were not timed, and use up
        # none of it.
        self.lines += [self.base] * (step - len(self.lines))
        self.file: Any = None
        # An update's time is read after the next update has been dispatched, so one
        # more update follows the one at the end of the budget. A run that was stopped
        # between these two still makes the second.
        self.over, self.ended = map(self._is_over, (step - 1, step - 2))
        self._rewrite()

    def cut(self, step: int) -> None:
        """Forget the updates from `step` on; the time that they took stays spent."""
        self.base, self.begun = self.elapsed(), self.now()
        self.lines = self.lines[:step]
        self._rewrite()

    def elapsed(self) -> float:
        """Return the seconds of training until now."""
        return self.base + self.now() - self.begun

    def stamp(self, batches: Iterable[Any], step: int) -> Iterator[Any]:
        """Add to each batch, from update `step` on, `at`, the time of its schedule."""
        for number, batch in enumerate(batches, step):
            batch["at"] = feed.value_per_device(self.mesh, self._take(number))
            yield batch

    def _take(self, number: int) -> np.float32:
        """Return an update's time, CLOCK_UPDATES at the end of the budget.

        Processes other than process 0 return 0. Raises RunError if it cannot be stored.
        """
        if not self.primary:
            return np.float32(0)
        if number < len(self.lines):  # It ran before: continue from its time then.
            self.base, self.begun = self.lines[number], self.now()
        else:
            self.lines.append(self.elapsed())
            if self.file is not None:
                try:
                    append_line(self.file, f"{self.lines[-1]!r}\n")
                except OSError as e:
                    raise RunError(f"{self.path} cannot be written: {e}") from e
        return self._time(number)

    def _time(self, number: int) -> np.float32:
        return np.float32(CLOCK_UPDATES * min(self.lines[number] / self.seconds, 1.0))

    def _is_over(self, number: int) -> bool:
        """Return True if this update ran at the end of the budget."""
        known = 0 <= number < len(self.lines)
        return known and bool(self._time(number) >= CLOCK_UPDATES)

    def see(self, at: float) -> float:
        """Record the time of an update that ran; return the share of the budget."""
        self.over = at >= CLOCK_UPDATES
        return at / CLOCK_UPDATES

    def flush(self) -> None:
        """Write the lines to a remote workdir; on a disk they are written already."""
        if self.file is None:
            self._rewrite()

    def _rewrite(self) -> None:
        if not self.primary:
            return
        self.close()
        write_file(self.path, "".join(f"{line!r}\n" for line in self.lines))
        if not is_remote(self.path):  # object stores cannot append
            self.file = self.path.open("a")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

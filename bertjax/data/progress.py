# SPDX-License-Identifier: Apache-2.0
"""Show the progress of a long job: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


class Progress:
    """Count units done, on stderr.

    Args:
      what: what is being done, the first word of the bar.
      total: number of all units, or None if it is not known.
      unit: what is counted, for example "MB".
      work: cost of all units together, if units differ in cost, for example padded
        tokens of lines: the remaining time then follows the work that is done.

    >>> with Progress("prepare", total=72, unit="MB") as progress:
    ...     progress.add(1)
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        work: float | None = None,
    ) -> None:
        self.what, self.total, self.unit = what, total or None, unit
        self.work = work or None
        self.form = ",.1f" if unit == "MB" else ",.0f"  # counts are whole
        self.done = self.worked = self.before = 0.0
        self.bar: Any = None
        self.started = self.shown = time.monotonic()

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            import tqdm

            count = f"{{n:{self.form}}}/{{total:{self.form}}} {{unit}}"
            if self.work:
                count = "{unit}"  # `add` writes the count there
            form = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {count}"
            self.bar = tqdm.tqdm(
                desc=self.what,
                total=self.work or self.total,
                unit=self.unit,
                leave=False,
                bar_format=form + " [{elapsed}<{remaining}]" if self.total else None,
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def name(self, what: str) -> None:
        """Change the name of what is being done."""
        self.what = what
        if self.bar is not None:
            self.bar.set_description(what)

    def begin(self) -> None:
        """Restart the clock, so that compilation before it does not count."""
        self.started, self.before = time.monotonic(), self.done

    def add(self, units: float, work: float = 0.0) -> None:
        """Count `units` more as done, with their work; show it if it is time."""
        self.done += units
        self.worked += work
        if self.bar is not None:
            if self.work:
                units = work
                total = f"{self.total or 0:{self.form}}"
                self.bar.unit = f"{self.done:{self.form}}/{total} {self.unit}"
            # An estimated total must not make the bar run over.
            self.bar.update(min(units, max(0.0, (self.bar.total or 1e99) - self.bar.n)))
            return
        now = time.monotonic()
        if now - self.shown >= LINE_SECONDS:
            self.shown = now
            print(self.line(now - self.started), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """Return the plain line after `seconds`.

        >>> p = Progress("prepare", total=100, unit="MB"); p.done = 25
        >>> p.line(10.0)
        'prepare: 25.0 of 100.0 MB, 2.5 MB/s, 30 s left'
        """
        rate = (self.done - self.before) / max(seconds, 1e-9)
        done = f"{self.done:{self.form}}"
        speed = f"{rate:,.1f} {self.unit}/s"
        if self.total is None:
            return f"{self.what}: {done} {self.unit}, {speed}"
        left = (self.total - self.done) / rate if rate else float("inf")
        if self.work and self.worked:
            left = (self.work / self.worked - 1) * seconds
        left = max(0.0, left)
        total = f"{self.total:{self.form}} {self.unit}"
        return f"{self.what}: {done} of {total}, {speed}, {left:.0f} s left"

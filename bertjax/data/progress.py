# SPDX-License-Identifier: Apache-2.0
"""Show how far a long job is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

LINE_SECONDS = 10.0


class Progress:
    """Count units done, on stderr.

    Args:
      what: what is being done, the first word of the bar.
      total: units altogether, or None when nobody knows.
      unit: what is counted, for example "MB".

    Example:
      >>> with Progress("prepare", total=72, unit="MB") as progress:
      ...     progress.add(1)
    """

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self.what, self.total, self.unit = what, total or None, unit
        self.form = ",.1f" if unit == "MB" else ",.0f"  # counts are whole
        self.done = 0.0
        self.bar: Any = None
        self.started = self.shown = time.monotonic()

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            import tqdm

            count = f"{{n:{self.form}}}/{{total:{self.form}}}"
            form = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {count} {{unit}}"
            self.bar = tqdm.tqdm(
                desc=self.what,
                total=self.total,
                unit=self.unit,
                leave=False,
                bar_format=form + " [{elapsed}<{remaining}]" if self.total else None,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def name(self, what: str) -> None:
        """Say what is being done from now on."""
        self.what = what
        if self.bar is not None:
            self.bar.set_description(what)

    def add(self, units: float) -> None:
        """Count `units` more as done, and show it when it is time."""
        self.done += units
        if self.bar is not None:
            # An estimated total must not make the bar run over.
            self.bar.update(min(units, max(0.0, (self.total or 1e99) - self.bar.n)))
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
        rate = self.done / max(seconds, 1e-9)
        done = f"{self.done:{self.form}}"
        speed = f"{rate:,.1f} {self.unit}/s"
        if self.total is None:
            return f"{self.what}: {done} {self.unit}, {speed}"
        left = max(0.0, self.total - self.done) / rate if rate else float("inf")
        total = f"{self.total:{self.form}} {self.unit}"
        return f"{self.what}: {done} of {total}, {speed}, {left:.0f} s left"

# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGINT: finish the step, save it, leave with 143 or 130."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

GRACE = 10.0  # seconds; a preempted machine has about 30 in all
STOPS = (signal.SIGTERM, signal.SIGINT)


class _Listener:
    """Takes signals in a thread: the main one may be in a library's call for minutes.

    SIGINT too, which a process started in the background inherits ignored.
    """

    listening = False

    def install(self) -> None:
        if not self.listening:
            self.listening = True
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reader,), daemon=True).start()
        for number in STOPS:
            signal.signal(number, self._handle)

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOPS:  # others' handlers are of others' signals
                self._note(number[0])

    def _note(self, number: int) -> None:
        """Called in the thread."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread, once it comes back to Python."""


class StopSignal(_Listener):
    """Remembers a signal; before training has begun it calls `leave` and leaves."""

    def __init__(self) -> None:
        self.number = 0
        self.at = 0.0
        self.training = False
        self.leave: Callable[[], None] = lambda: None

    def _note(self, number: int) -> None:
        if not self.number:  # a supervisor may repeat it
            self.at = time.monotonic()
        self.number = number
        if not self.training:
            self.leave()
            os._exit(128 + number)

    @property
    def overdue(self) -> bool:
        """True when so much time has passed that an evaluation has to be broken off."""
        return bool(self.number) and time.monotonic() - self.at > GRACE

    @property
    def status(self) -> int:
        """The exit status: 143 for SIGTERM (another host's signal too), 130 SIGINT."""
        return 128 + (self.number or signal.SIGTERM)


class Stopped(BaseException):
    """A signal came, and what the main thread holds has to be cleared up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class StopCommand(_Listener):
    """Raises Stopped in the main thread, and says so in one line.

    Where that thread does not come back to Python the process ends after `grace`
    seconds all the same.
    """

    def __init__(self, grace: float = 3.0) -> None:
        self.grace = grace
        self._printed = False
        self._printing = threading.Lock()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for other in STOPS:  # what clears up is not interrupted
            signal.signal(other, signal.SIG_IGN)
        self._print_once(number)
        raise Stopped(number)

    def _note(self, number: int) -> None:
        self._print_once(number)
        time.sleep(self.grace)
        os._exit(128 + number)

    def _print_once(self, number: int) -> None:
        """Past sys.stderr, which the main thread may be writing to at this moment."""
        line = f"stopped by {signal.Signals(number).name}\n"
        if self._printing.acquire(timeout=self.grace):
            with contextlib.suppress(OSError):  # nobody may read it any more
                if not self._printed:
                    self._printed = True
                    os.write(2, line.encode())
            self._printing.release()

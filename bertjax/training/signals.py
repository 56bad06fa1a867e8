# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGINT: finish the step, save it, exit with 143 or 130."""

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
    """Handles signals in a thread: the main one may be in a library call for minutes.

    It handles SIGINT too, although a process started in the background ignores that by
    inheritance.
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
            if number[0] in STOPS:  # other signals have handlers of their own
                self._note(number[0])

    def _note(self, number: int) -> None:
        """Called in the thread."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread, once it returns to Python code."""


class StopSignal(_Listener):
    """Records a signal; before training has begun it calls `leave` and exits."""

    def __init__(self) -> None:
        self.number = 0
        self.at = 0.0
        self.training = False
        self.leave: Callable[[], None] = lambda: None

    def _note(self, number: int) -> None:
        if not self.number:  # a supervisor may repeat it: the first one counts
            self.at = time.monotonic()
        self.number = number
        if not self.training:
            self.leave()
            os._exit(128 + number)

    @property
    def overdue(self) -> bool:
        """Whether so much time has passed that an evaluation must be interrupted."""
        return bool(self.number) and time.monotonic() - self.at > GRACE

    @property
    def status(self) -> int:
        """The exit status: 143 for SIGTERM or another host's signal, 130 for SIGINT."""
        return 128 + (self.number or signal.SIGTERM)


class Stopped(BaseException):
    """A signal came, and the main thread has to clean up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class StopCommand(_Listener):
    """Raises Stopped in the main thread, and prints one line.

    If that thread does not return to Python code, the process still exits after `grace`
    seconds.
    """

    def __init__(self, grace: float = 3.0) -> None:
        self.grace = grace
        self._printed = False
        self._printing = threading.Lock()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for other in STOPS:  # do not interrupt the cleanup
            signal.signal(other, signal.SIG_IGN)
        self._print_once(number)
        raise Stopped(number)

    def _note(self, number: int) -> None:
        self._print_once(number)
        time.sleep(self.grace)
        os._exit(128 + number)

    def _print_once(self, number: int) -> None:
        """Write to file descriptor 2, since the main thread may be using sys.stderr."""
        line = f"stopped by {signal.Signals(number).name}\n"
        if self._printing.acquire(timeout=self.grace):
            with contextlib.suppress(OSError):  # the reader may be gone
                if not self._printed:
                    self._printed = True
                    os.write(2, line.encode())
            self._printing.release()

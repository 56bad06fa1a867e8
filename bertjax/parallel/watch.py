# SPDX-License-Identifier: Apache-2.0
"""Detection of lost hosts: the others end with one line that names it, and do not hang.

Every process writes a sign of life with its step into jax's coordination service, which
process 0 runs, and reads those of the others. jax's own heartbeats come later: they end
a process with a page of C++ frames, and do not notice a process that is alive but makes
no progress.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bertjax import RunError, UserError

BEATS = "bertjax/beats"
SLOWER = 10.0  # a step may take this many times the longest one before
FIRST = 15.0  # before a step was measured: this many times the limit
# What the errors of Gloo (CPU), NCCL (GPU), Megascale (TPU slices), jax's coordination
# service and the network below them say if another process does not answer.
SIGNS = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|(?i:gloo|nccl|megascale|"
    "heartbeat|coordination|timed out|broken pipe|socket closed|"
    "connection (closed|reset|refused))"
)


class Watch(contextlib.AbstractContextManager):
    """Ends this process if another is lost, and tells the others when this one ends.

    It is a context manager. limit: the seconds without a sign of life of a process, or
    without a step while it trains, after which it is lost. Nothing happens before
    start(), so single processes can use it too.
    """

    def __init__(self, limit: float, end: Callable[[int], Any] = os._exit) -> None:
        self.limit, self.end = limit, end
        self.interval = min(2.0, limit / 10)
        # The timeout of jax's heartbeats, in seconds. jax sends one in each half of it,
        # so it may consider a process dead after half of it. This watch takes up to
        # limit + 9.5 intervals, and has to come first.
        self.heartbeats = 2 * (limit + 10 * self.interval)
        self.client: Any = None
        self.part: Callable[[], None] = lambda: None
        self.me, self.count = 0, 1
        self.step = 0
        self.ticked: float | None = None  # when the last step ended, while it trains
        self.longest = 0.0
        self.more: dict[str, str] = {}  # whether and why this process ended
        self.leaving, self.closed = threading.Event(), threading.Event()
        self.answered = time.monotonic()
        # For each process: its last status, and when that was first read.
        self.seen: dict[int, tuple[dict[str, Any], float]] = {}

    def start(self, client: Any, me: int, count: int, part: Callable[[], None]) -> None:
        """Start to watch as process `me` of `count`.

        client: of jax's coordination service; it needs key_value_set(key, value,
        allow_overwrite) and key_value_dir_get(directory). part: waits until all
        processes have finished, because the end of process 0, which runs the service,
        would abort the others.
        """
        self.client, self.me, self.count, self.part = client, me, count, part
        self.answered = now = time.monotonic()
        self.seen = {i: ({}, now) for i in range(count)}
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name="watch", daemon=True).start()

    # ------------------------------------------------------------ called by the loop
    def tick(self, step: int, steady: bool = True) -> None:
        """Record the end of a step; if not steady, the next one may take any time."""
        now = time.monotonic()
        if self.ticked is not None:
            self.longest = max(self.longest, now - self.ticked)
        self.step, self.ticked = step, now if steady else None

    def pause(self) -> None:
        """Record that an evaluation or a save begins, which may take any time."""
        self.ticked = None

    # ------------------------------------------------------------ the end of a process
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.ticked = None
        self.leaving.set()
        if self.client is None:
            return
        if error is None:
            self.more = {"done": "0"}
            self._say()
            self.closed.set()
            self.part()
            return
        lost = None
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if is_broken_collective(error):
            text = f"{what}\na collective failed: looking for the host that is gone"
            print(text, file=sys.stderr, flush=True)
            lost = self._wait(self.verdict, self.limit + 2 * self.interval)
        self._announce(lost or f"host {self.me} ended: {what}")
        self.closed.set()
        if lost:
            raise RunError(f"{lost}; {self._then()}") from error

    def leave(self) -> None:
        """Tell the others that a signal ends this process: they may train already."""
        if self.client is not None:
            self._announce(
                f"host {self.me} was stopped by a signal before its first step"
            )

    def _wait(self, poll: Callable[[], Any], seconds: float) -> Any:
        """Return the first true result of `poll`, or None after `seconds`."""
        until = time.monotonic() + seconds
        while not (result := poll()) and time.monotonic() < until:
            time.sleep(self.interval / 4)
        return result or None

    def _announce(self, cause: str) -> None:
        """Tell the others why this process ends."""
        self.more = {"ended": cause}
        say = threading.Thread(target=self._say, name="watch", daemon=True)
        say.start()  # the service may never answer
        say.join(2 * self.interval)
        if self.me == 0:  # it runs the service: its end would abort the others

            def all_know() -> bool:
                others = (x for i, (x, _) in self.seen.items() if i != self.me)
                return all(status.keys() & {"ended", "done"} for status in others)

            self._wait(all_know, 4 * self.interval)

    def _say(self) -> None:
        """Write this process's sign of life; the service may be gone."""
        row = {"at": time.monotonic(), "step": self.step, **self.more}
        with contextlib.suppress(Exception):
            self.client.key_value_set(f"{BEATS}/{self.me}", json.dumps(row), True)

    # ------------------------------------------------------------ threads
    def _beat(self) -> None:
        while not self.closed.wait(self.interval):
            self._say()
            try:
                rows = self.client.key_value_dir_get(BEATS)
            except Exception:  # self.answered stays, so the silence is noticed
                continue
            self.answered = now = time.monotonic()
            for key, value in rows:
                host, status = int(key.rsplit("/", 1)[1]), json.loads(value)
                if status != self.seen[host][0]:
                    self.seen[host] = status, now

    def _judge(self) -> None:
        before = time.monotonic()
        while not self.leaving.wait(self.interval / 2):
            now = time.monotonic()
            if now - before > max(3 * self.interval, self.limit / 2):
                # This process itself was suspended for a while.
                self.answered = now
                self.seen = {i: (status, now) for i, (status, _) in self.seen.items()}
                self.ticked = None if self.ticked is None else now
            before = now
            if not (cause := self.verdict()):
                continue
            # If the loop is about to raise an exception, that says more.
            if self.leaving.wait(2 * self.interval):
                return
            print(f"error: {cause}; {self._then()}", file=sys.stderr, flush=True)
            self._announce(cause)
            self.end(1)
            return

    def _then(self) -> str:
        return (
            f"host {self.me} ends after step {self.step}, and the same command resumes"
        )

    def verdict(self) -> str | None:
        """Return a line about the process that is lost; None while none is."""
        now = time.monotonic()
        others = {i: x for i, x in self.seen.items() if i != self.me}
        for status, _ in others.values():
            if "ended" in status:
                return status["ended"]
        rule = f"for {self.limit:g} s (hosts.timeout)"
        if now - self.answered > self.limit:
            return f"host 0, which coordinates, gives no answer {rule}"
        for host, (status, at) in sorted(others.items()):
            if now - at > self.limit and "done" not in status:
                step = status.get("step", 0)
                return f"host {host} gives no sign of life {rule}, after step {step}"
        # Before a step was measured, only this is known: a call may have many steps.
        known = SLOWER * self.longest or FIRST * self.limit
        patience = max(self.limit, known)
        if self.ticked is None or now - self.ticked <= patience:
            return None
        steps = {i: status.get("step", 0) for i, (status, _) in others.items()}
        steps[self.me] = self.step
        last = min(steps.values())
        behind = [str(i) for i, step in sorted(steps.items()) if step == last]
        where = f"host {', '.join(behind)} stands still after step {last}"
        if len(behind) == self.count:
            where = "all of them after the same step"
        return f"no host finished a step for {patience:.0f} s (hosts.timeout): {where}"


def is_broken_collective(error: BaseException) -> bool:
    """Return True for the errors that jax raises if another process is gone.

    They do not say which one. jax's runtime raises the same type of error if a program
    does not compile or a transfer is not allowed, so this reads the message.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError | RunError) or "RESOURCE_EXHAUSTED" in text:
        return False
    jaxs = any(name in text for name in ("JaxRuntimeError", "XlaRuntimeError", "Gloo"))
    return jaxs and bool(SIGNS.search(text))

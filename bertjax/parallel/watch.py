# SPDX-License-Identifier: Apache-2.0
"""A lost host ends the others, in one line that names it, instead of a hang.

Every process writes a sign of life with its step into jax's coordination service, which
process 0 holds, and reads those of the others. jax's own heartbeats stand behind it,
later: they end a process with a page of C++ frames, and know nothing of a process that
lives and stands still.
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
SLOWER = 10.0  # a step may take so many times the longest one before
FIRST = 15.0  # while none was measured: so many times the limit
# What is said where another process does not answer: by Gloo (CPU), NCCL (GPU),
# Megascale (TPU slices), jax's coordination service, and the network below them.
SIGNS = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|(?i:gloo|nccl|megascale|"
    "heartbeat|coordination|timed out|broken pipe|socket closed|"
    "connection (closed|reset|refused))"
)


class Watch(contextlib.AbstractContextManager):
    """Ends this process when another is lost; a context that tells others of its end.

    limit: seconds without a sign of life of a process, or without a step while it
    trains. Does nothing until start(), so single processes need not ask.
    """

    def __init__(self, limit: float, end: Callable[[int], Any] = os._exit) -> None:
        self.limit, self.end = limit, end
        self.interval = min(2.0, limit / 10)
        # For jax's heartbeats, in seconds. One is sent in each half of it, so that a
        # process may pass for dead after half of it already: this watch, which takes
        # up to limit + 9.5 intervals to the end, has to come first.
        self.heartbeats = 2 * (limit + 10 * self.interval)
        self.client: Any = None
        self.part: Callable[[], None] = lambda: None
        self.me, self.count = 0, 1
        self.step = 0
        self.ticked: float | None = None  # when the last step ended, while it trains
        self.longest = 0.0
        self.more: dict[str, str] = {}  # whether and why it ended
        self.leaving, self.closed = threading.Event(), threading.Event()
        self.answered = time.monotonic()
        # Of each process: what it said last and when that was new.
        self.seen: dict[int, tuple[dict[str, Any], float]] = {}

    def start(self, client: Any, me: int, count: int, part: Callable[[], None]) -> None:
        """Watch from now on: process `me` of `count`.

        client: of jax's coordination service; it needs key_value_set(key, value,
        allow_overwrite) and key_value_dir_get(directory). part: waits until all have
        done their work, since the end of process 0, which holds the service, would
        abort the others.
        """
        self.client, self.me, self.count, self.part = client, me, count, part
        self.answered = now = time.monotonic()
        self.seen = {i: ({}, now) for i in range(count)}
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name="watch", daemon=True).start()

    # ------------------------------------------------------------ what the loop says
    def tick(self, step: int, steady: bool = True) -> None:
        """Note that a step ended; not steady: the next one may take any time."""
        now = time.monotonic()
        if self.ticked is not None:
            self.longest = max(self.longest, now - self.ticked)
        self.step, self.ticked = step, now if steady else None

    def pause(self) -> None:
        """Note that an evaluation or a save begins: it may take any time."""
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
        self._tell(lost or f"host {self.me} ended: {what}")
        self.closed.set()
        if lost:
            raise RunError(f"{lost}; {self._then()}") from error

    def leave(self) -> None:
        """Tell the others that a signal ends this process: they may train already."""
        if self.client is not None:
            self._tell(f"host {self.me} was stopped by a signal before its first step")

    def _wait(self, poll: Callable[[], Any], seconds: float) -> Any:
        """Return what `poll` returns, or None after so many seconds."""
        until = time.monotonic() + seconds
        while not (result := poll()) and time.monotonic() < until:
            time.sleep(self.interval / 4)
        return result or None

    def _tell(self, cause: str) -> None:
        """Tell the others why this process ends."""
        self.more = {"ended": cause}
        say = threading.Thread(target=self._say, name="watch", daemon=True)
        say.start()  # the service may never answer
        say.join(2 * self.interval)
        if self.me == 0:  # it holds the service: its end would abort the others

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
            except Exception:  # the seconds without an answer count
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
                # This process itself was stopped for a while.
                self.answered = now
                self.seen = {i: (status, now) for i, (status, _) in self.seen.items()}
                self.ticked = None if self.ticked is None else now
            before = now
            if not (cause := self.verdict()):
                continue
            # The loop's own exception, if one is under way, says more.
            if self.leaving.wait(2 * self.interval):
                return
            print(f"error: {cause}; {self._then()}", file=sys.stderr, flush=True)
            self._tell(cause)
            self.end(1)
            return

    def _then(self) -> str:
        return (
            f"host {self.me} ends after step {self.step}, and the same command resumes"
        )

    def verdict(self) -> str | None:
        """Say which process is lost, and where it was; None while none is."""
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
        # Nothing is known of the first calls but that they may be of many steps.
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
        return f"no host made a step for {patience:.0f} s (hosts.timeout): {where}"


def is_broken_collective(error: BaseException) -> bool:
    """True of what jax raises when another process is gone; it does not say which.

    Its runtime's errors are of the same type when a program does not compile or a
    transfer is not allowed: what they say tells.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError | RunError) or "RESOURCE_EXHAUSTED" in text:
        return False
    jaxs = any(name in text for name in ("JaxRuntimeError", "XlaRuntimeError", "Gloo"))
    return jaxs and bool(SIGNS.search(text))

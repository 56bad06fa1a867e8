# SPDX-License-Identifier: Apache-2.0
"""A profiler trace of some updates, for XProf or Perfetto (config.profile)."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bertjax.storage.atomic import copy_files, is_remote


class Trace(contextlib.AbstractContextManager):
    """Traces `steps` updates into the directory `path`, from update `done + start` on.

    It is a context manager around the loop; leaving it ends a trace in progress. At
    both ends it waits for the updates in flight, so that the trace contains its updates
    completely. Python calls are not traced. Nothing is traced if `path` is None or
    `steps` is 0.
    """

    def __init__(
        self,
        path: Any,
        done: int,
        *,
        start: int,
        steps: int,
        say: Callable[[str], None],
    ) -> None:
        self.path, self.say = path, say
        self.start = done + start
        self.end = self.start + steps if path is not None else self.start
        self.first: int | None = None  # the first update of a trace in progress
        self.last = 0

    def __exit__(self, *error: object) -> None:
        self._stop(jax.live_arrays)

    def update(
        self, step: int, count: int, state: Any
    ) -> contextlib.AbstractContextManager:
        """Return the context for a call of `count` updates from `step` on.

        state: the state before the call.
        """
        if self.first is not None and step >= self.end:
            self._stop(lambda: state)
        if self.first is None and self.start - count < step < self.end:
            self._begin(step, state)
        if self.first is None:
            return contextlib.nullcontext()
        self.last = step + count - 1
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def _begin(self, step: int, state: Any) -> None:
        jax.block_until_ready(state)
        self.copied = is_remote(self.path)
        self.local = self.path
        if self.copied:
            self.own = tempfile.TemporaryDirectory(prefix="bertjax-trace-")
            self.local = Path(self.own.name)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self.local), profiler_options=options)
        self.first = step

    def _stop(self, in_flight: Callable[[], Any]) -> None:
        if self.first is None:
            return
        first, self.first, self.end = self.first, None, self.start
        try:
            jax.block_until_ready(in_flight())
            jax.profiler.stop_trace()
            if self.copied:
                copy_files(self.local, self.path)
                self.own.cleanup()
        except (OSError, RuntimeError) as e:  # a full disk must not end the run
            self.say(f"profile: the trace cannot be written: {e}")
            return
        self.say(f"updates {first} to {self.last} are traced in {self.path}")

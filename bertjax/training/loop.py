# SPDX-License-Identifier: Apache-2.0
"""The training loop: updates, with evaluations and checkpoints between them.

`run_loop` trains anything that implements `Loop`: a single run
(assembly/train_loop.py), or the parallel runs of a sweep (sweeps/trainer.py).
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from bertjax.checkpoints.best import BestTracker


@dataclasses.dataclass
class LoopState:
    """The state of a loop. A checkpoint holds what `to_meta` returns.

    step: updates dispatched to the devices. total: the last step. read: updates whose
    metrics were read; tokens: their real tokens; skipped_in_row: how many of the newest
    of them the guard skipped in a row. phases: as plain values. rewinds: {"from", "to"}
    of each rewind. best: the evaluations. stopping: a signal came. unscored: a signal
    interrupted an evaluation.
    """

    step: int = 0
    total: int = 0
    read: int = 0
    tokens: int = 0
    skipped_in_row: int = 0
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rewinds: list[dict[str, int]] = dataclasses.field(default_factory=list)
    best: BestTracker = dataclasses.field(default_factory=lambda: BestTracker("", None))
    stopping: bool = False
    unscored: bool = False

    @classmethod
    def from_meta(
        cls, meta: Mapping[str, Any], step: int, **others: Any
    ) -> "LoopState":
        """Restore a checkpoint's state after `step`; {} and 0 for a new run."""
        saved = {key: meta[key] for key in ("tokens", "rewinds") if key in meta}
        return cls(step=step, read=step, **{**saved, **others})

    def facts(self) -> dict[str, Any]:
        """Return what both run.json and checkpoints hold of the loop."""
        return {"phases": self.phases, "rewinds": self.rewinds, **self.best.facts}

    def to_meta(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loop, JSON-like."""
        return {**self.facts(), "tokens": self.tokens}


class Loop(abc.ABC):
    """The interface for `run_loop`. every: {"log" | "eval" | "checkpoint": steps}."""

    state: LoopState
    every: Mapping[str, int]

    def is_due(self, what: str) -> bool:
        """Return True at every `every[what]` steps, and at the last step."""
        at, last = self.state.step, self.state.step == self.state.total
        return what in self.every and (last or at % self.every[what] == 0)

    @property
    def must_rewind(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return False

    @abc.abstractmethod
    def owes_evaluation(self) -> bool:
        """Return True if a signal interrupted the evaluation of the restored step."""

    @abc.abstractmethod
    def update(self) -> None:
        """Dispatch the next call to the devices; check whether a signal came."""

    @abc.abstractmethod
    def drain(self, keep: int = 0) -> None:
        """Read the metrics of all calls but the newest `keep`."""

    def rewind(self) -> None:
        """Go back to the last good checkpoint."""
        raise NotImplementedError

    @abc.abstractmethod
    def evaluate(self) -> bool:
        """Score the validation sets; return False if a signal interrupted it."""

    @abc.abstractmethod
    def must_save(self) -> bool:
        """Return True if this step is to be saved."""

    @abc.abstractmethod
    def save(self) -> None:
        """Save this step."""


def run_loop(loop: Loop) -> None:
    """Train to the last step, or until a signal stops the loop and its step is saved.

    If several things are due at a step, rows are written first, then evaluations, then
    checkpoints. So the rows of a saved step are always in the file.
    """
    state = loop.state
    if loop.owes_evaluation():
        state.stopping = state.unscored = not loop.evaluate()
    while state.step < state.total and not state.stopping:
        loop.update()
        evaluates = loop.is_due("eval")
        pauses = evaluates or state.stopping or loop.is_due("checkpoint")
        if not (pauses or loop.must_rewind):
            continue
        loop.drain()
        if loop.must_rewind:
            loop.rewind()
            continue
        if evaluates:
            state.unscored = not loop.evaluate()
            state.stopping |= state.unscored
        if loop.must_save():
            loop.save()

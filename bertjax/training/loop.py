# SPDX-License-Identifier: Apache-2.0
"""The training loop: updates, and what is due between them.

`run_loop` trains whatever has the methods of a `Loop`: a single run
(assembly/train_loop.py), or the runs of a sweep side by side (sweeps/trainer.py).
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from bertjax.checkpoints.best import BestTracker


@dataclasses.dataclass
class LoopState:
    """Where a loop stands. A checkpoint holds what `to_meta` returns.

    step: updates given to the devices. total: the last step. read: updates whose
    metrics were read; tokens: the real tokens of these; skipped_in_row: the last of
    these that the guard skipped. phases: as plain values. rewinds: {"from", "to"} of
    each. best: the evaluations. stopping: a signal came; unscored: in an evaluation.
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
        """Restore the state of a checkpoint after `step`; {} and 0 begin a run."""
        saved = {key: meta[key] for key in ("tokens", "rewinds") if key in meta}
        return cls(step=step, read=step, **{**saved, **others})

    def facts(self) -> dict[str, Any]:
        """Return what run.json says of the loop, too."""
        return {"phases": self.phases, "rewinds": self.rewinds, **self.best.facts}

    def to_meta(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loop, JSON-like."""
        return {**self.facts(), "tokens": self.tokens}


class Loop(abc.ABC):
    """What `run_loop` trains. every: {"log" | "eval" | "checkpoint": steps}."""

    state: LoopState
    every: Mapping[str, int]

    def is_due(self, what: str) -> bool:
        """True at each `every[what]` steps, and at the last step."""
        at, last = self.state.step, self.state.step == self.state.total
        return what in self.every and (last or at % self.every[what] == 0)

    @property
    def must_rewind(self) -> bool:
        """True where too many updates in a row were skipped."""
        return False

    @abc.abstractmethod
    def owes_evaluation(self) -> bool:
        """True where a signal interrupted the evaluation of the restored step."""

    @abc.abstractmethod
    def update(self) -> None:
        """Run the next call of the devices; see whether a signal came."""

    @abc.abstractmethod
    def drain(self, keep: int = 0) -> None:
        """Read the metrics of all calls but the newest `keep`."""

    def rewind(self) -> None:
        """Go back to the last good checkpoint."""
        raise NotImplementedError

    @abc.abstractmethod
    def evaluate(self) -> bool:
        """Score the validation sets; False where a signal interrupted it."""

    @abc.abstractmethod
    def must_save(self) -> bool:
        """True where this step is to be saved."""

    @abc.abstractmethod
    def save(self) -> None:
        """Save this step."""


def run_loop(loop: Loop) -> None:
    """Train to the last step, or until a signal stops the loop and its step is saved.

    At a step where several things are due, rows are written first, then evaluations,
    then checkpoints: a saved step implies that its rows are in the file.
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

# SPDX-License-Identifier: Apache-2.0
"""The training loop: updates, and what is due between them.

`run_loop` trains whatever has the methods of a `Loop`: a single run (`TrainLoop`), or
the runs of a sweep side by side (sweeps/trainer.py).
"""

import abc
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from bertjax import RunError
from bertjax.checkpoints import manifest, workdir
from bertjax.checkpoints.best import BestTracker
from bertjax.checkpoints.manager import Checkpoints
from bertjax.parallel import hosts
from bertjax.parallel.watch import Watch
from bertjax.training import multi_step, step
from bertjax.training.budget import Clock
from bertjax.training.meter import Meter
from bertjax.training.signals import StopSignal
from bertjax.training.state import State, eval_params
from bertjax.training.trace import Trace
from bertjax.training.writer import Writer, write

LAG = 1  # calls in flight while the host reads the metrics of the one before


@dataclasses.dataclass
class LoopState:
    """Where a loop stands. A checkpoint holds what `to_meta` returns.

    step: updates given to the devices. total: the last step. read: updates whose
    metrics were read. tokens: the real tokens of these. skipped_in_row: how many of the
    last of these the guard skipped. phases: those of the run, as plain values. rewinds:
    {"from", "to"} of each time that the run went back. best: the evaluations so far.
    stopping: a signal came. unscored: it interrupted an evaluation.
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


class Plan(NamedTuple):
    """The batches of a run.

    phases: as plain values, for the checkpoint. cost(step) -> the slots (B x L) and the
    FLOPs of an update. open(step, total) -> (batches of this host, the same on the
    devices) from `step` on; the first is closed when the run ends or rewinds.
    """

    phases: list[dict[str, Any]]
    cost: Callable[[int], tuple[int, float]]
    open: Callable[[int, int], tuple[Any, Iterator[dict[str, jax.Array]]]]


@dataclasses.dataclass
class TrainLoop(Loop):
    """One run.

    train_state: parameters and moments. update_fn(state, batch) -> (state, metrics).
    plan: its batches; replan(phases, back, read) -> those after a rewind from `read` to
    `back`. calls: the updates of a call. starts: steps before which a program is
    compiled. evaluator(params) -> {set: {term: value}}, None if interrupted. guard: the
    config's. ema: whether evaluations take the average. meta: what its checkpoints say
    beside the LoopState. learn(meta, scores): puts what an evaluation teaches into
    meta. abstract: shapes and shardings of the state. open_writers(step) -> writers.
    """

    state: LoopState
    every: Mapping[str, int]
    path: Any
    train_state: State
    abstract: State
    update_fn: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
    plan: Plan
    replan: Callable[[list[dict[str, Any]], int, int], Plan]
    calls: multi_step.Calls
    evaluator: Callable[[Any], dict[str, dict[str, float]] | None]
    checkpoints: Checkpoints
    meta: dict[str, Any]
    learn: Callable[[dict[str, Any], Mapping[str, Any]], None]
    guard: Any
    ema: bool
    open_writers: Callable[[int], list[Writer]]
    meter: Meter
    clock: Clock | None
    trace: Trace
    watch: Watch
    stop: StopSignal
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.primary, self.alone = hosts.is_primary(), jax.process_count() == 1
        self.pending: deque[tuple[int, int, dict[str, jax.Array]]] = deque()
        self._open()

    def _open(self) -> None:
        """Open writers and batches of what follows `state.step`."""
        at = self.state.step
        self.writers = self.open_writers(at)
        self.source, self.batches = self.plan.open(at, self.state.total)
        if self.clock:
            self.batches = self.clock.stamp(self.batches, at)

    def _close(self) -> None:
        self.source.close()
        for writer in self.writers:
            writer.close()

    @property
    def must_rewind(self) -> bool:
        return self.state.skipped_in_row >= self.guard.patience

    def owes_evaluation(self) -> bool:
        due = self.state.step > 0 and self.is_due("eval")
        return due and not hosts.from_primary(
            self.primary and workdir.has_scores(self.path, self.state.step)
        )

    def update(self) -> None:
        state, first = self.state, self.state.step
        count = self.calls.size(first)
        with self.trace.update(first, count, self.train_state):
            batch = self.meter.timed("waited", next, self.batches)
            self.train_state, metrics = self.update_fn(self.train_state, batch)
        self.pending.append((first, count, metrics))
        state.step += count
        self.drain(keep=LAG)
        self.watch.tick(state.step, steady=state.step not in self.calls.starts)
        if self.clock and self.clock.over:
            state.total = state.step
        state.stopping |= self.alone and bool(self.stop.number)

    def drain(self, keep: int = 0) -> None:
        """Read the metrics of all calls but the newest `keep`, and write due rows.

        Ends at the update after which the run has to rewind. Raises RunError for a
        value that is not finite where guard.nonfinite is "stop".
        """
        state = self.state
        while len(self.pending) > keep and not self.must_rewind:
            first, count, metrics = self.pending.popleft()
            metrics = self.meter.timed("blocked", jax.device_get, metrics)
            for values in multi_step.rows(metrics, count):
                self._read(values)
                if self.must_rewind:
                    return
            if first in self.calls.starts:
                self.meter.begin()  # what came before is compilation
            if state.read % self.every["log"] == 0 or state.read == state.total:
                row = {"step": state.read, "tokens": state.tokens, **values}
                write(self.writers, row | self.meter.row(hosts.gather), self.path)
        if not keep:
            self.watch.pause()

    def _read(self, values: dict[str, Any]) -> None:
        """Count one update by its metrics; take out those that are the loop's own."""
        state = self.state
        cost = self.plan.cost(state.read)
        state.read += 1
        state.stopping |= values.pop("stop", 0) > 0
        real = values.pop("tokens")
        state.tokens += real
        self.meter.count(real, *cost)
        state.skipped_in_row = values.pop("streak", 0)
        if state.skipped_in_row == 1:
            self.log(
                f"step {state.read}: the guard skipped the update: its loss or "
                "gradient is not finite, or a spike"
            )
        if self.clock:
            values["budget/share"] = self.clock.see(values.pop("at"))
        wrong = ", ".join(step.non_finite(values))
        if wrong and self.guard.nonfinite == "stop":
            self.checkpoints.close()
            last = (manifest.steps(self.path) or ["none"])[-1]
            raise RunError(
                f"step {state.read}: {wrong} not finite; the last good checkpoint is "
                f"{last}"
            )

    def rewind(self) -> None:
        """Go back to the last checkpoint before the skipped updates, past their rows.

        Raises RunError where there is none, or after guard.rewinds times.
        """
        with jax.transfer_guard("allow"):
            self._rewind()

    def _rewind(self) -> None:
        state, read, skipped = self.state, self.state.read, self.state.skipped_in_row
        self.checkpoints.wait()
        back = hosts.from_primary(
            self.primary and manifest.newest_before(self.path, read - skipped)
        )
        what = (
            f"step {read}: the guard skipped {skipped} updates in a row, which were "
            "not finite, or spikes"
        )
        if back is None or len(state.rewinds) >= self.guard.rewinds:
            raise RunError(
                f"{what}, after {len(state.rewinds)} rewinds (guard.rewinds="
                f"{self.guard.rewinds}); the last good checkpoint is {back or 'none'}"
            )
        self.pending.clear()
        self._close()
        self.checkpoints.drop_after(back)
        for leaf in jax.tree.leaves(self.train_state):  # two states would not fit
            leaf.delete()
        self.train_state = self.checkpoints.restore(back, self.abstract)
        meta = manifest.read_meta(self.path / "checkpoints" / str(back))
        self.learn(self.meta, meta.get("task", {}))
        self.plan = self.replan(state.phases, back, read)
        state.phases, state.tokens = self.plan.phases, meta["tokens"]
        state.step, state.read, state.skipped_in_row = back, back, 0
        state.rewinds.append({"from": read, "to": back})
        state.best.forget_after(back)
        if self.primary:
            workdir.amend_run(self.path, **state.facts())
        if self.clock:
            self.clock.cut(back)
        self._open()
        self.log(f"{what}: back to step {back}, past the batches until then")

    def evaluate(self) -> bool:
        """Score every validation set and write the row; False if interrupted."""
        state, best = self.state, self.state.best
        with self.meter.pause():
            found = self.evaluator(eval_params(self.train_state, self.ema))
            if found is None:
                return False
            self.learn(self.meta, next(iter(found.values())))
            scores = {
                f"eval/{name}/{term}": value
                for name, values in found.items()
                for term, value in values.items()
            }
            row = {"step": state.step, "tokens": state.tokens, **scores}
            write(self.writers, row, self.path)
            if best.metric:
                best.add(state.step, hosts.from_primary(scores[best.metric]))
            if best.out_of_patience:
                self.log(
                    f"step {state.step}: the run ends (eval.patience): {best.best}"
                )
                state.total = state.step
            self._flush()
        return True

    def must_save(self) -> bool:
        state = self.state
        due = state.stopping or self.is_due("checkpoint")
        return due or state.best.step == state.step

    def save(self) -> None:
        """Begin to save this step; the best evaluation's checkpoint is kept."""
        state = self.state
        with self.meter.pause():
            self._flush()
            keep = {state.best.step}
            if state.skipped_in_row:  # the run may have to go back before them
                self.checkpoints.wait()
                good = state.step - state.skipped_in_row
                keep |= {*[n for n in manifest.steps(self.path) if n <= good][-1:]}
            meta = self.meta | state.to_meta()
            self.checkpoints.save(state.step, self.train_state, meta, keep)

    def _flush(self) -> None:
        for writer in [*self.writers, *([self.clock] if self.clock else [])]:
            writer.flush()

    def run(self) -> None:
        """Train to the end (`run_loop`), and close everything in order."""
        self.stop.training = True
        # Without jit (JAX_DISABLE_JIT=1, to debug) every constant is a transfer.
        transfers = "allow" if jax.config.jax_disable_jit else "disallow"
        with jax.transfer_guard(transfers), self.trace:
            run_loop(self)
        self.checkpoints.close()
        self._close()
        if self.clock:
            self.clock.close()

    def finish(self) -> int:
        """Log how the run ended, and return the command's exit status."""
        state, best = self.state, self.state.best
        if state.step < state.total or state.unscored:
            self.log(f"stopped by a signal after step {state.step}, which is saved")
            return self.stop.status
        if self.primary and (self.clock or best.metric):  # only now is it known
            workdir.amend_run(self.path, total_steps=state.step, **best.facts)
        skipped = state.skipped_in_row
        left = f", the last {skipped} updates skipped" if skipped else ""
        winner = f"; {best.best}" if best.best else ""
        tokens = f"{state.tokens:,} tokens"
        self.log(f"done: step {state.step}{left}, {tokens}, {self.path}{winner}")
        return 0

# SPDX-License-Identifier: Apache-2.0
"""Run the training loop for a single run: batches, rows, evaluations, checkpoints."""

import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from bertjax import RunError, __version__, counted
from bertjax.assembly import prepared_text, train_step
from bertjax.assembly.training_run import TrainingRun
from bertjax.checkpoints import manifest, workdir
from bertjax.checkpoints.manager import Checkpoints
from bertjax.data import phases
from bertjax.data.features.base import count_slots
from bertjax.data.loader import stream
from bertjax.parallel import feed, hosts
from bertjax.parallel.mesh import peak_flops, peak_memory
from bertjax.parallel.watch import Watch
from bertjax.tasks import prepare_task as tasks
from bertjax.training import multi_step, state, step
from bertjax.training.budget import CLOCKS, Clock, least_seconds
from bertjax.training.loop import Loop, LoopState, run_loop
from bertjax.training.meter import Meter
from bertjax.training.signals import StopSignal
from bertjax.training.state import keep_given
from bertjax.training.trace import Trace
from bertjax.training.writer import (
    ProgressWriter,
    ServiceWriter,
    Writer,
    make_writers,
    write,
)

LAG = 1  # calls in flight while the host reads the metrics of the previous one


class TrainLoop(Loop):
    """A run at its current step; creating one begins its workdir.

    overrides: what the command line changed. planned: the batches of the run;
    batches: those from `state.step` on, on the devices; source: the same on this
    host. train_state: parameters and moments. meta: checkpoint metadata besides
    the LoopState. pending: the first update, number of updates and metrics of
    each call in flight.
    """

    def __init__(
        self,
        run: TrainingRun,
        stop: StopSignal,
        watch: Watch,
        overrides: Mapping[str, Any] | None,
        log: Callable[[str], None],
    ) -> None:
        config, path = run.config, run.path
        self.run, self.stop, self.watch, self.log = run, stop, watch, log
        self.every, self.calls, self.guard = run.every, run.calls, config.guard
        self.path, self.planned, done = path, run.batches, run.restored or 0
        self.primary, self.alone = hosts.is_primary(), jax.process_count() == 1
        keep = config.checkpoint
        self.checkpoints = Checkpoints(path, keep.keep_last, keep.keep_every)
        self.train_state = self._first_state()
        placed = phases.to_plain(run.batches.phases)
        begun = {"total": run.batches.total, "phases": placed, "best": run.best}
        self.state = LoopState.from_meta(run.meta, done, **begun)
        if self.primary:
            facts = {
                "total_steps": run.batches.total,
                "row_rules": prepared_text.ROW_RULES,
                **self.state.facts(),
            }
            run.begin_workdir(config, overrides, facts, log)
        hosts.barrier("workdir")
        budget, self.clock = config.budget_minutes, None
        if budget is not None:
            now = CLOCKS[config.budget_clock]
            self.clock = Clock(path, 60 * budget, run.mesh, done, now)
        if self.clock and done:
            log(f"{self.clock.elapsed() / 60:.1f} minutes of the budget are spent")
        ended = run.best.out_of_patience
        if self.clock:
            stands = self.clock.over, self.clock.ended
            self.clock.over, over = hosts.from_primary(stands)
            ended |= over
        if ended:
            self.state.total = done
        peak = peak_flops(run.mesh)
        known = all(part.objective.flops for part in run.parts.values())
        if peak and not known:
            log(train_step.NO_MFU.format(config.objective))
        self.meta = run.meta_of(config) | {"version": __version__}
        tasks.learn(self.meta, run.meta.get("task", {}))
        memory = functools.partial(peak_memory, run.mesh)
        self.meter = Meter(peak if known else None, memory)
        self.pending: deque[tuple[int, int, dict[str, jax.Array]]] = deque()
        self._open()
        # all processes run the same program
        where = path / "profile" if self.primary else None
        self.trace = Trace(where, done, **config.profile, say=self.log)

    def _first_state(self) -> state.State:
        """Restore a checkpoint's state, or begin one with init_from's parameters."""
        run, update, abstract = self.run, self.run.update, self.run.abstract
        if run.restored is not None:
            self.log(f"resuming after step {run.restored}")
            return run.with_given(self.checkpoints.restore(run.restored, abstract))
        fresh = update.begin(run.mesh)
        if taken := run.read_init_from(self.log):
            fresh = state.take_params(fresh, taken, abstract, update.freeze)
        return run.with_given(fresh)

    def _open(self, again: bool = False) -> None:
        """Open writers, and batches from `state.step` on; again: after a rewind."""
        at, total, config = self.state.step, self.state.total, self.run.config
        mesh, phased, most = self.run.mesh, self.planned.data, config.steps_per_call
        self.writers: list[Writer] = []
        if self.primary:
            budget = None
            if self.clock:
                budget = least_seconds(self.clock.seconds, config.budget_clock)
            progress = ProgressWriter(total, at, budget=budget)
            self.log = progress.say  # keeps the progress bar intact
            say = self.log if again else None
            jsonl, *others = make_writers(config.log.writers, self.path, at, say)
            services = [ServiceWriter(one, self.log) for one in others]
            self.writers = [jsonl, *services, progress]
        rows = functools.cache(functools.partial(feed.local_rows, mesh))
        self.source = stream(
            lambda i: phased.batch(i, rows), at, total, config.data.engine
        )
        sizes = (phased.at(i).batch_size for i in range(at, total))
        if most > 1:
            counts = self.calls.sizes(at)
            fed = multi_step.to_devices(self.source, mesh, sizes, counts, most)
        else:
            fed = feed.to_devices(self.source, mesh, sizes)
        self.batches = feed.with_flag(fed, mesh, lambda: bool(self.stop.number))
        if self.clock:
            self.batches = self.clock.stamp(self.batches, at)

    def _close(self) -> None:
        self.source.close()
        for writer in self.writers:
            writer.close()

    def cost(self, step: int) -> tuple[int, float]:
        """Return an update's slots (B x L + B x T of targets) and FLOPs (or 0)."""
        phase = self.planned.data.at(step)
        flops = self.run.parts[phase.objective].objective.flops
        slots = phase.batch_size * count_slots(phase.specs)
        return slots, phase.slots * flops(phase.specs) if flops else 0.0

    @property
    def must_rewind(self) -> bool:
        return self.state.skipped_in_row >= self.guard.patience

    def owes_evaluation(self) -> bool:
        due = self.state.step > 0 and self.is_due("eval")
        return due and not hosts.from_primary(
            self.primary and bool(workdir.scores_of(self.path, self.state.step))
        )

    def update(self) -> None:
        state, first, run = self.state, self.state.step, self.run
        own = run.parts[self.planned.data.at(first).objective].update
        update = own.many if run.config.steps_per_call > 1 else own.step
        count = self.calls.size(first)
        # this call compiles, which must not count in a row
        if first in self.calls.starts:
            self.drain()
        with self.trace.update(first, count, self.train_state):
            batch = self.meter.timed("waited", next, self.batches)
            self.train_state, metrics = update(self.train_state, batch)
        self.pending.append((first, count, metrics))
        state.step += count
        self.drain(keep=LAG)
        self.watch.tick(state.step, steady=state.step not in self.calls.starts)
        if self.clock and self.clock.over:
            state.total = state.step
        state.stopping |= self.alone and bool(self.stop.number)

    def drain(self, keep: int = 0) -> None:
        """Read the metrics of all calls but the newest `keep`, and write due rows.

        Stops at the update after which the run has to rewind. Raises RunError for a
        value that is not finite if guard.nonfinite is "stop".
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
                self.meter.begin()  # the time before this was compilation
            if state.read % self.every["log"] == 0 or state.read == state.total:
                row = {"step": state.read, "tokens": state.tokens, **values}
                write(self.writers, row | self.meter.row(hosts.gather), self.path)
        if not keep:
            self.watch.pause()

    def _read(self, values: dict[str, Any]) -> None:
        """Count one update by its metrics, and remove those that only the loop uses."""
        state = self.state
        cost = self.cost(state.read)
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
        wrong = ", ".join(k for k in sorted(values) if not math.isfinite(values[k]))
        if wrong and self.guard.nonfinite == "stop":
            self.checkpoints.close()
            last = (manifest.steps(self.path) or ["none"])[-1]
            raise RunError(
                f"step {state.read}: {wrong} not finite; the last good checkpoint is "
                f"{last}"
            )

    @jax.transfer_guard("allow")
    def rewind(self) -> None:
        """Go back to the last checkpoint before skipped updates, and skip their rows.

        Raises RunError if there is none, or after guard.rewinds times.
        """
        state, read, skipped = self.state, self.state.read, self.state.skipped_in_row
        self.watch.pause()  # verifying and reading a checkpoint may take any time
        self.checkpoints.wait()
        back = hosts.from_primary(
            self.primary and manifest.newest_before(self.path, read - skipped)
        )
        one = "update, which was not finite, or a spike"
        many = "updates in a row, which were not finite, or spikes"
        what = f"step {read}: the guard skipped {counted(skipped, one, many)}"
        if back is None or len(state.rewinds) >= self.guard.rewinds:
            raise RunError(
                f"{what}, after {len(state.rewinds)} rewinds (guard.rewinds="
                f"{self.guard.rewinds}); the last good checkpoint is {back or 'none'}"
            )
        self.pending.clear()
        self._close()
        self.checkpoints.drop_after(back)
        # Two states would not fit in memory; frozen inputs stay as they are.
        for leaf in jax.tree.leaves(self.train_state.parts()):
            leaf.delete()
        restored = self.checkpoints.restore(back, self.run.abstract)
        self.train_state = keep_given(restored, self.train_state)
        meta = manifest.read_meta(self.path / "checkpoints" / str(back))
        tasks.learn(self.meta, meta.get("task", {}))
        past = phases.skip_batches(phases.from_plain(state.phases), back, read)
        how = dict(past=past, at=back, total=self.planned.total)
        self.planned = self.run.make_batches(self.run.config, **how)
        state.phases = phases.to_plain(self.planned.phases)
        state.tokens = meta["tokens"]
        state.step, state.read, state.skipped_in_row = back, back, 0
        state.rewinds.append({"from": read, "to": back})
        state.best.scores = [x for x in state.best.scores if x[0] <= back]
        if self.primary:
            workdir.amend_run(self.path, **state.facts())
        if self.clock:
            self.clock.cut(back)
        self._open(again=True)
        self.log(f"{what}: back to step {back}, past the batches until then")

    def evaluate(self) -> bool:
        """Score every validation set and write the row; return False if interrupted."""
        state, best = self.state, self.state.best
        with self.meter.pause():
            found = self._score()
            if found is None:
                return False
            tasks.learn(self.meta, next(iter(found.values())))
            scores = {
                f"eval/{name}/{term}": value
                for name, values in found.items()
                for term, value in values.items()
            }
            row = {"step": state.step, "tokens": state.tokens, **scores}
            write(self.writers, row, self.path)
            # otherwise it belongs to another phase's objective
            if best.metric in scores:
                score = hosts.from_primary(scores[best.metric])
                best.scores.append((state.step, score))
            if best.out_of_patience:
                self.log(f"step {state.step}: ended early (eval.patience): {best.best}")
                state.total = state.step
            self._flush()
        return True

    def _score(self) -> dict[str, dict[str, float]] | None:
        """Score each validation set: {set: {term: value}}, or None if interrupted."""
        run, mesh = self.run, self.run.mesh
        params, average = self.train_state.params, self.train_state.ema
        if run.config.eval.ema and average is not None:
            params = average
        size, examples, found = run.eval_rows, run.config.eval.examples or None, {}
        last = self.planned.objective_before(self.state.step)
        part = run.parts.get(last, run.parts[""])  # a changed config may not have it
        for name, rows in part.valid.items():
            host = rows.eval_batches(size, examples, feed.local_rows(mesh, size))
            fed = feed.to_devices(host, mesh, itertools.repeat(size))
            values = step.run_eval(
                functools.partial(part.evaluate, frozen=self.train_state.frozen),
                params,
                feed.with_flag(fed, mesh, lambda: self.stop.overdue),
                # With several processes the signal travels with the batches.
                lambda: self.alone and self.stop.overdue,
                outputs := [],
            )
            if values is None:
                return None
            found[name] = values | (rows.score(outputs, examples) if outputs else {})
        return found

    def must_save(self) -> bool:
        state = self.state
        due = state.stopping or self.is_due("checkpoint")
        return due or state.best.step == state.step

    def save(self) -> None:
        """Start saving this step; the best evaluation's checkpoint is kept."""
        state = self.state
        with self.meter.pause():
            self._flush()
            keep = {state.best.step}
            # the run may have to go back to before these updates
            if state.skipped_in_row:
                self.checkpoints.wait()
                good = state.step - state.skipped_in_row
                keep |= {*[n for n in manifest.steps(self.path) if n <= good][-1:]}
            meta = self.meta | state.to_meta()
            self.checkpoints.save(state.step, self.train_state, meta, keep)

    def _flush(self) -> None:
        for writer in [*self.writers, *([self.clock] if self.clock else [])]:
            writer.flush()

    def train(self) -> None:
        """Train to the end (`run_loop`), and close everything in order."""
        self.stop.training = True
        # Without jit (JAX_DISABLE_JIT=1, for debugging) every constant is a transfer.
        transfers = "allow" if jax.config.jax_disable_jit else "disallow"
        try:
            with jax.transfer_guard(transfers), self.trace:
                run_loop(self)
        except BaseException:
            # otherwise its threads wait as long as a notebook is open
            self.source.close()
            raise
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
        if self.primary and (self.clock or best.metric):  # known only now
            workdir.amend_run(self.path, total_steps=state.step, **best.facts)
        skipped = state.skipped_in_row
        left = f", the last {counted(skipped, 'update')} skipped" if skipped else ""
        winner = f"; {best.best}" if best.best else ""
        used = f"{state.tokens:,} tokens"
        if rows := workdir.rows_up_to(self.path / "metrics.jsonl", state.step):
            minutes = workdir.minutes_of([json.loads(row) for row in rows])["wall"]
            used += f", {minutes:.1f} minutes of updates"
        self.log(f"done: step {state.step}{left}, {used}, {self.path}{winner}")
        return 0

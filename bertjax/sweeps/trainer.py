# SPDX-License-Identifier: Apache-2.0
"""Plan, train, evaluate and save the runs of a sweep side by side."""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import batches, prepared_text, workdirs
from bertjax.assembly.training_run import TrainingRun
from bertjax.checkpoints import manifest, workdir, workdir_kinds
from bertjax.checkpoints.best import GREATER
from bertjax.checkpoints.manager import Checkpoints
from bertjax.config import cli, serialize
from bertjax.data.loader import stream
from bertjax.data.progress import Progress
from bertjax.parallel.sharding import batch_sharding
from bertjax.storage.atomic import write_file
from bertjax.sweeps import score_spread, stacked_runs
from bertjax.tasks import prepare_task as tasks
from bertjax.training.loop import Loop, LoopState, run_loop
from bertjax.training.signals import Stopped, StopSignal


class SweepLoop(Loop):
    """The runs of a sweep: their batches, states and scores.

    runs: (seed, rate) of each; base: one of them. facts: identify a saved sweep. Raises
    UserError for settings that do not go together.
    """

    def __init__(
        self,
        base: TrainingRun,
        runs: Sequence[tuple[int, float]],
        facts: dict[str, Any],
        stop: StopSignal,
    ) -> None:
        self.base, self.runs, self.facts, self.stop = base, runs, facts, stop
        self.config, self.path, self.mesh = base.config, base.path, base.mesh
        config = base.config
        if base.objective.tables:
            raise UserError(
                f"task.index={config.task.index}: steps search it, which those of a "
                "sweep do not: train the runs one by one"
            )

        def plan(seed: int) -> batches.Run:
            own = config.copy_and_resolve_references()
            own.seed = seed
            return base.make_batches(own)

        seeds = dict.fromkeys(seed for seed, _ in runs)
        self.planned = {s: plan(s) if s != config.seed else base.batches for s in seeds}
        self.state = LoopState(total=base.batches.total)
        self.every = {"eval": base.every["eval"]}
        self.programs = stacked_runs.make_programs(base)
        metric, patience = base.best.metric, config.eval.patience
        usual = f"eval/{next(iter(base.valid))}/{tasks.make_form(config).metrics[0]}"
        self.scores = score_spread.SweepScores(
            runs, metric or usual, bool(metric), patience, base.better
        )
        self.lost: set[int] = set()  # runs that the guard gave up, already logged
        # Real tokens that each run trained on; None for a sweep of an older version.
        self.tokens: list[int] | None = [0] * len(runs)

    def start(self, at_once: int | None) -> int:
        """Divide the runs into groups; return the step to resume after, 0 to begin.

        Raises UserError, also if a saved sweep began with another number at once.
        """
        folder, count = self.path / workdir_kinds.MEMBERS, len(self.runs)
        first = folder / "0"
        if saved := manifest.steps(first):
            meta = manifest.read_meta(first / "checkpoints" / str(saved[-1]))
            # Check this first: other runs might form groups without checkpoints, and
            # the saved sweep would begin anew.
            check_same(self.path, meta, self.facts, self.config, is_under_way=True)
            size = meta["size"]
            wanted = at_once and stacked_runs.group_size(count, lambda n: n <= at_once)
            if wanted and wanted != size:
                raise UserError(
                    f"--at_once={at_once}: this sweep began with {size} at once"
                )
        else:
            size = stacked_runs.runs_at_once(self.programs, self.mesh, count, at_once)
        runs, steps = counted(count, "run"), counted(self.state.total, "step")
        cli.say(f"{runs} of {steps}, {size} at once")
        where = self.mesh, folder, self.scores.at_best
        self.groups = stacked_runs.Groups(self.programs, self.runs, size, *where)
        done = self.groups.newest
        if not done:
            self.groups.begin(self.base.read_init_from(cli.say))
            return 0
        meta = manifest.read_meta(first / "checkpoints" / str(done))
        rules = meta.get("row_rules", 1)
        prepared_text.check_rows(
            self.config, self.base.prepared.parts, self.path, rules
        )
        self.scores.add(meta["scores"])
        self.tokens = meta.get("tokens")
        self.groups.restore(done, meta.get("streaks", [0] * len(self.runs)))
        self.state.step = done
        self._end_if_all_ended()
        cli.say(f"resuming after step {done}")
        return done

    def train(self) -> None:
        """Train to the end. Raises Stopped after a signal, once all runs are saved."""
        at, total, engine = self.state.step, self.state.total, self.config.data.engine
        self.stop.training = True
        with (
            Progress("sweep", total=total - at, unit="steps") as self.progress,
            contextlib.closing(stream(self.batch, at, total, engine)) as self.batches,
        ):
            run_loop(self)
        self.stop.training = False
        if self.state.stopping:
            cli.say(f"stopped by a signal after step {self.state.step}, which is saved")
            raise Stopped(self.stop.number)

    def batch(self, at: int) -> dict[str, np.ndarray]:
        """Build the batch of a step; axis 0 is the runs'."""
        rows = {seed: run.data.batch(at) for seed, run in self.planned.items()}
        seeds = [seed for seed, _ in self.groups.filled]
        names = rows[seeds[0]]
        return {name: np.stack([rows[seed][name] for seed in seeds]) for name in names}

    def owes_evaluation(self) -> bool:
        at = self.state.step
        return at > 0 and self.is_due("eval") and self.scores.step < at

    def update(self) -> None:
        batch = next(self.batches)
        self.groups.advance(batch, self.scores.ended)
        self.state.step += 1
        if self.tokens is not None:
            # Count as single runs do (training/step.py).
            rows = batch.get("text_tokens", batch["attention_mask"])[: len(self.runs)]
            real = rows.reshape(len(rows), -1).sum(axis=1).tolist()
            self.tokens = [n + m for n, m in zip(self.tokens, real, strict=True)]
        self.progress.add(1)
        if self.progress.done == 1:
            self.progress.begin()
        self.state.stopping |= bool(self.stop.number)

    def drain(self, keep: int = 0) -> None:
        """Log the runs that the guard gives up (guard.patience)."""
        most = self.config.guard.patience
        lost = {i for i, n in enumerate(self.groups.streaks) if n >= most}
        for i in sorted(lost - self.lost):
            one = "update was not finite, or a spike"
            why = counted(most, one, "updates in a row were not finite, or spikes")
            cli.say(f"{self.run_name(i)}: {why}: it is lost")
        self.lost = lost

    def evaluate(self) -> bool:
        """Score the runs that have not ended; return False if interrupted."""
        self.drain()
        ended = self.scores.ended
        try:
            rows = [self.score_set(*one, ended) for one in self.base.valid.items()]
        except Stopped:
            return False
        self.scores.add([row for of_set in rows for row in of_set])
        for i in sorted(self.scores.ended - ended):
            best = self.scores.trackers[self.runs[i]].best
            reason = best or "no score"
            cli.say(f"{self.run_name(i)} ends early (eval.patience): {reason}")
        best = self.scores.best
        if self.scores.at_best and best and best["step"] == self.state.step:
            run = self.runs.index((best["seed"], best["lr"]))
            self.groups.best = self.groups.params(run)
        self._end_if_all_ended()
        self.state.stopping |= bool(self.stop.number)
        return True

    def _end_if_all_ended(self) -> None:
        if len(self.scores.ended) == len(self.runs):
            self.state.total = self.state.step

    def score_set(self, name: str, rows: Any, ended: set[int]) -> list[dict[str, Any]]:
        """Return a row for each run that has not ended, for one validation set."""
        examples = self.config.eval.examples or None
        scored = self.groups.score(self.eval_batches(rows, examples), ended)
        skipped, found = self.groups.skipped, []
        for i, (means, outputs) in scored.items():
            seed, rate = self.runs[i]
            row = {"step": self.state.step, "seed": seed, "lr": rate, "valid": name}
            values = {**means, **rows.score(outputs, examples)}
            if i in self.lost:
                values = dict.fromkeys(values, math.nan)
            row |= {"skipped": skipped[i]}
            row |= {"tokens": self.tokens[i]} if self.tokens else {}
            found.append(row | workdir.finite(values))
        return found

    def eval_batches(self, rows: Any, examples: int | None) -> Iterator[Any]:
        """Yield batches on the devices. Raises Stopped some seconds after a signal."""
        place = batch_sharding(self.mesh)
        for batch in rows.eval_batches(self.base.eval_rows, examples):
            if self.stop.overdue:
                raise Stopped(self.stop.number)
            yield jax.device_put(batch, place)

    def run_name(self, run: int) -> str:
        """Name a run for people."""
        seed, rate = self.runs[run]
        return f"seed {seed}, lr {rate:g}"

    def must_save(self) -> bool:
        return self.state.stopping or self.scores.step == self.state.step

    def save(self) -> None:
        """Save all runs at this step."""
        self.drain()
        meta = {"size": self.groups.size, "scores": self.scores.rows}
        meta |= {"streaks": self.groups.streaks, "row_rules": prepared_text.ROW_RULES}
        meta |= {"tokens": self.tokens} if self.tokens else {}
        self.groups.save({**self.facts, **meta})

    def write_best(self, found: dict[str, Any], overrides: dict[str, Any]) -> None:
        """Write the best run as a workdir, and finally sweep.json, which marks the end.

        found: the content of sweep.json. The best run may be one of the runs that these
        joined; it is written already. overrides: what the command line changed.
        """
        config, path = self.config.copy_and_resolve_references(), self.path
        best = found["best"]
        results = path / workdir_kinds.RESULTS
        text = json.dumps(found, indent=1) + "\n"
        run = config.seed, config.optim.lr = best["seed"], best["lr"]
        if run not in self.runs:
            write_file(results, text)
            return
        if self.scores.at_best:
            params, best_facts = self.groups.best, self.scores.trackers[run].facts
        else:
            params, best_facts = self.groups.params(self.runs.index(run)), {}
        facts = best_facts | {"total_steps": found["steps"]}
        self.base.begin_workdir(config, overrides, facts, cli.say)
        kept = workdir_kinds.read_meta(path, best["step"])
        whole = best["step"] in manifest.steps(path)
        if not whole or kept.get("runs") != self.facts["runs"]:
            # Otherwise it was written before a kill. Checkpoints of other runs, which
            # these join, stay until this one is complete.
            winner = path / workdir_kinds.MEMBERS / "made"
            shutil.rmtree(winner, ignore_errors=True)
            meta = self.base.meta_of(config) | best_facts
            meta |= {GREATER: found[GREATER], "tokens": best.get("tokens", 0)}
            meta["runs"] = self.facts["runs"]  # identifies the sweep
            tasks.learn(meta, best)
            saved = Checkpoints(winner, 2, None)
            saved.save(best["step"], {"params": params}, meta)
            saved.close()
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
            (winner / "checkpoints").rename(path / "checkpoints")
        write_file(results, text)


def check_finished(
    path: Path, before: Mapping[str, Any], facts: dict[str, Any], config: ConfigDict
) -> list[tuple[int, float]]:
    """Return the runs of a sweep that a finished one, `before` in sweep.json, lacks.

    facts: of the sweep, as for `check_same`. Raises UserError if the finished sweep is
    a different one or has additional runs.
    """
    known = before.get("facts")
    done = known.get("runs") if isinstance(known, Mapping) else None
    wanted = facts["runs"]
    if isinstance(done, list) and all(run in wanted for run in done):
        facts = facts | {"runs": done}
    check_same(path, known, facts, config)
    return [(seed, rate) for seed, rate in wanted if [seed, rate] not in facts["runs"]]


def forget_members(path: Path, runs: Sequence[Any]) -> None:
    """Remove the states of these runs, [seed, rate] each.

    States of runs that join them, and are in progress, stay.
    """
    first = path / workdir_kinds.MEMBERS / "0"
    for step in manifest.steps(first):
        known = workdir_kinds.read_meta(first, step).get("runs", [])
        if any(run not in runs for run in known):
            return
    shutil.rmtree(first.parent, ignore_errors=True)


def check_same(
    path: Path,
    before: Any,
    facts: Mapping[str, Any],
    config: ConfigDict,
    is_under_way: bool = False,
) -> None:
    """Refuse a saved sweep, `before`, whose facts or config differ from the given ones.

    is_under_way: `before` is not finished; more runs can join it once it is. Raises
    UserError that names the differences.
    """
    try:
        changes = serialize.differences(
            serialize.from_json(json.dumps(before["config"])), config
        )
        more = not changes and all(run in facts["runs"] for run in before["runs"])
        for i, name in enumerate(("seeds", "rates")):
            old, new = (
                ", ".join(dict.fromkeys(str(run[i]) for run in runs))
                for runs in (before["runs"], facts["runs"])
            )
            changes += [f"{name}: {old} -> {new}"] * (old != new)
        old, new = before["stores"], facts["stores"]
        names = sorted({*old, *new})
        changes += [f"{n}: other text" for n in names if old.get(n) != new.get(n)]
        differ = {key for key in facts if before.get(key) != facts[key]} - {"config"}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise UserError(f"--workdir={path}: its sweep cannot be read: {e!r}") from e
    if changes or differ:
        changes = changes or ["of another tokenizer, or other runs"]
        advice = "take another workdir"
        if is_under_way and more and differ == {"runs"}:
            advice = (
                "finish it first, by the command that began it, and more runs can join "
                f"it; or {advice}"
            )
        advice = workdirs.describe_changes(changes, advice)
        raise UserError(f"--workdir={path} holds another sweep{advice}")

# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep side by side: planned, trained, judged, saved.

What they are at the end, and how a sweep's command says it, is sweep.py's.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import batches as run_batches
from bertjax.assembly import (
    best_metric,
    init_from,
    prepared_text,
    resolve,
    train_step,
    workdirs,
)
from bertjax.checkpoints import manifest, workdir, workdir_kinds
from bertjax.config import cli, serialize
from bertjax.sweeps import programs, score_spread
from bertjax.tasks import prepare_task as tasks
from bertjax.training.signals import Stopped, StopSignal


class Contest:
    """The runs of a sweep, what they learn from, and how they stand.

    runs: (seed, rate) of each. path: of the workdir. prepared: what the task's rows are
    (tasks/prepare_task.py). facts: what tells a saved sweep from another one. Raises
    UserError for what does not go together.
    """

    def __init__(
        self,
        config: ConfigDict,
        path: Path,
        runs: Sequence[tuple[int, float]],
        prepared: Any,
        facts: dict[str, Any],
        mesh: Any,
        stop: StopSignal,
    ) -> None:
        import jax

        from bertjax.objectives.base import TokenIds, make_objective

        self.config, self.path, self.runs, self.facts = config, path, runs, facts
        self.prepared, self.mesh, self.stop = prepared, mesh, stop
        tokenizer, parts = prepared.tokenizer, prepared.parts
        cfg = resolve.encoder_config(
            config, tokenizer.vocab_size, jax.default_backend()
        )
        name, tokens = tasks.objective_of(config, parts), TokenIds.of(tokenizer)
        objective, _ = make_objective(name, cfg, tokens)
        self.eval_rows = train_step.eval_rows(config, objective)
        tables = run_batches.make_tables(
            config, tokenizer, prepared_text.count_tokens(parts)
        )

        def plan(seed: int) -> run_batches.Run:
            own = config.copy_and_resolve_references()
            own.seed = seed
            return run_batches.make_run(own, objective.needs, tokenizer, parts, tables)

        self.planned = {seed: plan(seed) for seed, _ in runs}
        first = self.planned[runs[0][0]]
        self.total = first.total
        self.every = train_step.intervals(config, first.phases[0], self.total)["eval"]
        self.valid = run_batches.make_valid(
            config, objective.needs, tokenizer, prepared.valid, tables
        )
        lengths = train_step.schedule_lengths(config, first.phases, self.total)
        warmup, decay, span = lengths
        self.update = train_step.make_update(
            config, objective, mesh, warmup, span, decay
        )
        self.programs = programs.make_programs(
            config, objective, self.update, lengths, first.course.batch(0), mesh
        )
        params = self.update.shapes.params
        known = best_metric.directions(objective, params, first.course.stages[0])
        judge = best_metric.make_judge(
            config, objective, params, self.valid, path, None, known
        )
        usual = f"eval/{next(iter(self.valid))}/{tasks.make_form(config).metrics[0]}"
        self.standings = score_spread.Standings(
            runs, judge.metric or usual, bool(judge.metric), config.eval.patience, known
        )
        self.lost: set[int] = set()  # and said
        # Real tokens that each run saw; None in a sweep of a version without them.
        self.tokens: list[int] | None = [0] * len(runs)

    def deal(self, at_once: int | None) -> Any:
        """Deal the runs out to groups, and return these. Raises UserError."""
        from bertjax.sweeps.groups import Groups

        size = held_at_once(self.path, len(self.runs), at_once)
        if size is None:
            count = len(self.runs)
            size = programs.runs_at_once(self.programs, self.mesh, count, at_once)
        runs, steps = counted(len(self.runs), "run"), counted(self.total, "step")
        cli.say(f"{runs} of {steps}, {size} at once")
        folder, keeps = self.path / workdir_kinds.MEMBERS, self.standings.at_best
        self.groups = Groups(self.programs, self.runs, size, self.mesh, folder, keeps)
        return self.groups

    def start(self) -> int:
        """Begin, or go on where it was: returns after which step.

        Raises UserError where another sweep is there.
        """
        done = self.groups.newest
        if not done:
            self.groups.begin(self._initial())
            return 0
        first = self.path / workdir_kinds.MEMBERS / "0"
        said = manifest.read_meta(first / "checkpoints" / str(done))
        check_same(self.path, said, self.facts, self.config)
        rules = said.get("row_rules", 1)
        prepared_text.check_rows(self.config, self.prepared.parts, self.path, rules)
        self.standings.see(said["scores"])
        self.tokens = said.get("tokens")
        self.groups.restore(done, said.get("streaks", [0] * len(self.runs)))
        cli.say(f"resuming after step {done}")
        return done

    def _initial(self) -> Any:
        """Read what init_from gives to every run; {} without one."""
        from bertjax.training import state

        config, prepared = self.config, self.prepared
        if not config.init_from:
            return {}
        shapes = state.with_shardings(self.update.shapes, self.update.shardings)
        task = tasks.facts(config, prepared.parts).get("task", {})
        tokenizer = prepared.tokenizer
        return init_from.take(config.init_from, tokenizer, shapes.params, cli.say, task)

    @property
    def is_over(self) -> bool:
        """True at the last step, and where all runs have ended."""
        ended = len(self.standings.ended) == len(self.runs)
        return ended or self.groups.done == self.total

    @property
    def is_due(self) -> bool:
        """True where this step is evaluated and has not been."""
        done = self.groups.done
        asked = done and (done % self.every == 0 or done == self.total)
        return bool(asked) and self.standings.step < done

    def train(self) -> None:
        """Go on to the end. Raises Stopped when a signal came and all is saved."""
        from bertjax.data.loader import stream
        from bertjax.data.progress import Progress

        stop, groups = self.stop, self.groups
        stop.training = True
        # An evaluation may be due that a signal broke off.
        asked = stop.number if self.is_due and not self.judge() else 0
        left = self.total - groups.done
        engine = self.config.data.engine
        with (
            Progress("sweep", total=left, unit="steps") as progress,
            contextlib.closing(
                stream(self.batch, groups.done, self.total, engine)
            ) as batches,
        ):
            while not (asked or self.is_over):
                batch = next(batches)
                groups.advance(batch, self.standings.ended)
                self.count(batch)
                progress.add(1)
                judged = self.is_due and self.judge()
                asked = stop.number
                if judged or asked:
                    self.save()
        stop.training = False
        if asked:
            cli.say(f"stopped by a signal after step {groups.done}, which is saved")
            raise Stopped(asked)

    def batch(self, at: int) -> dict[str, np.ndarray]:
        """Make the batch of a step: all runs' rows, a run each on axis 0."""
        made = {seed: run.course.batch(at) for seed, run in self.planned.items()}
        seeds = [seed for seed, _ in self.groups.filled]
        names = made[seeds[0]]
        return {name: np.stack([made[seed][name] for seed in seeds]) for name in names}

    def count(self, batch: Mapping[str, np.ndarray]) -> None:
        """Count the real tokens of a batch of all runs."""
        if self.tokens is not None:
            rows = batch["attention_mask"][: len(self.runs)]
            real = rows.reshape(len(rows), -1).sum(axis=1).tolist()
            self.tokens = [n + m for n, m in zip(self.tokens, real, strict=True)]

    def judge(self) -> bool:
        """Evaluate the runs that go on; False where a signal broke it off."""
        self.look()
        ended = self.standings.ended
        try:
            told = [self.score(*one, ended) for one in self.valid.items()]
        except Stopped:
            return False
        self.standings.see([row for rows in told for row in rows])
        for i in sorted(self.standings.ended - ended):
            best = self.standings.judges[self.runs[i]].best
            cli.say(f"{self.name(i)} ends here (eval.patience): {best or 'no score'}")
        best = self.standings.best
        if self.standings.at_best and best and best["step"] == self.groups.done:
            self.groups.keep(self.runs.index((best["seed"], best["lr"])))
        return True

    def score(self, name: str, function: Any, ended: set[int]) -> list[dict[str, Any]]:
        """Return a row for each run that has not ended, on one validation set."""
        examples = self.config.eval.examples or None
        found = self.groups.score(self.eval_batches(function, examples), ended)
        skipped, rows = self.groups.skipped, []
        for i, (means, told) in found.items():
            seed, rate = self.runs[i]
            row = {"step": self.groups.done, "seed": seed, "lr": rate, "valid": name}
            values = {**means, **function.score(told, examples)}
            if i in self.lost:
                values = dict.fromkeys(values, math.nan)
            row |= {"skipped": skipped[i]}
            row |= {"tokens": self.tokens[i]} if self.tokens else {}
            rows.append(row | workdir.finite(values))
        return rows

    def eval_batches(self, function: Any, examples: int | None) -> Iterator[Any]:
        """Yield batches on the devices. Raises Stopped some seconds after a signal."""
        import jax

        from bertjax.parallel.sharding import batch_sharding

        place = batch_sharding(self.mesh)
        for batch in function.eval_batches(self.eval_rows, examples):
            if self.stop.overdue:
                raise Stopped(self.stop.number)
            yield jax.device_put(batch, place)

    def look(self) -> None:
        """See which runs the guard gives up (guard.patience), and say so."""
        most = self.config.guard.patience
        lost = {i for i, n in enumerate(self.groups.streaks) if n >= most}
        for i in sorted(lost - self.lost):
            told = f"{most} updates in a row were not finite, or spikes"
            cli.say(f"{self.name(i)}: {told}: it is lost")
        self.lost = lost

    def name(self, run: int) -> str:
        """Name a run for people."""
        seed, rate = self.runs[run]
        return f"seed {seed}, lr {rate:g}"

    def save(self) -> None:
        """Save all runs at this step."""
        self.look()
        told = {"size": self.groups.size, "scores": self.standings.rows}
        told |= {"streaks": self.groups.streaks, "row_rules": prepared_text.ROW_RULES}
        told |= {"tokens": self.tokens} if self.tokens else {}
        self.groups.save({**self.facts, **told})

    def best_params(self) -> Any:
        """Return the parameters of the best run where it was best."""
        if self.standings.at_best:
            return self.groups.best
        best = self.standings.best
        return self.groups.params(self.runs.index((best["seed"], best["lr"])))


def held_at_once(path: Path, runs: int, asked: int | None) -> int | None:
    """Return how many runs of a sweep are in one checkpoint; None where there is none.

    What fits next time may be another number. Raises UserError where another one is
    asked for.
    """
    from bertjax.sweeps import stacked_runs

    first = path / workdir_kinds.MEMBERS / "0"
    there = manifest.steps(first)
    if not there:
        return None
    size = manifest.read_meta(first / "checkpoints" / str(there[-1]))["size"]
    if asked and stacked_runs.group_size(runs, lambda n: n <= asked) != size:
        raise UserError(f"--at_once={asked}: this sweep began with {size} at once")
    return size


def check_same(
    path: Path, before: Any, facts: Mapping[str, Any], config: ConfigDict
) -> None:
    """Refuse a sweep of `before` that is not that of these facts, `config`'s own.

    Configs are compared as those of runs are: keys that came later have their defaults.
    Raises UserError, which names what differs.
    """
    try:
        told = serialize.differences(
            serialize.from_json(json.dumps(before["config"])), config
        )
        for i, name in enumerate(("seeds", "rates")):
            old, new = (
                ", ".join(dict.fromkeys(str(run[i]) for run in runs))
                for runs in (before["runs"], facts["runs"])
            )
            told += [f"{name}: {old} -> {new}"] * (old != new)
        old, new = before["stores"], facts["stores"]
        names = sorted({*old, *new})
        told += [f"{n}: other text" for n in names if old.get(n) != new.get(n)]
        same = all(before.get(key) == facts[key] for key in facts.keys() - {"config"})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise UserError(f"--workdir={path}: its sweep cannot be read: {e!r}") from e
    if told or not same:
        told = told or ["of another tokenizer, or other runs"]
        said = workdirs.tell_changes(told, "take another workdir")
        raise UserError(f"--workdir={path} holds another sweep{said}")

# SPDX-License-Identifier: Apache-2.0
"""From a config to a run that can be trained: text, batches, update, first state, loop.

The order of the functions is the order in which `bertjax.train` calls them.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, __version__
from bertjax.assembly import (
    batches,
    best_metric,
    init_from,
    prepared_text,
    resolve,
    train_step,
    workdirs,
)
from bertjax.checkpoints import best, manifest, workdir
from bertjax.checkpoints.manager import Checkpoints, merge
from bertjax.config import serialize
from bertjax.data import phases
from bertjax.data.loader import stream
from bertjax.models import attention
from bertjax.models.encoder import count_params
from bertjax.objectives.base import make_objective
from bertjax.parallel import feed, hosts
from bertjax.parallel.mesh import machine, peak_flops, peak_memory
from bertjax.parallel.watch import Watch
from bertjax.tasks import prepare_task as tasks
from bertjax.training import multi_step, state
from bertjax.training.budget import describe_budget, make_clock
from bertjax.training.evaluator import Evaluator
from bertjax.training.loop import LoopState, Plan, TrainLoop
from bertjax.training.meter import Meter
from bertjax.training.signals import StopSignal
from bertjax.training.trace import Trace
from bertjax.training.writer import ProgressWriter, make_writers

Log = Callable[[str], None]


def check_mesh(config: ConfigDict, mesh: Mesh) -> None:
    """Refuse batches and objectives that the mesh cannot take, before text is read."""
    sizes = {p.batch_size for p in resolve.wanted_phases(config)}
    for size in {config.batch_size, *sizes}:
        feed.check_batch_size(mesh, size, config.accumulate)
    objective, _ = make_objective(config.objective, resolve.encoder_config(config, 1))
    resolve.check_plan(config, objective.needs)
    train_step.check_whole_batch(config, objective, mesh)


class Text(NamedTuple):
    """The prepared text of a run, and the content hash of each of its stores."""

    prepared: Any
    hashes: dict[str, str]


def prepare(config: ConfigDict, log: Log) -> Text:
    """Prepare the text on process 0, then on the others, which find it on a shared disk
    or make their own."""
    if hosts.is_primary():
        prepared = prepared_text.prepare(config, log)
    hosts.barrier("prepared")
    if not hosts.is_primary():
        prepared = prepared_text.prepare(config, log)
    hashes = prepared_text.content_hashes(config, prepared)
    hosts.check_equal("the prepared text", [*hashes.values()])
    return Text(prepared, hashes)


def read_restored(
    config: ConfigDict, path: Any, restored: int | None, text: Text, finished: bool
) -> dict[str, Any]:
    """Return what the checkpoint of step `restored` says of itself; {} without one.

    Raises UserError where the run began with other text, or where a run that is not
    finished made its rows by older rules.
    """
    if path is None or restored is None:
        return {}
    meta = manifest.read_meta(path / "checkpoints" / str(restored))
    workdir.check_text(path, meta["stores"], text.hashes)
    if not finished:
        rules = workdir.read_json(path / "run.json").get("row_rules", 1)
        prepared_text.check_rows(config, text.prepared.parts, path, rules)
    return meta


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A run whose text, batches and update are made; nothing is allocated yet.

    restored: the step of the checkpoint that it goes on from, or None; meta: what that
    one says of itself, {} without one. make_batches(past, at) -> the batches from step
    `at`, after `past` phases. better: {loss: whether more of it is better}.
    """

    config: ConfigDict
    path: Any
    mesh: Mesh
    text: Text
    restored: int | None
    meta: dict[str, Any]
    cfg: Any
    objective: Any
    counts: Any
    make_batches: Callable[..., batches.Run]
    batches: batches.Run
    valid: dict[str, Any]
    every: dict[str, int]
    calls: multi_step.Calls
    update: train_step.Update
    better: dict[str, bool]
    best: best.BestTracker

    def describe(self, log: Log) -> None:
        """Log what is trained: parameters, steps, mesh, attention and phases."""
        mesh, course = self.mesh, self.batches.course
        parameters, total = count_params(self.update.shapes.params), self.batches.total
        where = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {dict(mesh.shape)}"
        log(f"{parameters:,} parameters; {total:,} steps; mesh {where}")
        if self.config.budget_minutes is not None:
            log(describe_budget(self.config.budget_minutes, total))
        with jax.set_mesh(mesh):
            lengths = (stage.length for stage in course.stages)
            log(f"attention: {attention.describe_backend(self.cfg, lengths)}")
        for line in course.lines():
            log(line)

    def facts(self) -> dict[str, Any]:
        """Return what run.json says of the run, beside where its loop stands."""
        return {
            "stores": self.text.hashes,
            "parameters": count_params(self.update.shapes.params),
            "total_steps": self.batches.total,
            "row_rules": prepared_text.ROW_RULES,
            best.GREATER: self.better,
        }

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return what each checkpoint of the run says, beside where its loop stands."""
        prepared = self.text.prepared
        meta = {
            "config": self.config.to_dict(),
            "tokenizer": prepared.tokenizer.identity,
            "stores": self.text.hashes,
            "version": __version__,
            **tasks.facts(self.config, prepared.parts),
        }
        tasks.learn(meta, self.meta.get("task", {}))
        return meta


def make_training_run(
    config: ConfigDict,
    path: Any,
    mesh: Mesh,
    text: Text,
    restored: int | None,
    meta: dict[str, Any],
    log: Log,
) -> TrainingRun:
    """Make the batches and the update of a run. Raises UserError for what does not go
    together."""
    parts, tokenizer = text.prepared.parts, text.prepared.tokenizer
    objective, cfg = train_step.make_config_objective(config, text.prepared)
    counts = prepared_text.count_tokens(parts)
    tables = batches.make_tables(config, tokenizer, counts, log)
    make_batches = functools.partial(
        batches.make_run, config, objective.needs, tokenizer, parts, tables
    )
    past, at = phases.from_plain(meta.get("phases", [])), restored or 0
    run = make_batches(past=past, at=at, say=log)
    valid = batches.make_valid(
        config, objective.needs, tokenizer, text.prepared.valid, tables, log
    )
    if at > run.total:
        raise UserError(
            f"total is {run.total} steps, and --workdir={path} is at step {at}: give a "
            "longer total, or take another workdir"
        )
    every = train_step.intervals(config, run.phases[0], run.total)
    starts = *(stage.start for stage in run.course.stages), at
    calls = multi_step.Calls(
        config.steps_per_call, run.total, (*every.values(),), starts
    )
    calls.check()
    lengths = train_step.schedule_lengths(config, run.phases, run.total)
    update = train_step.make_update(config, objective, mesh, *lengths)
    shapes = update.shapes.params
    better = best_metric.directions(objective, shapes, run.course.stages[0])
    tracker = best_metric.make_tracker(
        config, objective, shapes, valid, path, restored, better
    )
    if not valid:
        del every["eval"]
    return TrainingRun(
        config, path, mesh, text, restored, meta, cfg, objective, counts, make_batches,
        run, valid, every, calls, update, better, tracker,
    )  # fmt: skip


def first_state(
    run: TrainingRun, checkpoints: Checkpoints, abstract: state.State, log: Log
) -> state.State:
    """Return the state that a run begins with.

    That of the workdir's checkpoint; else the parameters of init_from; else drawn ones.
    """
    if run.restored is not None:
        log(f"resuming after step {run.restored}")
        return checkpoints.restore(run.restored, abstract)
    config, update, prepared = run.config, run.update, run.text.prepared
    fresh = state.init_sharded(update.init, update.tx, run.mesh, update.shardings)
    if not config.init_from:
        return fresh
    task = tasks.facts(config, prepared.parts).get("task", {})
    taken = init_from.take(
        config.init_from, prepared.tokenizer, abstract.params, log, task
    )
    return state.with_params(fresh, merge(fresh.params, taken), abstract.ema)


def begin_workdir(
    run: TrainingRun, loop: LoopState, overrides: dict[str, Any] | None, log: Log
) -> None:
    """Write what the workdir says of its run, before the first step."""
    if hosts.is_primary():
        texts = {
            "config.json": serialize.to_json(run.config),
            "overrides.json": json.dumps(overrides),
        }
        facts = run.facts() | loop.facts() | machine(run.mesh)
        save_tokenizer = run.text.prepared.tokenizer.save
        workdir.begin(run.path, texts, facts, save_tokenizer, run.counts)
        workdirs.write_findings(run.path, run.text.prepared, log)
    hosts.barrier("workdir")


def make_plan(run: TrainingRun, planned: batches.Run, stop: StopSignal) -> Plan:
    """Make the plan of a loop from the batches of its run."""
    config, mesh, course = run.config, run.mesh, planned.course
    most, rows = config.steps_per_call, functools.partial(feed.local_rows, mesh)
    rows = functools.cache(rows)

    def open_batches(step: int, total: int) -> tuple[Any, Any]:
        host = stream(lambda i: course.batch(i, rows), step, total, config.data.engine)
        sizes = (course.at(i).batch_size for i in range(step, total))
        if most > 1:
            counts = run.calls.sizes(step)
            fed = multi_step.to_devices(host, mesh, sizes, counts, most)
        else:
            fed = feed.to_devices(host, mesh, sizes)
        return host, feed.with_flag(fed, mesh, lambda: bool(stop.number))

    def cost(step: int) -> tuple[int, float]:
        return train_step.cost(run.objective, course.at(step))

    return Plan([*map(dataclasses.asdict, planned.phases)], cost, open_batches)


def make_evaluator(run: TrainingRun, stop: StopSignal) -> Evaluator:
    """Make what scores the validation sets, unless a signal came some seconds ago."""
    mesh, micro = run.mesh, train_step.eval_rows(run.config, run.objective)

    def open_batches(host: Any) -> Any:
        fed = feed.to_devices(host, mesh, itertools.repeat(micro))
        return feed.with_flag(fed, mesh, lambda: stop.overdue)

    alone = jax.process_count() == 1  # else the signal travels with the batches
    return Evaluator(
        jax.jit(train_step.make_evaluate(run.objective)),
        run.valid,
        micro,
        run.config.eval.examples or None,
        feed.local_rows(mesh, micro),
        open_batches,
        lambda: alone and stop.overdue,
    )


def make_loop(
    run: TrainingRun,
    stop: StopSignal,
    watch: Watch,
    overrides: Mapping[str, Any] | None,
    log: Log,
) -> TrainLoop:
    """Make the loop of a run at the step where it stands, and begin its workdir."""
    config, path, update = run.config, run.path, run.update
    keep = config.checkpoint
    checkpoints = Checkpoints(path, keep.keep_last, keep.keep_every)
    abstract = state.with_shardings(update.shapes, update.shardings)
    train_state = first_state(run, checkpoints, abstract, log)
    plan, done = make_plan(run, run.batches, stop), run.restored or 0
    loop = LoopState.from_meta(
        run.meta, done, total=run.batches.total, phases=plan.phases, best=run.best
    )
    begin_workdir(run, loop, overrides, log)
    clock = make_clock(path, config.budget_minutes, run.mesh, done)
    if clock and done:
        log(f"{clock.elapsed() / 60:.1f} minutes of the budget are spent")
    if run.best.out_of_patience or (clock and hosts.from_primary(clock.over)):
        loop.total = done
    primary, peak = hosts.is_primary(), peak_flops(run.mesh)
    if peak and not run.objective.flops:
        log(train_step.no_mfu(config))
    where = path / "profile" if primary else None  # all run the same program

    def open_writers(step: int) -> list[Any]:
        if not primary:
            return []
        writers = make_writers(config.log.writers, path, step)
        budget = clock and clock.seconds
        return [*writers, ProgressWriter(loop.total, step, budget=budget)]

    def replan(past: list[dict[str, Any]], back: int, read: int) -> Plan:
        skipped = phases.skip_batches(phases.from_plain(past), back, read)
        return make_plan(run, run.make_batches(past=skipped, at=back), stop)

    return TrainLoop(
        state=loop,
        every=run.every,
        path=path,
        train_state=train_state,
        abstract=abstract,
        update_fn=update.many if config.steps_per_call > 1 else update.step,
        plan=plan,
        replan=replan,
        calls=run.calls,
        evaluator=make_evaluator(run, stop),
        checkpoints=checkpoints,
        meta=run.checkpoint_meta(),
        learn=tasks.learn,
        guard=config.guard,
        ema=config.eval.ema,
        open_writers=open_writers,
        meter=Meter(
            peak if run.objective.flops else None, lambda: peak_memory(run.mesh)
        ),
        clock=clock,
        trace=Trace(where, done, **config.profile, say=log),
        watch=watch,
        stop=stop,
        log=log,
    )

# SPDX-License-Identifier: Apache-2.0
"""Build a run that can be trained from a config: text, batches, update."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import (
    batches,
    init_from,
    prepared_text,
    resolve,
    train_step,
    workdirs,
)
from bertjax.assembly.check_index import check_index
from bertjax.assembly.check_objective import (
    check_arrays,
    check_best,
    check_predictions,
    directions,
    say_where,
)
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.open_teacher import (
    KEY,
    ReadTeacher,
    as_teacher,
    check_fit,
    check_same,
    check_use,
    read_teacher,
)
from bertjax.checkpoints import best, manager, workdir
from bertjax.config import durations, serialize
from bertjax.data import phases
from bertjax.data.features.base import encoder_length
from bertjax.models import attention
from bertjax.models.encoder import count_params
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed, hosts
from bertjax.parallel.mesh import machine
from bertjax.parallel.sharding import TABLES, TEACHER
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import get_task_type
from bertjax.training import multi_step, state
from bertjax.training.budget import describe_budget

EVENTS = "log", "eval", "checkpoint"
Log = Callable[[str], None]


def check_before_text(
    config: ConfigDict, mesh: Mesh, teacher: LoadedModel | None = None
) -> None:
    """Refuse a config that cannot train, before any text is read.

    The mesh has to fit, optimizer, schedule and attention have to be possible, and a
    teacher of use. Raises UserError.
    """
    planned = resolve.wanted_phases(config)
    cfg = resolve.encoder_config(config, 1, jax.default_backend())
    name, is_known = config.objective, True
    if tasks.is_task(config):  # labels and choices are in the text
        name = tasks.with_head_options(config, ())
        is_known = not get_task_type(config.objective).several_sequences
    objective, cfg = make_objective(name, cfg)
    taught = as_teacher(teacher, cfg)
    named = resolve.objectives_of(config, taught)
    objectives = [*named.values()]
    check_use(config, objectives)
    if config.init_layers and not (config.init_from or config.teacher):
        raise UserError(
            f"init_layers={config.init_layers} chooses layers of init_from or of the "
            "teacher: give one of the two, or leave it empty"
        )
    for phase, each in named.items():
        # Each objective is evaluated on batches of config.batch_size.
        own = (p.batch_size for p in planned if p.objective == phase)
        for size in {config.batch_size, *own}:
            feed.check_batch_size(mesh, size, config.accumulate, each.group)
        train_step.check_whole_batch(config, each, mesh)
    arrays = objective.labels(1, config.data.length) if is_known else {}
    regions = encoder_length(0, arrays)
    try:
        with jax.set_mesh(mesh):
            lengths = (p.length + regions for p in planned)
            attention.describe_backend(cfg, lengths, arrays)
    except UserError as e:
        count = f"; {regions} regions (task.max_regions) are tokens too" * bool(regions)
        raise UserError(f"{e}{count}") from None
    unit, total = durations.unit_of(config, "total")
    total = total if unit == "steps" else 2**31  # otherwise known once the text is read

    def steps(name: str) -> int:
        unit, number = durations.unit_of(config, name)
        known = unit in ("steps", "percent")
        return phases.steps_within(unit, number, (), total) if known else 0

    train_step.check_freeze(config, objectives)
    train_step.make_tx(config, steps("optim.warmup"), total, steps("optim.decay"))
    train_step.check_average(steps("optim.average"), total)
    check_best(config)


def prepare(config: ConfigDict, log: Log) -> tuple[Any, dict[str, str]]:
    """Return the prepared text of a run, and the content hash of each of its stores.

    Process 0 prepares it first; the others find it on a shared disk,
    or prepare their own.
    """
    if hosts.is_primary():
        prepared = prepared_text.prepare(config, log)
    hosts.barrier("prepared")
    if not hosts.is_primary():
        prepared = prepared_text.prepare(config, log)
    hashes = prepared_text.content_hashes(config, prepared)
    hosts.check_equal("the prepared text", [*hashes.values()])
    return prepared, hashes


def check_row_rules(config: ConfigDict, parts: Any, path: Any) -> None:
    """Refuse rows of an older version's rules, or without a record of the rules."""
    if not (path / "run.json").exists():
        raise UserError(
            f"--workdir={path}: run.json is missing, which says by which rules its "
            "rows were made: put it back, or take another workdir, with "
            f"--config.init_from={path}"
        )
    rules = workdir.read_json(path / "run.json").get("row_rules", 1)
    prepared_text.check_rows(config, parts, path, rules)


class Part(NamedTuple):
    """One objective of a run: its update, validation batches and evaluation."""

    objective: Any
    update: train_step.Update
    valid: dict[str, Any]
    evaluate: Callable[..., Any]


class TrainingRun:
    """A run with its text, batches and update; nothing is allocated yet.

    restored: the step of the checkpoint to resume from, or None; meta: that
    checkpoint's metadata, {} without one. make_batches(config, past, at, total) -> the
    batches from step `at`, after `past` phases. every: steps between rows, evaluations
    and checkpoints. lengths: train_step.schedule_lengths. abstract: shapes and
    shardings of the state. parts: {objective of a phase: Part}; objective, update and
    valid are those of the config's own, parts[""]. better: {loss: whether higher is
    better}. teacher: config.teacher, open. Raises UserError for what cannot be trained.
    """

    def __init__(
        self,
        config: ConfigDict,
        path: Any,
        mesh: Mesh,
        text: tuple[Any, dict[str, str]],
        restored: int | None,
        meta: dict[str, Any],
        log: Log,
        teacher: LoadedModel | None = None,
    ) -> None:
        self.config, self.path, self.mesh = config, path, mesh
        self.restored, self.meta = restored, meta
        self.prepared, self.hashes = text
        tokenizer, parts = self.prepared.tokenizer, self.prepared.parts
        if meta:
            check_row_rules(config, parts, path)
        else:
            check_index(config, log)
        names = resolve.names_of(config)
        labels = tasks.facts(config, parts).get("task", {}).get("labels", [])
        check_fit(config, teacher, tokenizer, labels)
        pairs = [
            train_step.make_config_objective(config, self.prepared, n, teacher)
            for n in names
        ]
        self.cfg = pairs[-1][1]
        joined = train_step.join_objectives([objective for objective, _ in pairs])
        objectives = dict(zip(names, joined, strict=True))
        # Rows of an evaluation batch: as many as a step has in memory at once.
        self.eval_rows = (
            joined[-1].whole_batch or config.batch_size // config.accumulate
        )
        needs = {name: objective.needs for name, objective in objectives.items()}
        self.counts = prepared_text.count_tokens(parts)
        tables = batches.make_tables(config, tokenizer, self.counts, log)
        fixed = dict(needs=needs, tokenizer=tokenizer, parts=parts, tables=tables)
        make = self.make_batches = functools.partial(batches.make_run, **fixed)
        past, at = phases.from_plain(meta.get("phases", [])), restored or 0
        total = workdirs.known_total(config, meta)
        self.batches = run = make(config, past=past, at=at, total=total, say=log)
        if at > run.total:
            raise UserError(
                f"total is {counted(run.total, 'step')}, and --workdir={path} is at "
                f"step {at}: give a longer total, or take another workdir"
            )
        place = run.phases[0], run.total  # if batches change, those of the first phase
        lengths = {name: durations.unit_of(config, f"{name}.every") for name in EVENTS}
        steps = {name: phases.steps_of(*n, *place) for name, n in lengths.items()}
        self.every = {name: max(1, n) for name, n in steps.items()}
        starts = *(stage.start for stage in run.data.stages), at
        every = (*self.every.values(),)
        self.calls = multi_step.Calls(config.steps_per_call, run.total, every, starts)
        self.calls.check()
        self.lengths = train_step.schedule_lengths(config, run.phases, run.total)
        self.parts = {
            name: Part(
                objective,
                train_step.make_update(config, objective, mesh, *self.lengths),
                batches.make_valid(
                    config, needs[name], tokenizer, self.prepared.valid, tables, log
                ),
                jax.jit(train_step.make_evaluate(objective)),
            )
            for name, objective in objectives.items()
        }
        self.objective, self.update, self.valid, _ = self.parts[""]
        self.abstract = state.with_shardings(self.update.shapes, self.update.shardings)
        self.better = self._check_stages(objectives)
        self.teacher = self._read_teacher(teacher)
        self.best = self._make_tracker()
        if not self.valid:
            del self.every["eval"]

    def _check_stages(self, objectives: Mapping[str, Any]) -> dict[str, bool]:
        """Check a batch of each phase, and return `better`."""
        # For phases that are over, the run recorded it before.
        facts = workdir.read_json(self.path / "run.json") if self.meta else {}
        better = {**best.known_directions(facts)}
        for stage in self.batches.data.stages:
            objective = objectives[stage.objective]
            name = stage.objective or self.config.objective
            with say_where(f"objective={name}, as in an evaluation (rng=None)"):
                check_arrays(stage)
                better |= directions(objective, self.update.reads, stage)
            check_predictions(stage)
        return better

    def _read_teacher(self, teacher: LoadedModel | None) -> ReadTeacher | None:
        """Read the teacher, which must be that of the checkpoint. Raises UserError."""
        read = None
        if teacher is not None:
            wanted = self.update.shapes.frozen[TEACHER]
            read = read_teacher(self.config, teacher, wanted)
            hosts.check_equal("the teacher", [read.sha256])
        if self.meta:
            check_same(self.path, self.config, self.meta, read and read.sha256)
        return read

    def _make_tracker(self) -> best.BestTracker:
        """Build the tracker of the best evaluation (eval.best), with the scores so far.

        Without a name it tracks a task's first metric, or else the
        loss that weighs most.
        """
        config, objective = self.config, self.objective
        patience = config.eval.patience
        if not config.eval.best and patience is None:
            return best.BestTracker("", None)
        batch = next(next(iter(self.valid.values())).eval_batches(objective.group))
        params = self.update.reads
        terms = jax.eval_shape(objective.sums, params, batch, None)
        losses = jax.eval_shape(objective.weights, batch)
        weigh = objective.coefficients
        heaviest = sorted(losses, key=lambda term: -weigh.get(term, 1.0))
        names = {}
        for name, rows in self.valid.items():
            metrics = rows.plans[0].scores if tasks.is_task(config) else ()
            names[name] = [*dict.fromkeys([*metrics, *heaviest, *terms])]
        metric = best.full_metric_name(config.eval.best, names)
        tracker = best.BestTracker(metric, patience, self.better)
        if self.restored is not None:
            tracker.scores = hosts.from_primary(
                hosts.is_primary() and best.read(self.path, metric, self.restored)
            )
        return tracker

    def read_init_from(self, log: Log, reads: bool = True) -> dict[str, Any]:
        """Read the parameters of init_from; {} without one. Raises UserError.

        reads: whether to read their values too, not only their shapes.
        """
        config, prepared = self.config, self.prepared
        source, layers = config.init_from, config.init_layers
        source = source or (config.teacher if layers else "")
        if not source:
            return {}
        task = tasks.facts(self.config, prepared.parts).get("task", {})
        how = prepared.tokenizer, self.update.params, log, task, layers
        return init_from.take(source, *how, reads)

    def with_given(self, current: state.State) -> state.State:
        """Add the teacher and tables of rows to a state, and free them on the host."""
        if self.teacher is not None:
            read, wanted = self.teacher.leaves, self.abstract.frozen[TEACHER]
            placed = manager.place(wanted, read.__getitem__)
            current = state.with_given(current, teacher=placed)
            self.teacher = self.teacher._replace(leaves={})
        if self.objective.tables:
            rows = next(iter(self.prepared.parts.values()))
            tables = rows.plan(self.config.data.length).tables
            placed = feed.place_rows(self.abstract.frozen[TABLES], tables)
            current = state.with_given(current, tables=placed)
        return current

    def begin_workdir(
        self,
        config: ConfigDict,
        overrides: Mapping[str, Any] | None,
        facts: Mapping[str, Any],
        log: Log,
    ) -> None:
        """Write the files of a new run into its workdir, before its first step.

        overrides: what the command line changed. facts: further content of run.json.
        """
        texts = {
            "config.json": serialize.to_json(config),
            "overrides.json": json.dumps(overrides),
        }
        known = {
            "stores": self.hashes,
            "parameters": count_params(self.update.params),
            best.GREATER: self.better,
            **machine(self.mesh),
            **self._teacher_facts(),
        }
        save_tokenizer = self.prepared.tokenizer.save
        workdir.begin(self.path, texts, known | facts, save_tokenizer, self.counts)
        workdirs.write_findings(self.path, self.prepared, log)

    def meta_of(self, config: ConfigDict) -> dict[str, Any]:
        """Return what checkpoints of a run of `config` record, whatever their step."""
        kept = {k: self.meta[k] for k in ("sentences", "hf_config") if k in self.meta}
        if not self.meta:
            kept = init_from.kept_sentences(config) | init_from.kept_hf_config(config)
        return {
            "config": config.to_dict(),
            "total_steps": self.batches.total,
            "tokenizer": self.prepared.tokenizer.identity,
            "stores": self.hashes,
            **self._teacher_facts(),
            **kept,
            **tasks.facts(config, self.prepared.parts),
        }

    def _teacher_facts(self) -> dict[str, str]:
        """Return what is recorded about a teacher: the sha256 of its parameters."""
        return {KEY: self.teacher.sha256} if self.teacher else {}

    def trace_update(self) -> None:
        """Trace an update; raise UserError with the line of a part at fault."""
        name, o = self.config.objective, self.config.optim
        parts = f"objective={name}, optim.name={o.name}, optim.schedule={o.schedule}"
        with say_where(f"{parts}: an update cannot be made"):
            for stage in self.batches.data.stages:
                batch = stage.batch(stage.start)
                with jax.set_mesh(self.mesh):
                    update = self.parts[stage.objective].update
                    jax.eval_shape(update.step, self.abstract, batch)

    def describe(self, log: Log) -> None:
        """Log what is trained: parameters, steps, mesh, attention and phases."""
        mesh, phased = self.mesh, self.batches.data
        parameters, total = count_params(self.update.params), self.batches.total
        where = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {dict(mesh.shape)}"
        trained = count_params(self.update.shapes.params)
        those = f", {trained:,} of them trained" * (trained < parameters)
        log(f"{parameters:,} parameters{those}; {counted(total, 'step')}; mesh {where}")
        if self.config.budget_minutes is not None:
            config = self.config
            rates = (str(phase.mask_rate) for phase in self.batches.phases)
            ramps = [f"mask_rate={x}" for x in dict.fromkeys(rates) if ":" in x]
            if any("concept_labels" in stage.specs for stage in phased.stages):
                ramps.append("the strength of the gradient reversal")
            how = config.budget_minutes, total, config.budget_clock, ramps
            log(describe_budget(*how))
        with jax.set_mesh(mesh):
            lengths = (encoder_length(s.length, s.specs) for s in phased.stages)
            arrays = {name for stage in phased.stages for name in stage.specs}
            backend = attention.describe_backend(self.cfg, lengths, arrays)
            log(f"attention: {backend}")
        for line in phased.lines():
            log(line)

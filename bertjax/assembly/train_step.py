# SPDX-License-Identifier: Apache-2.0
"""Build the train step of a run from its config: schedule, optimizer, update."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.tree_util import tree_leaves_with_path
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import resolve
from bertjax.assembly.open_teacher import as_teacher
from bertjax.config import durations, schema
from bertjax.data import phases
from bertjax.generation.answers import with_texts, writing_of
from bertjax.models.nearest import split_rows
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.sharding import TABLES, TEACHER, param_shardings, path_name
from bertjax.tasks import prepare_task as tasks
from bertjax.training import (
    frozen,
    multi_step,
    optim,
    read_freeze,
    read_keep_zeros,
    read_rates,
    schedules,
    state,
    step,
)

NO_MFU = (
    "no MFU: objective={} does not say its FLOPs (Head.flops, docs/add_an_objective.md)"
)
# Warm-up and total of measured steps, whose arithmetic is always the same.
ENDLESS = (10_000, 1_000_000)


def check_whole_batch(config: ConfigDict, objective: Any, mesh: Any) -> None:
    """Refuse to split the rows that an objective compares with each other."""
    if objective.whole_batch is None:
        return
    name = config.objective
    if config.accumulate > 1:
        raise UserError(
            f"accumulate={config.accumulate}: objective={name} compares the rows of "
            "the whole batch (in-batch negatives), and micro-batches would part it; "
            f"take more devices, or batch_size={config.batch_size // config.accumulate}"
        )
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if objective.whole_batch % parts:
        raise UserError(
            f"objective={name} is evaluated on {objective.whole_batch} rows at once "
            f"(whole_batch), not divisible by the mesh's data x fsdp = {parts}"
        )


def check_freeze(config: ConfigDict, objectives: Iterable[Any]) -> None:
    """Refuse an optim.freeze or optim.keep_zeros that matches no parameter.

    The parameters are those of all objectives. Raises UserError.
    """
    rules = read_freeze(config.optim.freeze)
    zeros = read_keep_zeros(config.optim.keep_zeros)
    if not rules and not zeros:
        return
    trees = [jax.eval_shape(each.init, jax.random.key(0)) for each in objectives]
    leaves = itertools.chain.from_iterable(map(tree_leaves_with_path, trees))
    paths = [path_name(path) for path, _ in leaves]
    frozen.check_rules(paths, rules)
    frozen.check_rules(paths, zeros, "optim.keep_zeros")


class Update(NamedTuple):
    """The jitted update of a config, and the layout of its state.

    step(state, batch) -> (state, metrics); many: several updates per call. shapes,
    shardings: of the state. params: shapes and shardings of the whole model; freeze:
    the frozen part of it (training/frozen.py).
    """

    init: Callable[[], Any]
    tx: Any
    shapes: Any
    shardings: Any
    step: Any
    many: Any
    params: Any
    freeze: frozen.Sizes
    init_teacher: Callable[[], Any] | None = None

    @property
    def reads(self) -> Any:
        """Shapes of all parameters that an objective reads, including a teacher's."""
        shapes = self.shapes.params, self.shapes.frozen
        return jax.eval_shape(frozen.join, *shapes)

    def begin(self, mesh: Any, made_up: bool = False) -> state.State:
        """Create the first state; made_up: with made-up parameters of a teacher."""
        how = mesh, self.shardings, self.freeze, self.init_teacher if made_up else None
        return state.init_sharded(self.init, self.tx, *how)


def make_config_objective(
    config: ConfigDict, prepared: Any, name: str = "", teacher: Any = None
) -> tuple[Any, Any]:
    """Build a config's objective for its prepared text, and its EncoderConfig.

    name: the objective of a phase; "": the config's. teacher: config.teacher, open.
    """
    tokenizer = prepared.tokenizer
    cfg = resolve.encoder_config(config, tokenizer.vocab_size, jax.default_backend())
    name = name or tasks.objective_of(config, prepared.parts)
    tokens = resolve.token_ids(config, tokenizer)
    rows = next(iter(prepared.parts.values()))
    # its tables have passages as long as a row has room for
    if getattr(rows, "has_tables", False):
        rows = rows.plan(config.data.length)
    candidates = getattr(rows, "candidates", None)  # of a task
    how = tokens, as_teacher(teacher, cfg), candidates
    objective, cfg = make_objective(name, cfg, *how)
    if any(getattr(rows, "writes", False) for rows in prepared.valid.values()):
        objective = with_texts(objective, cfg, tokens, writing_of(config))
    return objective, cfg


def join_objectives(objectives: Sequence[Any]) -> list[Any]:
    """Let the objectives of several phases train one set of parameters.

    Each trains all parameters of all objectives, initialized by its own `init` or
    another's, and reads its own part. A single objective is returned unchanged. Raises
    UserError if two have parameters of the same name and different shapes.
    """
    if len(objectives) == 1:
        return [*objectives]
    trees = [jax.eval_shape(each.init, jax.random.key(0)) for each in objectives]
    check_shapes(trees)
    parts = [{*tree, TEACHER, TABLES} for tree in trees]
    rows = itertools.chain.from_iterable(o.shardings for o in objectives)
    shardings = tuple(dict.fromkeys(rows))

    def init(rng: jax.Array) -> Any:
        params: dict[str, Any] = {}
        for objective in reversed(objectives):
            fresh = objective.init(rng)
            both = params.get("encoder", {}) | fresh.get("encoder", {})
            params |= fresh | ({"encoder": both} if both else {})
        return params

    def init_teacher(rng: jax.Array) -> Any:
        trees = [o.init_teacher(rng) for o in objectives if o.init_teacher]
        return {name: part for tree in trees for name, part in tree.items()}

    def join(objective: Any, own: Any) -> Any:
        def select(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda params, *rest: function(
                {k: params[k] for k in own & params.keys()}, *rest
            )

        evaluate = objective.evaluate and select(objective.evaluate)
        changes = dict(init=init, sums=select(objective.sums), evaluate=evaluate)
        if any(each.init_teacher for each in objectives):
            changes["init_teacher"] = init_teacher
        return dataclasses.replace(objective, shardings=shardings, **changes)

    return [join(*each) for each in zip(objectives, parts, strict=True)]


def check_shapes(trees: Sequence[Any]) -> None:
    """Refuse parameters with one name and several shapes. Raises UserError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tree in trees:
        for path, leaf in tree_leaves_with_path(tree):
            name = path_name(path)
            if shapes.setdefault(name, leaf.shape) != leaf.shape:
                raise UserError(
                    f"phases: {name} has the shapes {shapes[name]} and {leaf.shape} in "
                    "two objectives, so that they cannot train one model (ELECTRA's "
                    "head over the vocabulary is its generator's): take objectives "
                    "that share theirs"
                )


def make_tx(
    config: ConfigDict,
    warmup: int,
    total: int,
    decay: int = 0,
    lr: Any = None,
    backend: str = "",
) -> tuple[Any, Any]:
    """Build the schedule and the optax transform; durations are in steps.

    decay: the length of the last part of schedules that have one. lr: replaces the
    config's. backend: of the devices, by default jax's; decides what
    optim.ns_dtype=fast means. Raises UserError for settings that do not go together.
    """
    o = config.optim
    power = schema.power_in_effect(o.schedule, o.power)
    schedule = schedules.make_schedule(
        o.schedule, o.lr if lr is None else lr, warmup, total, decay, power
    )
    keys = "wd cautious_decay b1 b2 eps bias_correction ns_dtype clip layer_decay"
    settings = {key: o[key] for key in keys.split()}
    backend = backend or jax.default_backend()
    settings["ns_dtype"] = resolve.dtype_of(o.ns_dtype, backend)
    settings["zeros"] = [rule.pattern for rule in read_keep_zeros(o.keep_zeros)]
    rates = read_rates(o.rates)
    return schedule, optim.make_optimizer(o.name, schedule, rates=rates, **settings)


def schedule_lengths(
    config: ConfigDict, placed: Sequence[phases.Phase], total: int
) -> tuple[int, int, int, int]:
    """Return (warm-up, whole schedule, decay, averaged tail) of a run, in steps.

    The tail is that of optim.average. If the clock drives the schedule, the lengths are
    shares of CLOCK_UPDATES.
    """
    span = total if config.budget_minutes is None else schedules.CLOCK_UPDATES

    def length(name: str, end: bool = True) -> int:
        unit, number = durations.unit_of(config, name)
        return phases.steps_within(unit, number, placed, span, end)

    warmup = length("optim.warmup", end=False)
    return warmup, span, length("optim.decay"), length("optim.average")


def check_average(tail: int, total: int) -> None:
    """Refuse to average more updates than a run has. Raises UserError."""
    if tail > total:
        raise UserError(
            f"optim.average is {counted(tail, 'step')}, more than total's {total}"
        )


def make_function(
    config: ConfigDict,
    objective: Any,
    tx: Any,
    schedule: Any,
    seed: Any = None,
    average_from: int = 0,
) -> Callable[..., Any]:
    """Build update(state, batch) -> (state, metrics); seed: replaces the config's."""
    return step.make_train_step(
        objective.sums,
        objective.weights,
        objective.coefficients,
        tx,
        schedule,
        seed=config.seed if seed is None else seed,
        accumulate=config.accumulate,
        guard_factor=config.guard.factor,
        ema=config.optim.ema,
        average_from=average_from,
    )


def make_evaluate(objective: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Build evaluate(params, batch) -> the sums and weights of an objective's terms."""
    return step.make_eval_step(objective.sums, objective.weights, objective.evaluate)


def fill_up(tables: Any, parts: int) -> dict[str, jax.Array]:
    """Create zero tables with padded rows, so that devices share them evenly.

    tables: their shapes; parts: the number of devices (models/nearest.py).
    """
    wide = {}
    for name, table in tables.items():
        n, *rest = table.shape
        shape = parts * split_rows(n, parts)[0], *rest
        wide[name] = jnp.zeros(shape, table.dtype)
    return wide


def make_update(
    config: ConfigDict,
    objective: Any,
    mesh: Any,
    warmup: int,
    total: int,
    decay: int = 0,
    tail: int = 0,
) -> Update:
    """Build the optimizer, state layout and update; durations are in steps (make_tx).

    tail: the last updates of the run, whose parameters are averaged (optim.average).
    Raises UserError if the config does not fit the objective or the mesh.
    """
    check_whole_batch(config, objective, mesh)
    check_average(tail, total)
    # The devices of a topology (preflight) are not attached to this machine.
    is_abstract = isinstance(mesh, AbstractMesh)
    backend = "" if is_abstract else mesh.devices.flat[0].platform
    schedule, tx = make_tx(config, warmup, total, decay, backend=backend)

    def init() -> Any:
        return objective.init(jax.random.key(config.seed))

    def init_teacher() -> Any:
        return objective.init_teacher(jax.random.key(config.seed))

    def init_tables() -> Any:
        return fill_up(objective.tables, mesh.shape["data"] * mesh.shape["fsdp"])

    taught = init_teacher if objective.init_teacher else None
    read = init_tables if objective.tables else None
    watch, ema = config.guard, config.optim.ema
    guarded = watch.nonfinite == "skip" or watch.factor > 0
    params = jax.eval_shape(init)
    freeze = frozen.frozen_sizes(params, read_freeze(config.optim.freeze))
    averages_tail = durations.unit_of(config, "optim.average")[1] > 0
    kinds = guarded, ema > 0, averages_tail, freeze, taught, read
    shapes, shardings = state.plan_state(init, tx, mesh, objective.shardings, *kinds)
    places = param_shardings(params, mesh, objective.shardings)
    update = make_function(config, objective, tx, schedule, average_from=total - tail)
    one, many = (
        # Donate the state, and keep its shardings.
        jax.jit(function, donate_argnums=0, out_shardings=(shardings, None))
        for function in (update, multi_step.many_steps(update))
    )
    params = state.with_shardings(params, places)
    return Update(init, tx, shapes, shardings, one, many, params, freeze, taught)

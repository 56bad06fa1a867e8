# SPDX-License-Identifier: Apache-2.0
"""From a config to the update of a run: its schedule, optimizer, intervals, step.

jax is imported only where it is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax import config as c
from bertjax.data import phases
from bertjax.tasks import prepare as tasks
from bertjax.training import best


def cost(objective: Any, stage: Any) -> tuple[int, float]:
    """Return a step's slots, and its forward and backward FLOPs; 0 of unknown ones."""
    each = objective.flops(stage.length, stage.P) if objective.flops else 0.0
    return stage.slots, stage.slots * each


def no_mfu(config: ConfigDict) -> str:
    """Say why there is no MFU of an objective that does not say its FLOPs."""
    return (
        f"no MFU: objective={config.objective} does not say its FLOPs (Head.flops, "
        "docs/add_an_objective.md)"
    )


def check_whole_batch(config: ConfigDict, objective: Any, mesh: Any) -> None:
    """Refuse what parts the rows that an objective compares with each other."""
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


def eval_rows(config: ConfigDict, objective: Any) -> int:
    """Return the rows of a batch of evaluations: as many as fit in memory at once, or
    what an objective that compares them wants."""
    return objective.whole_batch or config.batch_size // config.accumulate


class Update(NamedTuple):
    """The update of a config: `step(state, batch) -> (state, metrics)`, jitted.

    many: several in a call (training/dispatch.py), jitted too. init() -> parameters, tx
    the optax transform, shapes and shardings of the state.
    """

    init: Callable[[], Any]
    tx: Any
    shapes: Any
    shardings: Any
    step: Any
    many: Any


def make_tx(
    config: ConfigDict, warmup: int, total: int, decay: int = 0, lr: Any = None
) -> tuple[Any, Any]:
    """Make the schedule and the optax transform; durations are in steps.

    decay: the length of the last part of schedules that have one. lr: instead of the
    config's. Raises UserError for settings that do not go together.
    """
    from bertjax.training import optim, schedules

    o = config.optim
    schedule = schedules.make_schedule(
        o.schedule, o.lr if lr is None else lr, warmup, total, decay, o.power
    )
    settings = {k: o[k] for k in ("wd", "b1", "b2", "eps", "clip")}
    settings |= {k: o[k] for k in ("bias_correction", "layer_decay")}
    return schedule, optim.make_optimizer(o.name, schedule, **settings)


def intervals(config: ConfigDict, first: phases.Phase, total: int) -> dict[str, int]:
    """Return after how many steps a row, an evaluation, a checkpoint is due."""
    names = "log", "eval", "checkpoint"
    return {n: max(1, c.steps(config, f"{n}.every", first, total)) for n in names}


def schedule_lengths(
    config: ConfigDict, placed: Sequence[phases.Phase], total: int
) -> tuple[int, int, int]:
    """Return warm-up, decay and whole of the schedule, in steps or in its own SPAN."""
    from bertjax.training.schedules import SPAN

    span = total if config.budget_minutes is None else SPAN

    def length(name: str, end: bool) -> int:
        return phases.steps_within(*c.unit_of(config, name), placed, span, end)

    return length("optim.warmup", False), length("optim.decay", True), span


def make_function(
    config: ConfigDict, objective: Any, tx: Any, schedule: Any, seed: Any = None
) -> Callable[..., Any]:
    """Make update(state, batch) -> (state, metrics); seed: instead of the config's."""
    from bertjax.training import step

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
    )


def make_evaluate(objective: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Make evaluate(params, batch) -> the sums and weights of an objective's terms."""
    from bertjax.training import step

    return step.make_eval_step(objective.sums, objective.weights, objective.evaluate)


def make_update(
    config: ConfigDict,
    objective: Any,
    mesh: Any,
    warmup: int,
    total: int,
    decay: int = 0,
) -> Update:
    """Make optimizer, state layout and update; durations are in steps (make_tx).

    Raises UserError where the config does not go with the objective or the mesh.
    """
    import jax

    from bertjax.training import dispatch, state, step

    check_whole_batch(config, objective, mesh)
    schedule, tx = make_tx(config, warmup, total, decay)

    def init() -> Any:
        return objective.init(jax.random.key(config.seed))

    watch, ema = config.guard, config.optim.ema
    guarded = watch.nonfinite == "skip" or watch.factor > 0
    shapes, shardings = state.plan_state(
        init, tx, mesh, objective.shardings, guarded, averaged=ema > 0
    )
    update = make_function(config, objective, tx, schedule)
    one, many = (
        step.compile_train_step(function, shardings)
        for function in (update, dispatch.many_steps(update))
    )
    return Update(init, tx, shapes, shardings, one, many)


class Programs(NamedTuple):
    """What trains a group of n runs (training/members.py); axis 0 of all is the runs'.

    begin(seeds i32 [n]) -> states; advance(states, batches, seeds, rates f32 [n]) ->
    (states, metrics); evaluate(parameters, batch) -> sums, the batch one for all;
    shapes(n): of the arguments of `advance`.
    """

    begin: Any
    advance: Any
    evaluate: Any
    shapes: Callable[[int], tuple[Any, ...]]


def make_programs(
    config: ConfigDict,
    objective: Any,
    update: Update,
    lengths: tuple[int, int, int],
    rows: Mapping[str, np.ndarray],
    mesh: Any,
) -> Programs:
    """Make the programs of a sweep.

    lengths: as schedule_lengths has them; rows: a batch.
    """
    import jax

    from bertjax.parallel.sharding import batch_sharding
    from bertjax.training import members, state

    warmup, decay, span = lengths
    guarded = update.shapes.guard is not None

    def update_of(seed: Any, rate: Any) -> Any:
        schedule, tx = make_tx(config, warmup, span, decay, rate)
        return make_function(config, objective, tx, schedule, seed)

    def begin(seed: Any) -> state.State:
        params = objective.init(jax.random.key(seed))
        return state.make_state(params, update.tx, guarded)

    evaluate = make_evaluate(objective)
    where = members.stack(batch_sharding(mesh))

    def shapes(size: int) -> tuple[Any, ...]:
        def wide(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)

        states = jax.tree.map(wide, update.shapes, members.stack(update.shardings))
        each = [jax.ShapeDtypeStruct((size,), t) for t in (np.int32, np.float32)]
        return states, {k: wide(v, where) for k, v in rows.items()}, *each

    return Programs(
        members.make_begin(begin, update.shardings),
        members.make_step(update_of, update.shardings),
        jax.jit(members.over_runs(evaluate, (0, None))),
        shapes,
    )


def runs_at_once(
    programs: Programs, mesh: Any, runs: int, at_once: int | None = None
) -> int:
    """Return how many runs go at once: as many as the compiler says have room.

    at_once: at most so many instead. A CPU gains nothing by more than one.
    """
    import jax

    from bertjax.training import members

    def fits(size: int) -> bool:
        if at_once is not None:
            return size <= at_once
        device = mesh.devices.flat[0]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if device.platform == "cpu" or not limit:
            return False
        lowered = programs.advance.lower(*programs.shapes(size))
        try:
            made = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" in str(e):  # a TPU's compiler looks by itself
                return False
            raise
        need = made.memory_analysis()
        used = need.temp_size_in_bytes + need.argument_size_in_bytes
        others = (-(-runs // size) - 1) * need.output_size_in_bytes
        return used + others < 0.9 * limit

    with jax.set_mesh(mesh):
        return members.group_size(runs, fits)


def directions(objective: Any, params: Any, batches: Any) -> dict[str, bool]:
    """Return {loss: whether more of it is better} of the terms that are optimised.

    That is where its coefficient is negative. params: shapes; batches: of a phase.
    Everything is traced as a step does it, so that terms that do not go with each other
    and outputs by which a task's rows cannot be scored are refused here: UserError.
    """
    import jax

    batch = batches.batch(batches.start, slice(0, 1))
    losses = jax.eval_shape(objective.weights, batch)
    if objective.task_type:
        terms, found = jax.eval_shape(objective.evaluate, params, batch)
        tasks.check_outputs(objective.task_type, found)
    else:
        terms = jax.eval_shape(objective.sums, params, batch, None)
    if lost := sorted(losses.keys() - terms.keys()):
        raise UserError(
            f"objective: weights() names {', '.join(lost)}, which sums() does not "
            f"return; it returns {', '.join(terms)}"
        )
    if unknown := sorted(objective.coefficients.keys() - losses.keys()):
        raise UserError(
            f"objective: there are coefficients for {', '.join(unknown)}, which are no "
            f"losses; weights() names {', '.join(losses)}"
        )
    return {term: objective.coefficients.get(term, 1.0) < 0 for term in losses}


def make_judge(
    config: ConfigDict,
    objective: Any,
    params: Any,
    valid: Mapping[str, Any],
    path: Any,
    restored: int | None,
    greater_is_better: best.Known,
) -> best.Judge:
    """Make what tells the best evaluation (eval.best), as far as the run has come.

    params: shapes; valid: the batches of each validation set; greater_is_better: what
    `directions` returns. Without a name a task's first metric counts, else the loss
    that weighs most. Raises UserError for a score that there is none of.
    """
    import jax

    from bertjax.parallel import hosts

    asked, patience = config.eval.best, config.eval.patience
    if not asked and patience is None:
        return best.Judge("", None)
    batch = next(next(iter(valid.values())).eval_batches(1))
    terms = jax.eval_shape(objective.sums, params, batch, None)
    losses = jax.eval_shape(objective.weights, batch)
    weigh = objective.coefficients
    heaviest = sorted(losses, key=lambda term: -weigh.get(term, 1.0))
    names = {}
    for name, batches in valid.items():
        metrics = batches.plans[0].scores if tasks.is_task(config) else ()
        names[name] = [*dict.fromkeys([*metrics, *heaviest, *terms])]
    judge = best.Judge(best.choose(asked, names), patience, greater_is_better)
    if restored is not None:
        primary = hosts.is_primary()
        scores = primary and best.read(path, judge.metric, restored)
        judge.scores = hosts.from_primary(scores)
    return judge

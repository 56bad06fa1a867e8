# SPDX-License-Identifier: Apache-2.0
"""From a config to the update of a run: its schedule, optimizer, intervals, step.

jax is imported only where it is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections.config_dict import ConfigDict

from bertjax import config as c
from bertjax.data import phases


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


def make_update(
    config: ConfigDict,
    objective: Any,
    mesh: Any,
    warmup: int,
    total: int,
    decay: int = 0,
) -> Update:
    """Make optimizer, state layout and update; durations are in steps (make_tx)."""
    import jax

    from bertjax.training import dispatch, state, step

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

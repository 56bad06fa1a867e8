# SPDX-License-Identifier: Apache-2.0
"""The programs that train the runs of a sweep side by side."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax.assembly.train_step import Update, make_evaluate, make_function, make_tx


class Programs(NamedTuple):
    """What trains a group of n runs (stacked_runs.py); axis 0 of all is the runs'.

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
    from bertjax.sweeps import stacked_runs
    from bertjax.training import state

    warmup, span, decay = lengths
    guarded = update.shapes.guard is not None

    def update_of(seed: Any, rate: Any) -> Any:
        schedule, tx = make_tx(config, warmup, span, decay, rate)
        return make_function(config, objective, tx, schedule, seed)

    def begin(seed: Any) -> state.State:
        params = objective.init(jax.random.key(seed))
        return state.make_state(params, update.tx, guarded)

    evaluate = make_evaluate(objective)
    where = stacked_runs.stack(batch_sharding(mesh))

    def shapes(size: int) -> tuple[Any, ...]:
        def wide(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)

        states = jax.tree.map(wide, update.shapes, stacked_runs.stack(update.shardings))
        each = [jax.ShapeDtypeStruct((size,), t) for t in (np.int32, np.float32)]
        return states, {k: wide(v, where) for k, v in rows.items()}, *each

    return Programs(
        stacked_runs.make_begin(begin, update.shardings),
        stacked_runs.make_step(update_of, update.shardings),
        jax.jit(stacked_runs.over_runs(evaluate, (0, None))),
        shapes,
    )


def runs_at_once(
    programs: Programs, mesh: Any, runs: int, at_once: int | None = None
) -> int:
    """Return how many runs go at once: as many as the compiler says have room.

    at_once: at most so many instead. A CPU gains nothing by more than one.
    """
    import jax

    from bertjax.sweeps import stacked_runs

    def fits(size: int) -> bool:
        if at_once is not None:
            return size <= at_once
        device = mesh.devices.flat[0]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if device.platform == "cpu" or not limit:
            return False
        lowered = programs.advance.lower(*programs.shapes(size))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" in str(e):  # a TPU's compiler looks by itself
                return False
            raise
        need = compiled.memory_analysis()
        used = need.temp_size_in_bytes + need.argument_size_in_bytes
        others = (-(-runs // size) - 1) * need.output_size_in_bytes
        return used + others < 0.9 * limit

    with jax.set_mesh(mesh):
        return stacked_runs.group_size(runs, fits)

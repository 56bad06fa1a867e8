# SPDX-License-Identifier: Apache-2.0
"""Train many runs of one shape in one program: stack states, batches, seeds and rates.

The runs are divided into groups of one size, which the same compiled program processes
one by one. A group has a single run on a CPU, where more gain nothing; an accelerator
with enough memory has all runs in one group.

FOLDER/<group>/checkpoints/<step>     a group's states, for all groups at the same steps
FOLDER/best/checkpoints/<step>        the best parameters up to that step
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.assembly.train_step import make_evaluate, make_function, make_tx
from bertjax.assembly.training_run import TrainingRun
from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import Checkpoints, restore_params
from bertjax.parallel.sharding import batch_sharding
from bertjax.training.state import State, make_state, merge
from bertjax.training.step import add_sums, mean_on_host

T = TypeVar("T")


def stack(tree: Any) -> Any:
    """Add a leading axis that is not split to a tree of shardings."""
    return jax.tree.map(
        lambda leaf: NamedSharding(leaf.mesh, PartitionSpec(None, *leaf.spec)), tree
    )


def over_runs(
    one: Callable[..., Any], axes: Sequence[int | None]
) -> Callable[..., Any]:
    """Map `one` over the runs on axis 0; axes: jax.vmap's in_axes, 0 or None.

    A single run is computed without vmap, which would compute both sides of branches.
    """

    def run(*args: Any) -> Any:
        if len(jax.tree.leaves(args[0])[0]) > 1:
            return jax.vmap(one, axes)(*args)
        pairs = zip(args, axes, strict=True)
        results = one(*(arg if axis is None else take(arg, 0) for arg, axis in pairs))
        return jax.tree.map(lambda x: x[None], results)

    return run


class Programs(NamedTuple):
    """The jitted programs that train a group of n runs; axis 0 is always the runs'.

    begin(seeds i32 [n]) -> states; advance(states, batches, seeds, rates f32 [n]) ->
    (states, metrics), with the states donated; evaluate(parameters, batch) -> sums,
    with one batch for all; shapes(n): those of the arguments of `advance`.
    """

    begin: Any
    advance: Any
    evaluate: Any
    shapes: Callable[[int], tuple[Any, ...]]


def make_programs(run: TrainingRun) -> Programs:
    """Build the programs of a sweep; run: any of its runs, whatever the seed."""
    config, objective, update = run.config, run.objective, run.update
    warmup, span, decay, _ = run.lengths
    rows = run.batches.data.batch(0)
    guarded = update.shapes.guard is not None

    def begin(seed: Any) -> State:
        params = objective.init(jax.random.key(seed))
        return make_state(params, update.tx, guarded)

    def advance(state: State, batch: Any, seed: Any, rate: Any) -> Any:
        schedule, tx = make_tx(config, warmup, span, decay, rate)
        return make_function(config, objective, tx, schedule, seed)(state, batch)

    places, where = stack(update.shardings), stack(batch_sharding(run.mesh))

    def shapes(size: int) -> tuple[Any, ...]:
        def wide(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)

        states = jax.tree.map(wide, update.shapes, places)
        each = [jax.ShapeDtypeStruct((size,), t) for t in (np.int32, np.float32)]
        return states, {k: wide(v, where) for k, v in rows.items()}, *each

    return Programs(
        jax.jit(jax.vmap(begin), out_shardings=places),
        jax.jit(
            over_runs(advance, (0, 0, 0, 0)),
            donate_argnums=0,
            out_shardings=(places, None),
        ),
        jax.jit(over_runs(make_evaluate(objective), (0, None))),
        shapes,
    )


def runs_at_once(
    programs: Programs, mesh: Any, runs: int, at_once: int | None = None
) -> int:
    """Return how many runs to train at once: as many as fit, according to the compiler.

    at_once: the limit to use instead. A CPU gains nothing by more than one.
    """

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
            if "RESOURCE_EXHAUSTED" in str(e):  # a TPU's compiler checks memory itself
                return False
            raise
        need = compiled.memory_analysis()
        used = need.temp_size_in_bytes + need.argument_size_in_bytes
        others = (-(-runs // size) - 1) * need.output_size_in_bytes
        return used + others < 0.9 * limit

    with jax.set_mesh(mesh):
        return group_size(runs, fits)


def give_params(states: State, params: Any) -> State:
    """Replace leaves of all runs by those of `params`, the same for each run."""

    def spread(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (len(states.step), *leaf.shape))

    places = jax.tree.map(lambda x: x.sharding, states.params)
    params_of_runs = jax.jit(
        lambda own, given: merge(own, jax.tree.map(spread, given)), out_shardings=places
    )(states.params, params)
    return states._replace(params=params_of_runs)


def group_size(runs: int, fits: Callable[[int], bool]) -> int:
    """Return the size for the smallest number of equal groups that fit; at least 1.

    The last group may be padded (`fill`), by fewer runs than there are groups.

    >>> group_size(12, lambda n: n < 5), group_size(5, lambda n: n < 5)
    (4, 3)
    """
    sizes = dict.fromkeys(-(-runs // groups) for groups in range(1, runs))
    return next((n for n in sizes if fits(n)), 1)


def fill(runs: Sequence[T], size: int) -> list[T]:
    """Repeat the last run until all groups are full; the copies are not counted.

    >>> fill("abcde", 3)
    ['a', 'b', 'c', 'd', 'e', 'e']
    """
    return [*runs, *[runs[-1]] * (-len(runs) % size)]


def take(tree: Any, index: int) -> Any:
    """Return run `index` of a group."""
    return jax.tree.map(lambda x: x[index], tree)


def score(
    evaluate: Callable[[Any, Any], Any],
    groups: Sequence[Any],
    batches: Iterable[Mapping[str, Any]],
) -> list[tuple[dict[str, float], list[dict[str, np.ndarray]]]]:
    """Evaluate every run on the same batches: (means of terms, outputs) of each.

    evaluate(params of a group, batch) -> sums with a leading axis for the runs.
    """
    totals: list[dict[str, Any]] = [{} for _ in groups]
    outputs_of: list[list[Any]] = [[] for _ in groups]
    for batch in batches:
        for i, params in enumerate(groups):
            found = jax.device_get(evaluate(params, batch))
            outputs_of[i].append(found.pop("outputs", {}))
            add_sums(totals[i], found)
    out = []
    for total, outputs in zip(totals, outputs_of, strict=True):
        runs = len(jax.tree.leaves(outputs)[0])
        for run in range(runs):
            means = {k: mean_on_host(take(v, run)) for k, v in total.items()}
            out.append((means, [take(o, run) for o in outputs]))
    return out


class Groups:
    """All runs of a sweep, in groups that the same programs process one by one.

    runs: (seed, rate) of each. size: runs per group. keeps: whether to keep one run's
    parameters, `best`. `done`: the steps trained so far.
    """

    def __init__(
        self,
        programs: Any,
        runs: Sequence[tuple[int, float]],
        size: int,
        mesh: Any,
        folder: Any,
        keeps: bool,
    ) -> None:
        self.programs, self.runs, self.size = programs, runs, size
        self.filled = fill(runs, size)  # the last ones are copies, which nothing reads
        count = len(self.filled) // size
        self.parts = [slice(i * size, (i + 1) * size) for i in range(count)]
        seeds, rates = zip(*self.filled, strict=True)
        self.seeds = np.array(seeds, np.int32).reshape(-1, size)
        self.rates = np.array(rates, np.float32).reshape(-1, size)
        self.place = stack(batch_sharding(mesh))
        names = [*map(str, range(count)), *["best"] * keeps]
        self.saved = [Checkpoints(folder / name, 2, None) for name in names]
        self.keeps = keeps
        self.done = 0
        self.best: Any = None
        self.states: list[Any] = []
        self.longest: list[jax.Array] = []

    def begin(self, params: Any) -> None:
        """Begin at step 0; params: leaves to use instead of random ones, or {}.

        It deletes checkpoints that only some groups saved before a kill.
        """
        for one in self.saved:
            one.drop_after(0)
        self.states = [self.programs.begin(s) for s in self.seeds]
        if params:
            self.states = [give_params(s, params) for s in self.states]
        self._count([0] * len(self.runs))
        if self.keeps:
            self.best = self.params(0)

    def restore(self, step: int, streaks: Sequence[int]) -> None:
        """Resume after a saved step; delete later ones, which some groups may lack."""
        for one in self.saved:
            one.drop_after(step)
        wanted = self.programs.shapes(self.size)[0]
        groups = self.saved[: len(self.parts)]
        self.states = [one.restore(step, wanted) for one in groups]
        self._count(streaks)
        if self.keeps:
            self.best = restore_params(self.saved[-1].folder / str(step))
        self.done = step

    def _count(self, streaks: Sequence[int]) -> None:
        filled = np.array(fill(streaks, self.size), np.int32)
        self.longest = [jnp.array(filled[p]) for p in self.parts]

    @property
    def newest(self) -> int:
        """The last step at which everything is saved; 0 if there is none."""
        saved = [{*manifest.steps(one.workdir)} for one in self.saved]
        return max(set.intersection(*saved), default=0)

    @property
    def streaks(self) -> list[int]:
        """The longest series of skipped updates of each run."""
        counts = np.concatenate([*map(np.asarray, self.longest)])
        return counts[: len(self.runs)].tolist()

    @property
    def skipped(self) -> list[int]:
        """The number of skipped updates of each run."""
        counts = [np.asarray(s.guard.skipped) for s in self.states]
        return np.concatenate(counts)[: len(self.runs)].tolist()

    def going(self, ended: Collection[int]) -> list[int]:
        """Return the groups with a run that has not ended."""
        left = {i // self.size for i in range(len(self.runs)) if i not in ended}
        return sorted(left)

    def advance(self, batch: Mapping[str, np.ndarray], ended: Collection[int]) -> None:
        """Train a step; batch: for all `filled` runs, on axis 0."""
        for i in self.going(ended):
            fed = {k: v[self.parts[i]] for k, v in batch.items()}
            fed = jax.device_put(fed, self.place)
            self.states[i], metrics = self.programs.advance(
                self.states[i], fed, self.seeds[i], self.rates[i]
            )
            self.longest[i] = jnp.maximum(self.longest[i], metrics["streak"])
        self.done += 1

    def score(
        self, batches: Iterable[Mapping[str, Any]], ended: Collection[int]
    ) -> dict[int, Any]:
        """Evaluate each run that has not ended: {run: its result, as of `score`}."""
        groups = self.going(ended)
        params = [self.states[i].params for i in groups]
        found = score(self.programs.evaluate, params, batches)
        places = [i * self.size + k for i in groups for k in range(self.size)]
        known = {*range(len(self.runs))} - {*ended}
        scored = zip(places, found, strict=True)
        return {run: one for run, one in scored if run in known}

    def params(self, run: int) -> Any:
        """Return the parameters of a run as numpy arrays."""
        group, at = divmod(run, self.size)
        return jax.device_get(take(self.states[group].params, at))

    def save(self, meta: dict[str, Any]) -> None:
        """Save everything at this step; return once it is copied.

        Saving one group deletes an older checkpoint, which is still needed until the
        other groups' saves are written.
        """
        for one in self.saved:
            one.wait()
        states = [*self.states, *[{"params": self.best}] * self.keeps]
        for one, state in zip(self.saved, states, strict=True):
            one.save(self.done, state, meta)

    def close(self) -> None:
        """Finish the saves in progress."""
        for one in self.saved:
            one.close()

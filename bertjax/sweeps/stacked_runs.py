# SPDX-License-Identifier: Apache-2.0
"""Many runs of one shape in one program: states, batches, seeds and rates stacked.

The runs are dealt out to groups of one size, which the same compiled program goes
through one by one: a group of one where nothing is gained by more (a CPU), all in one
group where an accelerator has room for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.training.state import State
from bertjax.training.step import add_sums, mean_on_host

T = TypeVar("T")
Update = Callable[[State, Mapping[str, jax.Array]], tuple[State, dict[str, jax.Array]]]


def stack(tree: Any) -> Any:
    """Give shardings, or shapes with them, a leading axis that is not split."""

    def one(leaf: NamedSharding) -> NamedSharding:
        return NamedSharding(leaf.mesh, PartitionSpec(None, *leaf.spec))

    return jax.tree.map(one, tree)


def over_runs(
    one: Callable[..., Any], axes: Sequence[int | None]
) -> Callable[..., Any]:
    """Map `one` over the runs that are axis 0 of the first argument.

    axes: as jax.vmap has in_axes, 0 or None. A single run is computed as it is: mapped,
    it would compute both sides of its branches.
    """

    def run(*args: Any) -> Any:
        if len(jax.tree.leaves(args[0])[0]) > 1:
            return jax.vmap(one, axes)(*args)
        pairs = zip(args, axes, strict=True)
        results = one(*(arg if axis is None else take(arg, 0) for arg, axis in pairs))
        return jax.tree.map(lambda x: x[None], results)

    return run


def make_step(update_of: Callable[[Any, Any], Update], shardings: State) -> Any:
    """Make step(states, batches, seeds, rates) -> (states, metrics), jitted.

    update_of(seed i32 [], rate f32 []) is the update of one run; everything else has a
    leading axis of the group's runs. The states are donated.
    """

    def one(state: State, batch: Any, seed: Any, rate: Any) -> Any:
        return update_of(seed, rate)(state, batch)

    places = (stack(shardings), None)
    mapped = over_runs(one, (0, 0, 0, 0))
    return jax.jit(mapped, donate_argnums=0, out_shardings=places)


def make_begin(begin: Callable[[Any], State], shardings: State) -> Any:
    """Make begin(seeds i32 [g]) -> states, jitted; begin(seed) is of one run."""
    return jax.jit(jax.vmap(begin), out_shardings=stack(shardings))


def give_params(states: State, params: Any) -> State:
    """Put the leaves of `params`, the same for all runs, in the place of their own."""

    def one(own: Any, given: Any) -> Any:
        if not isinstance(own, dict):
            return given
        return {k: one(v, given[k]) if k in given else v for k, v in own.items()}

    def spread(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (len(states.step), *leaf.shape))

    places = jax.tree.map(lambda x: x.sharding, states.params)
    params_of_runs = jax.jit(
        lambda own, given: one(own, jax.tree.map(spread, given)), out_shardings=places
    )(states.params, params)
    return states._replace(params=params_of_runs)


def group_size(runs: int, fits: Callable[[int], bool]) -> int:
    """Return the size of as few equal groups as fit; 1 whether it does or not.

    The last group may be filled up (`fill`), by fewer runs than there are groups.

    >>> group_size(12, lambda n: n < 5), group_size(5, lambda n: n < 5)
    (4, 3)
    """
    sizes = dict.fromkeys(-(-runs // groups) for groups in range(1, runs))
    return next((n for n in sizes if fits(n)), 1)


def fill(runs: Sequence[T], size: int) -> list[T]:
    """Repeat the last run until all groups are full: those that follow count for none.

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
    """Evaluate every run on the same batches: (means of the terms, outputs) of each.

    evaluate(params of a group, batch) -> sums with a leading axis of the runs.
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

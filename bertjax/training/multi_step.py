# SPDX-License-Identifier: Apache-2.0
"""Several updates per call of the devices, for calls that cost more than updates."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax import UserError, counted
from bertjax.parallel.feed import put
from bertjax.parallel.sharding import batch_sharding
from bertjax.training.state import State

Metrics = dict[str, jax.Array]
Update = Callable[[State, Mapping[str, jax.Array]], tuple[State, Metrics]]


class Calls(NamedTuple):
    """The number of updates per call: at most `most`, and never past an ending step.

    Calls end at multiples of `every`, where something is due; at `starts`, where the
    shapes of batches change; and at `total`. So a resumed run makes the same calls.
    """

    most: int
    total: int
    every: tuple[int, ...]
    starts: tuple[int, ...]

    def size(self, step: int) -> int:
        """Return the number of updates in the call that follows `step` updates."""
        ends = [n - step % n for n in self.every]
        ends += [s - step for s in (*self.starts, self.total) if s > step]
        return min(self.most, *ends)

    def sizes(self, step: int) -> Iterator[int]:
        """Yield the sizes of all calls after `step` updates."""
        while step < self.total:
            yield self.size(step)
            step += self.size(step)

    def check(self) -> None:
        """Raise UserError for more updates per call than log.every and others allow."""
        if self.most > min(self.every):
            raise UserError(
                f"steps_per_call={self.most} is more than the "
                f"{counted(min(self.every), 'step')} of log.every, eval.every or "
                "checkpoint.every, where each call ends"
            )


def many_steps(update: Update) -> Update:
    """Return many(state, batches) -> (state, metrics [most]), which loops over updates.

    batches: from `to_devices`. The number of updates, `count`, is data, so one program
    serves calls of all sizes, and an update computes the same bits in each of them.
    Rows of metrics from `count` on are 0. `stop` (feed.with_flag) is for the whole
    call.
    """

    def many(state: State, batches: Mapping[str, jax.Array]) -> tuple[State, Metrics]:
        batches = dict(batches)
        count, stop = batches.pop("count"), batches.pop("stop", None)
        # The loop does not carry `frozen`, because no update changes it.
        frozen, state = state.frozen, state._replace(frozen=None)

        def one(state: State, i: Any) -> tuple[State, Metrics]:
            state, metrics = update(state._replace(frozen=frozen), batch(i))
            return state._replace(frozen=None), metrics

        def batch(i: Any) -> dict[str, jax.Array]:
            return {
                name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
                for name, x in batches.items()
            }

        def body(i: jax.Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, rows = carry
            state, metrics = one(state, i)
            return state, jax.tree.map(lambda r, m: r.at[i].set(m), rows, metrics)

        most = len(batches["input_ids"])
        _, shapes = jax.eval_shape(lambda: one(state, 0))
        rows = {k: jnp.zeros((most, *s.shape), s.dtype) for k, s in shapes.items()}
        state, rows = jax.lax.fori_loop(0, count, body, (state, rows))
        if stop is not None:
            rows["stop"] = jnp.full(most, jnp.sum(stop))
        return state._replace(frozen=frozen), rows

    return many


def call_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a call's arrays, [most, batch_size, ...]."""
    return NamedSharding(mesh, P(None, *batch_sharding(mesh).spec))


def to_devices(
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    batch_sizes: Iterable[int],
    counts: Iterable[int],
    most: int,
) -> Iterator[dict[str, jax.Array]]:
    """Convert the host batches of each call to global arrays [most, batch_size, ...].

    Otherwise it is like feed.to_devices. A call of fewer than `most` updates is padded
    with copies of its last batch, which are not used; `count`, i32 [], is the number of
    updates.
    """
    where, everywhere = call_sharding(mesh), NamedSharding(mesh, P())
    batches, batch_sizes = iter(batches), iter(batch_sizes)
    for count in counts:
        some = [*itertools.islice(batches, count)]
        size, *_ = itertools.islice(batch_sizes, count)
        some += some[-1:] * (most - count)
        call = {}
        for name in some[0]:
            rows = np.stack([batch[name] for batch in some])
            call[name] = put(where, rows, (most, size, *rows.shape[2:]))
        yield call | {"count": put(everywhere, np.array(count, np.int32), ())}


def rows(metrics: Mapping[str, np.ndarray], count: int) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each of a call's updates as Python numbers."""
    for i in range(count):
        yield {k: (v[i] if v.ndim else v).item() for k, v in metrics.items()}

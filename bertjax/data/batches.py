# SPDX-License-Identifier: Apache-2.0
"""Create batch number `step`, a pure function of (config, seed, step).

Nothing here keeps state between batches. A step is mapped to its phase and to rows of
the run by arithmetic; a row is mapped to (component, example) by arithmetic and a
seeded bijection; all other draws are addressed by (seed, epoch, example). So seeking
costs nothing, and a batch does not depend on row selection, hosts, threads, prefetching
or the engine.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertjax import counted
from bertjax.data import counter_rng
from bertjax.data.features.base import (
    Batch,
    Features,
    GatheredRows,
    Spec,
    predictions,
)
from bertjax.data.mixture import Located, Mixture
from bertjax.data.sequences.plan import Plan, row_specs

Rows = slice | np.ndarray | None  # of the global batch; None: all
EVAL_SEED = 20181011  # the same for all runs, so that evaluations share their masks


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of one phase: B = `batch_size` rows, global over all hosts.

    `plans` are the mixture's components in its order; `features` is the host half of
    the objective; `specials` has pad_id, cls_id, sep_id and vocab_size, as a Tokenizer
    does. The phase covers the steps from `start` to before `end`; its first row is
    number `first` of the run. objective: that of the phase; "": the config's.
    ramp_start: the step at which a ramp of mask rates begins; None: start.

    Raises UserError if a store holds an id that is outside the vocabulary.
    """

    plans: tuple[Plan, ...]
    mixture: Mixture
    features: Features
    specials: Any
    batch_size: int
    seed: int
    start: int = 0
    first: int = 0
    end: int | None = None
    objective: str = ""
    ramp_start: int | None = None

    def __post_init__(self) -> None:
        for plan in self.plans:
            plan.check_ids(self.specials.vocab_size)

    @property
    def n(self) -> int:
        """The number of rows in an epoch."""
        return self.mixture.n

    @property
    def length(self) -> int:
        """L; task rows may be shorter than data.length, or hold several texts."""
        plan = self.plans[0]
        return self.features.length if isinstance(plan, Plan) else plan.length

    @property
    def slots(self) -> int:
        """The token slots of a batch: B x L, times the texts of a task row."""
        return self.batch_size * math.prod(self.specs["input_ids"].shape)

    @property
    def P(self) -> int:
        """The number of prediction slots in a row; 0 if no token is predicted."""
        return predictions(self.specs)

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        """Every array of a batch, except the `example_weights` of evaluations."""
        plan = self.plans[0]
        if isinstance(plan, Plan):
            return batch_specs(self.features, plan.max_segments, plan.pair_rule)
        row = plan.gather(np.zeros(1, int), np.zeros(1, np.uint64), self.specials)
        row_of_task = {k: Spec(a.shape[1:], a.dtype.name) for k, a in row.items()}
        return self.features.specs(row_of_task)

    @functools.cached_property
    def loss_weights(self) -> list[str]:
        """The names of the arrays that weigh predictions or divide a row's loss."""
        return [name for name, spec in self.specs.items() if spec.loss]

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """Create the rows `rows` (default: all) of batch `step`.

        Returns the arrays of `specs` by name, [b, ...].

        Worked example, n = 10, B = 4, step 3:

            row of the run   12 13 14 15
            epoch             1  1  1  1
            slot              2  3  4  5    -> permute(slot, 10, fold(seed, "order", 1))
        """
        return self.features.make(self.gathered(step, rows))

    def gathered(self, step: int, rows: Rows = None) -> GatheredRows:
        """Gather rows of batch `step`, the input of `features.make`."""
        return self._rows(step, rows)[1]

    def inspect(self, step: int) -> "Inspected":
        """Create batch `step` and return it with its inputs, for people to look at."""
        located, gathered = self._rows(step, None)
        drawn = [np.zeros(0, np.int64)]
        batch = self.features.make(gathered, drawn)
        truncated = np.zeros(self.batch_size, np.int64)
        for plan, rows in self._by_plan(located.component):
            example, keys = located.example[rows], located.keys[rows]
            truncated[rows] = plan.truncated(example, keys)
        return Inspected(
            located,
            gathered.arrays,
            batch,
            np.concatenate(drawn),
            truncated,
            self.features.count({**gathered.arrays, "keys": gathered.keys}, batch),
            self.features.predicted(batch),
            self.features.origin(batch),
        )

    def eval_batches(
        self, batch_size: int, examples: int | None = None, rows: Rows = None
    ) -> Iterator[Batch]:
        """Yield one pass in natural order over all examples, or a fixed subset of them.

        Draws depend on the example alone, never on batch size, run seed or host. The
        last batch is filled up with copies of its last row, whose loss weights are 0.
        `example_weights` f32 [b] is 0 for copies; for other rows it is the row's own
        weight (0 if it has no label), or 1. There must be a single component.
        """
        ids = self.eval_ids(examples)
        mine = np.arange(batch_size)[slice(None) if rows is None else rows]
        for low in range(0, len(ids), batch_size):
            real = low + mine < len(ids)
            example = ids[np.minimum(low + mine, len(ids) - 1)]
            keys = counter_rng.fold(EVAL_SEED, "eval", example)
            located = Located(np.zeros_like(example), example, keys)
            arrays = self._gather(located)
            gathered = GatheredRows(arrays, keys, place=example, index=mine)
            batch = self.features.make(gathered)
            known = batch.get("example_weights", np.float32(1))
            weights = batch["example_weights"] = real.astype(np.float32) * known
            for name in self.loss_weights:
                batch[name] *= weights.reshape(-1, *(1,) * (batch[name].ndim - 1))
            yield batch

    def eval_ids(self, examples: int | None) -> np.ndarray:
        """Return the examples of `eval_batches`: i64, ascending."""
        (plan,) = self.plans
        ids = np.arange(plan.n)
        if examples is not None and examples < plan.n:
            key = counter_rng.fold(EVAL_SEED, "subset")
            ids = np.sort(counter_rng.permute(ids[:examples], plan.n, key))
        return ids

    def score(
        self, outputs: Sequence[Mapping[str, np.ndarray]], examples: int | None
    ) -> dict[str, float]:
        """Compute the metrics of a model's outputs for the `eval_batches`, in order.

        All metrics are nan if an output is not finite: argmax over nan returns the
        first class, whose accuracy would look like a score.
        """
        ids = self.eval_ids(examples)
        whole = {k: np.concatenate([o[k] for o in outputs]) for k in outputs[0]}
        answers = {name: values[: len(ids)] for name, values in whole.items()}
        if not all(np.isfinite(values).all() for values in answers.values()):
            return dict.fromkeys(self.plans[0].scores, math.nan)
        return self.plans[0].score(answers, ids)

    def _by_plan(
        self, component: np.ndarray
    ) -> Iterator[tuple[Plan, slice | np.ndarray]]:
        if len(self.plans) == 1:
            yield self.plans[0], slice(None)
            return
        for k in np.unique(component):
            yield self.plans[k], np.flatnonzero(component == k)

    def _gather(self, located: Located) -> Batch:
        """Gather the rows before masking; `marks` are for the masking alone."""
        batch: Batch = {}
        for plan, rows in self._by_plan(located.component):
            part = plan.gather(located.example[rows], located.keys[rows], self.specials)
            if len(self.plans) == 1:
                return part
            for name, values in part.items():
                if name not in batch:
                    shape = (len(located.component), *values.shape[1:])
                    batch[name] = np.empty(shape, values.dtype)
                batch[name][rows] = values
        return batch

    def _rows(self, step: int, rows: Rows) -> tuple[Located, GatheredRows]:
        """Locate and gather rows of batch `step`."""
        index = np.arange(self.batch_size)[slice(None) if rows is None else rows]
        place = self.first + (step - self.start) * self.batch_size + index
        located = self.mixture.locate(self.seed, place)
        ramp = self.start if self.ramp_start is None else self.ramp_start
        steps = max((self.end or 0) - ramp, 1)
        progress = min((step - ramp) / steps, 1.0)
        arrays = self._gather(located)
        return located, GatheredRows(arrays, located.keys, place, index, progress)


class Inspected(NamedTuple):
    """A batch and how it was created.

    gathered: the batch before masking; drawn: the length in units of each group of
    units that was chosen as one; truncated: the tokens that each row had no room for,
    i64 [B]. counts, predicted, origin: the results of the features' `count`,
    `predicted` and `origin`.
    """

    located: Located
    gathered: Batch
    batch: Batch
    drawn: np.ndarray
    truncated: np.ndarray
    counts: dict[str, float]
    predicted: np.ndarray
    origin: np.ndarray | None


@dataclass(frozen=True, eq=False)
class PhasedBatches:
    """The batches of a whole run: one `Batches` per phase, ordered by `start`."""

    stages: tuple[Batches, ...]

    def at(self, step: int) -> Batches:
        """Return the phase that step belongs to."""
        return [s for s in self.stages if s.start <= step][-1]

    def lines(self) -> Iterator[str]:
        """Yield one line per phase, for people."""
        for stage in self.stages:
            what = stage.features.describe()
            rows = counted(stage.batch_size, "row")
            yield (
                f"from step {stage.start:,}: {rows} of {stage.n:,} per step, "
                f"each of {stage.length} tokens" + f", {what}" * bool(what)
            )

    def batch(self, step: int, rows: Callable[[int], Rows] | None = None) -> Batch:
        """Create batch `step`; rows(batch size) selects its rows."""
        stage = self.at(step)
        return stage.batch(step, rows and rows(stage.batch_size))


def batch_specs(
    features: Features, max_segments: int | None, pair_rule: str | None
) -> dict[str, Spec]:
    """Return every array of a batch of text; the arguments are those of a Plan."""
    gathered = row_specs(features.raw, max_segments, pair_rule, features.streams)
    return features.specs({name: Spec(*array) for name, array in gathered.items()})


def batch_sha256(batch: Mapping[str, np.ndarray]) -> str:
    """Hash a global batch: names, types, shapes and values, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()

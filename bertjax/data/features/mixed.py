# SPDX-License-Identifier: Apache-2.0
"""Several host halves in one batch, each for its own rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.features import base
from bertjax.data.features.base import Batch, Features, GatheredRows, Settings, Spec


class MixedFeatures(Features):
    """Rows come in groups; the first rows of each group are of the first kind, and so
    on.

    Row r of a batch is number (r // rows) % group of its group, where rows = accumulate
    and group is its size: a micro-batch takes every accumulate-th row and so has whole
    groups. An array that a kind does not create is 0 in the rows of that kind, where it
    has no weight; position_ids count from 0 there, and text_tokens counts all real
    tokens.

    "mntp*2+clm*1" in batches of 6:

        row            0     1    2     3     4    5
        kind        mntp  mntp  clm  mntp  mntp  clm
    """

    def __init__(
        self, name: str, parts: Sequence[tuple[Features, int]], settings: Settings
    ) -> None:
        super().__init__(settings)
        self.parts = [part for part, _ in parts]
        self.kinds = np.repeat(np.arange(len(parts)), [n for _, n in parts])
        self.rows = settings.rows
        self.keys = frozenset().union(*(part.keys for part in self.parts))
        self.streams = frozenset().union(*(part.streams for part in self.parts))
        raw = {part.raw for part in self.parts}
        if len(raw) > 1:
            raise UserError(
                f"objective: the parts of {name} plan rows of {sorted(raw)} tokens of "
                "text: only those of one length can be mixed"
            )

    @property
    def raw(self) -> int:
        return self.parts[0].raw

    def specs(self, gathered: base.Specs) -> dict[str, Spec]:
        merged: dict[str, Spec] = {}
        for part in self.parts:
            for name, spec in part.specs(gathered).items():
                if merged.setdefault(name, spec) != spec:
                    raise UserError(
                        f"objective: two parts of a mixture make {name} of shapes "
                        f"{merged[name].shape} and {spec.shape}"
                    )
        return merged

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        kind = self._kind(rows.index)
        batch: Batch = {}
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(kind == number)
            arrays = part.make(take_rows(rows, own), drawn)
            for name, values in arrays.items():
                if name not in batch:
                    shape = len(kind), *values.shape[1:]
                    batch[name] = np.zeros(shape, values.dtype)
                    batch[name][:] = self._usual(name, rows)
                batch[name][own] = values
        return batch

    def _usual(self, name: str, rows: GatheredRows) -> Any:
        """Return the default of an array, for rows of kinds that do not create it."""
        if name == "position_ids":
            return np.arange(self.parts[0].length)
        if name == "text_tokens":
            return rows.arrays["attention_mask"].sum(axis=1)
        return 0

    def describe(self) -> str:
        shares = np.bincount(self.kinds)
        each = zip(shares, self.parts, strict=True)
        return "; ".join(f"{n} of {len(self.kinds)}: {p.describe()}" for n, p in each)

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        counts: dict[str, float] = {}
        for own, part in self._parts(len(after["input_ids"])):
            each = ({k: v[own] for k, v in batch.items()} for batch in (before, after))
            for name, count in part.count(*each).items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def predicted(self, batch: Batch) -> np.ndarray:
        out = np.zeros(batch["input_ids"].shape, bool)
        for own, part in self._parts(len(out)):
            out[own] = part.predicted({k: v[own] for k, v in batch.items()})
        return out

    def _kind(self, index: np.ndarray) -> np.ndarray:
        return self.kinds[index // self.rows % len(self.kinds)]

    def _parts(self, b: int) -> list[tuple[np.ndarray, Features]]:
        """Return the rows of each kind in a whole batch."""
        kind = self._kind(np.arange(b))
        return [(np.flatnonzero(kind == n), p) for n, p in enumerate(self.parts)]


def take_rows(rows: GatheredRows, own: np.ndarray) -> GatheredRows:
    """Return some of the rows."""
    arrays = {name: values[own] for name, values in rows.arrays.items()}
    per_row = (values[own] for values in (rows.keys, rows.place, rows.index))
    return GatheredRows(arrays, *per_row, rows.progress)

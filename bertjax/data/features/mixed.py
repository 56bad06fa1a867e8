# SPDX-License-Identifier: Apache-2.0
"""Several host halves in one batch, each with rows of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.features import base
from bertjax.data.features.base import Batch, Features, GatheredRows, Settings, Spec


class MixedFeatures(Features):
    """Rows come in groups: of each group the first are of the first kind, and so on.

    Row r of a batch is number (r // rows) % group of its group, with rows = accumulate:
    a micro-batch takes every so many-th row, and has whole groups then. Arrays that a
    kind does not make are 0 in its rows, where they weigh nothing; positions count from
    0, and text_tokens are all real ones.

    Of "mntp*2+clm*1", batches of 6:

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
        """Return what stands for an array in rows of kinds that do not make it."""
        if name == "position_ids":
            return np.arange(self.parts[0].length)
        if name == "text_tokens":
            return rows.arrays["attention_mask"].sum(axis=1)
        return 0

    def describe(self) -> str:
        shares = np.bincount(self.kinds)
        each = zip(shares, self.parts, strict=True)
        return "; ".join(f"{n} of {len(self.kinds)}: {p.describe()}" for n, p in each)

    def tell(self, before: Batch, after: Batch) -> dict[str, float]:
        counts: dict[str, float] = {}
        for own, part in self._parts(len(after["input_ids"])):
            each = ({k: v[own] for k, v in batch.items()} for batch in (before, after))
            for name, count in part.tell(*each).items():
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
    """Take some of the rows."""
    arrays = {name: values[own] for name, values in rows.arrays.items()}
    per_row = (values[own] for values in (rows.keys, rows.place, rows.index))
    return GatheredRows(arrays, *per_row, rows.progress)

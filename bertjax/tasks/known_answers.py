# SPDX-License-Identifier: Apache-2.0
"""Look up the known answers to a graph's queries, by the given parts of the triple."""

import numpy as np

from bertjax.data.ragged import ramps
from bertjax.tasks.graphs import SIDES, Queries


class KnownAnswers:
    """The known answers to queries, the right answer included.

    Built from triples i32 [n, 3], which may repeat. width: a number greater than any in
    the triples and in queries.
    """

    def __init__(self, triples: np.ndarray, width: int) -> None:
        triples = np.unique(triples, axis=0).astype(np.int64)
        self.width = width
        self.sorted: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for side in SIDES.values():
            keys = self._keys(triples, side)
            order = np.argsort(keys, kind="stable")
            self.sorted[side] = keys[order], triples[order, side].astype(np.int32)

    def _keys(self, triples: np.ndarray, side: int) -> np.ndarray:
        """Return one number for the two given parts of each triple: i64 [n]."""
        first, last = (part for part in SIDES.values() if part != side)
        return triples[:, first].astype(np.int64) * self.width + triples[:, last]

    def ranges(self, queries: Queries) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of each query's answers in `sorted` of its side.

        The beginning and the end are i64 [n] each.
        """
        begin, end = np.zeros((2, len(queries.sides)), np.int64)
        for side, (keys, _) in self.sorted.items():
            mine = np.flatnonzero(queries.sides == side)
            wanted = self._keys(queries.triples[mine], side)
            begin[mine] = np.searchsorted(keys, wanted, "left")
            end[mine] = np.searchsorted(keys, wanted, "right")
        return begin, end

    def most(self, queries: Queries) -> int:
        """Return the largest number of known answers of a query, at least 1."""
        begin, end = self.ranges(queries)
        return int((end - begin).max(initial=1))

    def others(self, queries: Queries, width: int) -> np.ndarray:
        """Return the known answers to each query, except the right one: i32 [n, width].

        Other entries are -1.
        """
        out = self.share(queries, np.zeros(len(queries.sides), np.int64), width)
        out[out == queries.answers[:, None]] = -1
        return out

    def shares(self, queries: Queries, width: int) -> tuple[Queries, np.ndarray]:
        """Return each distinct query once per `width` of its answers.

        Also returns the number of the first answer of each share, i64 [n]. A query with
        5 answers and a width of 2 is returned three times: for the answers from 0, 2
        and 4 on.
        """
        begin, end = self.ranges(queries)
        same = np.stack([queries.sides, begin], axis=1)
        _, first = np.unique(same, axis=0, return_index=True)
        first = np.sort(first)
        count = -(-(end - begin)[first] // width)
        return queries.take(np.repeat(first, count)), ramps(count) * width

    def share(self, queries: Queries, first: np.ndarray, width: int) -> np.ndarray:
        """Return up to `width` known answers to each query, from first i64 [n] on.

        The result is i32 [n, width], padded with -1.
        """
        begin, end = self.ranges(queries)
        count = np.clip(end - begin - first, 0, width)
        row = np.repeat(np.arange(len(count)), count)
        column = ramps(count)
        at = (begin + first)[row] + column
        out = np.full((len(count), width), -1, np.int32)
        for side, (_, answers) in self.sorted.items():
            mine = queries.sides[row] == side
            out[row[mine], column[mine]] = answers[at[mine]]
        return out

# SPDX-License-Identifier: Apache-2.0
"""Pack sequences of any lengths into rows, decided once for the run.

The algorithms work on the histogram of lengths (Krell et al. 2021, arXiv 2107.02027):
equal rows are handled together, so that the cost depends on the number of different
lengths, not on the number of sequences. Best fit decreasing (Johnson 1973) is nearly
optimal if a row may hold enough sequences. If the cap on sequences binds, it leaves the
short ones for the end, in rows that reach the cap half empty; fair shares, which give
every row its share of the short sequences, then need fewer rows.
"""

import bisect
from typing import NamedTuple

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.ragged import ramps

WINDOW = 1 << 20  # sequences packed together: part of what decides a plan


class Placed(NamedTuple):
    """Sequences of one length placed into rows: `each` per row, from row `first` on."""

    length: int
    first: int
    rows: int
    each: int


def best_fit(counts: np.ndarray, length: int, cap: int) -> tuple[list[Placed], int]:
    """Place counts[l] sequences of every l <= `length` into rows of that length.

    A row holds at most `cap` sequences. Longer sequences come first, each into the
    fullest row with room for it. Returns what was placed, longest first, and the
    number of rows.

    Worked example (rows of 10; two sequences of 6, three of 4, one of 2):

    >>> placed, rows = best_fit(np.array([0, 0, 1, 0, 3, 0, 2]), 10, 8)
    >>> [tuple(p) for p in placed], rows
    ([(6, 0, 2, 1), (4, 0, 2, 1), (4, 2, 1, 1), (2, 2, 1, 1)], 3)
    """
    placed: list[Placed] = []
    free: list[int] = []  # the different amounts of space left, sorted
    alike: dict[int, list[tuple[int, int, int]]] = {}  # space: (first, rows, filled)
    total = 0

    def leave(space: int, first: int, rows: int, filled: int) -> None:
        if rows and space and filled < cap:
            if space not in alike:
                bisect.insort(free, space)
                alike[space] = []
            alike[space].append((first, rows, filled))

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            at = bisect.bisect_left(free, size)
            if at < len(free):
                space = free[at]
                first, rows, filled = alike[space].pop()
                if not alike[space]:
                    del alike[space], free[at]
            else:
                space, first, filled = length, total, 0
                rows = -(-left // min(length // size, cap))
                total += rows
            each = min(space // size, cap - filled)
            full = min(rows, left // each)
            some = left - full * each if full < rows else 0
            for alike_rows, many in ((full, each), (int(some > 0), some)):
                if alike_rows:
                    placed.append(Placed(size, first, alike_rows, many))
                    leave(space - many * size, first, alike_rows, filled + many)
                    first, rows = first + alike_rows, rows - alike_rows
                    left -= alike_rows * many
            leave(space, first, rows, filled)
    return placed, total


def fair_shares(counts: np.ndarray, length: int, cap: int) -> tuple[list[Placed], int]:
    """Place the same sequences, so that rows hold nearly equal numbers of them.

    A row should hold as many sequences as the remaining ones have per full row on
    average. It begins with the longest; each further sequence is the longest that
    leaves room for the rest of that number in the shortest length. Rows are repeated
    while the lengths last.

    Worked example (rows of 10, at most two sequences each; two each of 2, 3 and 7):

    >>> placed, rows = fair_shares(np.array([0, 0, 2, 2, 0, 0, 0, 2]), 10, 2)
    >>> [tuple(p) for p in placed], rows
    ([(7, 0, 2, 1), (3, 0, 2, 1), (2, 2, 1, 2)], 3)
    """
    left = counts.tolist()
    sizes = np.flatnonzero(counts).tolist()
    n, tokens = int(counts.sum()), int(counts @ np.arange(len(counts)))
    placed: list[Placed] = []
    total = 0
    while n:
        row: dict[int, int] = {}
        share = min(cap, round(n * length / tokens))
        filled, free, at, least = 0, length, len(sizes) - 1, sizes[0]
        while filled < cap and free >= least and at >= 0:
            more = max(share - filled, 1)
            limit = max(free - (more - 1) * least, least)
            at = bisect.bisect_right(sizes, limit, 0, at + 1) - 1
            size = sizes[at]
            # The next choice is the same until the falling limit excludes it.
            again = (limit - size) // (size - least) + 1 if size > least else free
            unused = left[size] - row.get(size, 0)
            each = min(unused, more, free // size, again)
            row[size] = row.get(size, 0) + each
            filled, free = filled + each, free - each * size
            at -= each == unused
        rows = min(left[size] // each for size, each in row.items())
        for size, each in row.items():
            placed.append(Placed(size, total, rows, each))
            left[size] -= rows * each
            n, tokens = n - rows * each, tokens - rows * each * size
            if not left[size]:
                del sizes[bisect.bisect_left(sizes, size)]
        total += rows
    return sorted(placed, key=lambda p: -p.length), total


def place(counts: np.ndarray, length: int, cap: int) -> tuple[list[Placed], int]:
    """Place sequences by best fit, or by fair shares if that needs fewer rows."""
    ways = best_fit(counts, length, cap), fair_shares(counts, length, cap)
    return min(ways, key=lambda placed_and_rows: placed_and_rows[1])


def pack(
    sizes: np.ndarray, length: int, cap: int, seed: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack one window of sequences; `sizes` [n <= WINDOW], each from 1 to `length`.

    Sequences of one length are shuffled before they are assigned. Returns how many
    sequences each row holds, i64 [rows], and their numbers, i64 [n], row after row,
    ascending within a row.
    """
    local = np.arange(len(sizes), dtype=np.uint64)
    noise = counter_rng.bits(counter_rng.fold(seed, "pack", window), local)
    order = sizes.astype(np.uint64) << 44 | noise >> 40 << 20 | local
    order = np.sort(order)[::-1] & (WINDOW - 1)
    placed, total = place(np.bincount(sizes), length, cap)
    _, first, rows, each = (np.array(column) for column in zip(*placed, strict=True))
    count = rows * each
    nth = ramps(count)
    row = np.repeat(first, count) + nth // np.repeat(each, count)
    dealt = np.sort(row.astype(np.uint64) << 20 | order) & (WINDOW - 1)
    return np.bincount(row, minlength=total), dealt.astype(np.int64)

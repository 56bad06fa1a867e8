# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data.sequences import packing
from bertjax.data.sequences.packing import best_fit, fair_shares, pack, place


def first_fit_decreasing(sizes, length, cap):
    """Count the rows that the textbook algorithm needs."""
    rows = []
    for size in sorted(sizes, reverse=True):
        for row in rows:
            if sum(row) + size <= length and len(row) < cap:
                row.append(size)
                break
        else:
            rows.append([size])
    return len(rows)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(3, 40),
    st.integers(1, 9),
    st.lists(st.integers(1, 40), min_size=1, max_size=120),
    st.integers(0, 3),
)
def test_every_sequence_is_in_one_row_that_holds_it(length, cap, sizes, seed):
    sizes = np.minimum(sizes, length)
    held, members = pack(sizes, length, cap, seed, 0)
    assert sorted(members.tolist()) == list(range(len(sizes)))
    assert held.sum() == len(sizes) and held.min() >= 1 and held.max() <= cap
    rows = np.split(members, np.cumsum(held)[:-1])
    assert all(sizes[row].sum() <= length for row in rows)
    assert all((np.diff(row) > 0).all() for row in rows)
    assert len(rows) <= first_fit_decreasing(sizes.tolist(), length, cap) * 1.2 + 1


@given(
    st.integers(3, 40),
    st.integers(1, 9),
    st.lists(st.integers(0, 30), min_size=2, max_size=40).filter(any),
    st.sampled_from([best_fit, fair_shares]),
)
def test_what_is_placed_is_what_there_was(length, cap, counts, way):
    counts = np.array([0, *counts[:length]])
    placed, total = way(counts, length, cap)
    assert [p.length for p in placed] == sorted(
        (p.length for p in placed), reverse=True
    )
    seen, fill, held = np.zeros_like(counts), np.zeros(total), np.zeros(total)
    for size, first, rows, each in placed:
        seen[size] += rows * each
        fill[first : first + rows] += size * each
        held[first : first + rows] += each
    assert (seen == counts).all()
    assert (fill <= length).all() and (held <= cap).all() and (held > 0).all()


@pytest.mark.parametrize(
    ("length", "mean", "cap"),
    [(128, 60, 8), (128, 20, 8), (512, 60, 32), (512, 150, 32), (128, 20, 100)],
)
def test_as_full_as_first_fit_decreasing(length, mean, cap):
    rng = np.random.default_rng(1)
    sizes = np.minimum(rng.geometric(1 / mean, 2000), length - 2) + 2
    rows = place(np.bincount(sizes), length, cap)[1]
    assert rows <= 1.02 * first_fit_decreasing(sizes.tolist(), length, cap)


@pytest.mark.parametrize(("length", "mean"), [(128, 20), (128, 14), (512, 30)])
def test_short_sequences_fill_rows_though_their_number_is_capped(length, mean):
    rng = np.random.default_rng(1)
    sizes = np.minimum(rng.geometric(1 / mean, 10_000), length - 2) + 2
    counts, cap = np.bincount(sizes), length // 16
    least = max(sizes.sum() / length, len(sizes) / cap)
    assert best_fit(counts, length, cap)[1] > 1.06 * least
    assert place(counts, length, cap)[1] < 1.02 * least


def test_rows_are_drawn_from_the_seed_and_the_window():
    sizes = np.arange(600) % 11 + 2

    def rows(*address):
        return [a.tolist() for a in pack(sizes, 32, 8, *address)]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(2, 0) != rows(2, 1)


def test_sequences_of_one_length_meet_at_random():
    """Partners in a row are not neighbors in the text: chi-square on the distance."""
    held, members = pack(np.full(1000, 5), 10, 4, 0, 0)
    assert (held == 2).all()
    apart = np.abs(members[::2] - members[1::2])
    law = 2 * (1000 - np.arange(1, 1000)) / (1000 * 999) * 500
    bins = np.arange(1, 1000) // 100
    observed = np.bincount(bins, np.bincount(apart, minlength=1000)[1:])
    expected = np.bincount(bins, law)
    assert ((observed - expected) ** 2 / expected).sum() < 28  # 9 degrees, p = 0.001


def test_a_row_takes_what_the_length_allows_in_any_number():
    """The cost depends on the lengths: 3 x 10^10 sequences are packed at once."""
    counts = np.zeros(129, np.int64)
    counts[[20, 64, 128]] = 10**10
    placed, total = place(counts, 128, 8)
    assert total == 10**10 + 10**10 // 2 + -(-(10**10) // 6)
    assert len(placed) < 10 and packing.WINDOW == 1 << 20

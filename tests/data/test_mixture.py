# SPDX-License-Identifier: Apache-2.0
"""Mixtures: shares follow the formula, and rows repeat only after all were seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bertjax import UserError
from bertjax.data import mixture
from bertjax.data.mixture import Mixture, make_mixture, mixture_shares, read_weights

SIZES = {"en": 900, "sw": 90, "gd": 10}


def test_shares_by_hand():
    """The published example: p = (.90, .09, .01), alpha 0.7, 0.5, 0.3."""
    for alpha, known in (
        (0.7, (0.805, 0.161, 0.034)),
        (0.5, (0.703, 0.222, 0.074)),
        (0.3, (0.568, 0.285, 0.147)),
        (1.0, (0.9, 0.09, 0.01)),
        (0.0, (1 / 3, 1 / 3, 1 / 3)),
    ):
        found = mixture_shares(SIZES, alpha=alpha)
        assert list(found.values()) == pytest.approx(known, abs=5e-4)
        slots = make_mixture(SIZES, alpha=alpha).slots
        assert np.abs(np.array(slots) / 1000 - known).max() < 1.5e-3
    assert make_mixture(SIZES).slots == (900, 90, 10)
    assert make_mixture(SIZES, weights=dict(en=1, sw=1, gd=2)).slots == (250, 250, 500)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.floats(0, 1))
def test_slots_meet_the_shares(sizes, alpha):
    named = {f"c{i}": n for i, n in enumerate(sizes)}
    made = make_mixture(named, alpha=alpha)
    shares = mixture_shares(named, alpha=alpha)
    assert min(made.slots) >= 1
    assert sum(sizes) <= made.n <= sum(sizes) + len(sizes)
    for name, slots in zip(named, made.slots, strict=True):
        assert abs(slots - shares[name] * sum(sizes)) <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 300)), min_size=1, max_size=5
    ),
    st.integers(0, 2**31),
)
def test_every_component_goes_through_all_its_rows(sizes_and_slots, seed):
    """In order of position, each pass holds each row once; an epoch has its slots."""
    sizes, slots = zip(*sizes_and_slots, strict=True)
    if len(sizes) == 1:
        slots = sizes
    made = Mixture(tuple(f"c{i}" for i in range(len(sizes))), sizes, slots)
    epochs = max(3, -(-2 * max(sizes) // min(slots)))  # two passes of each
    found = made.locate(seed, np.arange(epochs * made.n))
    for k, (size, slots_k) in enumerate(zip(sizes, slots, strict=True)):
        mine = found.component == k
        assert (mine.reshape(epochs, -1).sum(axis=1) == slots_k).all()
        passes = found.example[mine]
        whole = passes[: len(passes) // size * size].reshape(-1, size)
        assert len(whole) >= 2
        assert (np.sort(whole) == np.arange(size)).all()
        rest = passes[whole.size :]
        assert len(np.unique(rest)) == len(rest)
    assert len(np.unique(found.keys)) == found.keys.size


def test_a_small_component_repeats_only_after_all_of_it():
    made = make_mixture({"en": 100_000, "sw": 500}, alpha=0.3)
    found = made.locate(0, np.arange(made.n))
    drawn = found.example[found.component == 1]
    passes = drawn[: len(drawn) // 500 * 500].reshape(-1, 500)
    assert len(passes) > 30 and (np.sort(passes) == np.arange(500)).all()
    assert (passes[0] != passes[1]).any()


def test_positions_far_out_are_exact():
    """Products of row numbers exceed 64 bits."""
    made = make_mixture({"a": 2**39, "b": 2**39 - 1, "c": 1})
    position = 3 * made.n - 1 - np.arange(1000)
    found = made.locate(0, position)
    assert set(found.component) <= {0, 1, 2}
    begin, end = (
        made._count(np.zeros(1, np.uint64), np.array([p])) for p in (0, made.n)
    )
    assert not begin.any() and end.tolist() == [list(made.slots)]


def test_any_rows_in_any_order():
    made = make_mixture(SIZES, alpha=0.3)
    whole = made.locate(5, np.arange(4000))
    some = np.array([3999, 0, 1000, 17, 999])
    part = made.locate(5, some)
    for a, b in zip(part, whole, strict=True):
        assert (a == b[some]).all()


def test_batches_are_mixed():
    """Components mix randomly, but every block of 256 rows has the exact shares."""
    made = make_mixture(SIZES, alpha=0.3)
    order = made.locate(1, np.arange(1000 * 50)).component
    shares = np.array(made.slots) / made.n
    share = shares[1]
    counts = (order.reshape(-1, 100) == 1).sum(axis=1)
    # Batches of 100 are drawn without replacement from blocks of 256.
    assert 0.4 < counts.var() / (100 * share * (1 - share)) < 0.8
    table = np.zeros((3, 3))
    np.add.at(table, (order[:-1], order[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    for hosts in (2, 3, 8):  # each host reads every hosts-th row
        for host in range(hosts):
            drawn = np.bincount(order[host::hosts], minlength=3)
            assert stats.chisquare(drawn, shares * drawn.sum()).pvalue > 1e-3
    ends = np.flatnonzero(np.diff(order, append=-1))
    assert np.diff(ends, prepend=-1).max() < 30  # the longest run of one component


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("components", [2, 3, 40])
def test_every_window_has_the_shares(components, seed):
    sizes = {f"c{k}": 20_000 // (k + 1) for k in range(components)}
    made = make_mixture(sizes, alpha=0.5)
    order = made.locate(seed, np.arange(2 * made.n)).component
    for k, slots in enumerate(made.slots):
        seen = np.append(0, np.cumsum(order == k))
        off = seen[1024:] - seen[:-1024] - 1024 * slots / made.n
        assert np.abs(off).max() < 40
        # Within an epoch no component is ever far behind or ahead.
        ahead = seen - np.arange(len(seen)) * slots / made.n
        assert np.abs(ahead).max() < 35 and np.abs(ahead[:: made.n]).max() == 0


def test_another_seed_is_another_order():
    made = make_mixture(SIZES, alpha=0.3)
    a, b = (made.locate(seed, np.arange(1000)).component for seed in (1, 2))
    assert (a != b).any()


def test_lines_say_the_shares():
    assert make_mixture({"train": 5}).lines() == []
    first, *_ = make_mixture(SIZES, alpha=0.0).lines()
    assert "en: 900 rows" in first and "90.00% of the text" in first
    assert "33.4" in first


@pytest.mark.parametrize(
    "text, word",
    [("a=1,b", "'b'"), ("a=x", "'a=x'"), ("a=0", "above 0"), ("a=1,a=2", "twice"),
     ("a=inf", "above 0"), ("a=nan", "above 0"), ("a=-1", "above 0")],
)  # fmt: skip
def test_bad_weights(text, word):
    with pytest.raises(UserError, match=word):
        read_weights(text)


def test_weights_and_names():
    assert read_weights(" wiki = 3, novels=1 ") == {"wiki": 3.0, "novels": 1.0}
    assert read_weights("") == {}
    with pytest.raises(UserError, match=r"did you mean 'gd'"):
        make_mixture(SIZES, weights=dict(en=1, sw=1, gdd=1))
    with pytest.raises(UserError, match="no weight for gd"):
        make_mixture(SIZES, weights=dict(en=1, sw=1))


def test_languages_need_their_validation_set():
    mixture.check_names(["en", "sw"], ["sw", "en", "de"], 0.3)
    mixture.check_names(["en", "sw"], ["valid"], 0.3)
    mixture.check_names(["en", "sw"], [], 0.3)
    mixture.check_names(["wiki", "novels"], ["wiki"], None)
    with pytest.raises(UserError, match="no text for sw"):
        mixture.check_names(["en", "sw"], ["en"], 0.3)

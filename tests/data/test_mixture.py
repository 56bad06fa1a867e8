# SPDX-License-Identifier: Apache-2.0
"""Mixtures: shares by the formula, no row twice before all were seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bertjax import UserError
from bertjax.data import mixture
from bertjax.data.mixture import make_mixture, mixture_shares, read_weights

SIZES = {"en": 900, "sw": 90, "gd": 10}


def test_shares_by_hand():
    """The example of the literature: p = (.90, .09, .01), alpha 0.7, 0.5, 0.3."""
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


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_every_component_goes_through_all_its_rows(sizes, alpha, seed):
    """In an epoch: exactly its slots, and no row again before all were seen."""
    made = make_mixture({f"c{i}": n for i, n in enumerate(sizes)}, alpha=alpha)
    found = made.locate(seed, np.arange(3 * made.n))
    for k, (size, slots) in enumerate(zip(made.sizes, made.slots, strict=True)):
        mine = found.component == k
        per_epoch = mine.reshape(3, -1).sum(axis=1)
        assert (per_epoch == slots).all()
        seen = np.bincount(found.example[mine], minlength=size)
        assert seen.max() - seen.min() <= 1
    assert len(np.unique(found.keys)) == found.keys.size


def test_any_rows_in_any_order():
    made = make_mixture(SIZES, alpha=0.3)
    whole = made.locate(5, np.arange(4000))
    some = np.array([3999, 0, 1000, 17, 999])
    part = made.locate(5, some)
    for a, b in zip(part, whole, strict=True):
        assert (a == b[some]).all()


def test_batches_are_mixed():
    """The components of a batch of 100 vary as by chance, not in blocks."""
    made = make_mixture(SIZES, alpha=0.3)
    found = made.locate(1, np.arange(1000 * 50)).component.reshape(-1, 100)
    share = made.slots[1] / made.n
    counts = (found == 1).sum(axis=1)
    # Without replacement within an epoch of ten batches: a little below binomial.
    assert 0.7 < counts.var() / (100 * share * (1 - share)) < 1.1
    order = found.reshape(-1)
    table = np.zeros((3, 3))
    np.add.at(table, (order[:-1], order[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


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
    with pytest.raises(UserError, match="give one of them"):
        make_mixture(SIZES, weights=dict(en=1, sw=1, gd=1), alpha=0.3)


def test_languages_need_their_validation_set():
    mixture.check_names(["en", "sw"], ["sw", "en", "de"], 0.3)
    mixture.check_names(["en", "sw"], ["valid"], 0.3)
    mixture.check_names(["en", "sw"], [], 0.3)
    mixture.check_names(["wiki", "novels"], ["wiki"], None)
    with pytest.raises(UserError, match="no text for sw"):
        mixture.check_names(["en", "sw"], ["en"], 0.3)

# SPDX-License-Identifier: Apache-2.0
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bertjax.data.counter_rng import below, binomial_half, bits, fold, permute, uniform


def fits(observed, expected=None):
    return stats.chisquare(np.ravel(observed), expected).pvalue > 1e-4


def test_golden_values():
    """Every stored batch hash depends on these bits: they must never change."""
    key = fold(17, 3, "mask", 2**63)
    assert int(fold(7)) == 7
    assert hex(key) == "0xe72bcb6c043b7a44"
    assert [hex(b) for b in bits(key, np.arange(3))] == [
        "0x2ff97726900a899",
        "0x57c7deb457db2f92",
        "0xb5316912025578a7",
    ]
    assert below(key, np.arange(6), 1000).tolist() == [11, 342, 707, 668, 928, 857]
    assert uniform(key, 0) == 0.011712518150491236
    assert binomial_half(np.full(4, key), np.array([0, 1, 64, 1000])).tolist() == [
        0,
        0,
        29,
        505,
    ]
    assert permute(np.arange(7), 7, key).tolist() == [5, 2, 3, 4, 1, 6, 0]
    assert permute(np.arange(3), 10**6, key).tolist() == [291941, 24835, 845222]


def test_no_warnings_and_scalars():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.ndim(fold(2**64 - 1, "a", -1)) == 0
        assert np.ndim(bits(fold(1), 5)) == 0
        assert bits(fold(0, np.arange(4))[:, None], np.arange(3)).shape == (4, 3)


def test_parts_and_their_order_matter():
    keys = [fold(0), fold(0, 0), fold(0, 0, 0), fold(0, 1, 2), fold(0, 2, 1)]
    keys += [fold(1), fold(0, "a"), fold(0, "b"), bits(fold(0), 0), bits(fold(0), 1)]
    assert len({int(k) for k in keys}) == len(keys)
    assert fold(5, 6, "x") == fold(fold(5, 6), "x")


@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_below_is_uniform_over_slots_and_over_keys(n):
    for draws in (
        below(fold(1, "slots"), np.arange(100_000), n),
        below(fold(np.arange(100_000), "keys"), 0, n),
    ):
        counts = np.bincount(draws, minlength=n)
        assert counts.size == n and fits(counts)


def test_below_reaches_the_whole_range_of_large_n():
    assert not below(3, np.arange(99), 1).any()
    draws = below(3, np.arange(50_000), 2**32)
    assert fits(np.histogram(draws, 64, (0, 2**32))[0])


def test_bits_are_fair_and_independent_between_neighbours():
    words = bits(fold(9, np.arange(300))[:, None], np.arange(300))
    for a in (words, words[1:] ^ words[:-1], words[:, 1:] ^ words[:, :-1]):
        flat = a.reshape(-1, 1) >> np.arange(64, dtype=np.uint64) & np.uint64(1)
        z = (flat.mean(0) - 0.5) * 2 * np.sqrt(len(flat))
        assert np.abs(z).max() < 5


def test_uniform_is_in_the_unit_interval_and_flat():
    u = uniform(fold(2), np.arange(100_000))
    assert u.min() >= 0 and u.max() < 1
    assert fits(np.histogram(u, 100, (0, 1))[0])


@pytest.mark.parametrize("k", [1, 5, 63, 64, 65, 200])
def test_binomial_half_follows_the_law(k):
    n = 40_000
    heads = binomial_half(fold(k, np.arange(n)), np.full(n, k))
    edges = np.arange(k + 2)
    expected = stats.binom.pmf(edges[:-1], k, 0.5) * n
    keep = expected > 5
    observed = np.bincount(heads, minlength=k + 1)
    observed = np.append(observed[keep], observed[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    if expected[-1] < 1e-9:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    assert fits(observed, expected * observed.sum() / expected.sum())


def test_binomial_half_rows_do_not_depend_on_each_other():
    keys, k = fold(4, np.arange(50)), np.arange(50) * 7 % 90
    alone = [binomial_half(keys[i : i + 1], k[i : i + 1])[0] for i in range(50)]
    assert binomial_half(keys, k).tolist() == alone


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000) | st.integers(3000, 30_000), seed=st.integers(0, 2**63))
def test_permute_is_a_bijection(n, seed):
    order = permute(np.arange(n), n, fold(seed, "order"))
    assert np.array_equal(np.sort(order), np.arange(n))


def test_permute_takes_one_key_for_each_index_and_large_n():
    keys = fold(0, "order", np.arange(5))
    each = [permute(i, 11, k) for i, k in enumerate(keys)]
    assert permute(np.arange(5), 11, keys).tolist() == each
    n = 2**40
    far = permute(np.array([0, 1, n - 2, n - 1]), n, keys[0])
    assert len(set(far.tolist())) == 4 and far.min() >= 0 and far.max() < n
    for n in (0, 2**40 + 1):
        with pytest.raises(ValueError, match="permute needs"):
            permute(0, n, 1)


@pytest.mark.parametrize("n", [3, 5, 10, 5000])
def test_permute_sends_pairs_everywhere_equally(n):
    trials = 100_000
    keys = fold(5, np.arange(trials))
    a, b = (permute(np.full(trials, i), n, keys) for i in (0, 1))
    assert fits(np.bincount(a, minlength=n))
    gap = np.bincount((b - a) % n, minlength=n)
    assert gap[0] == 0 and fits(gap[1:])

# SPDX-License-Identifier: Apache-2.0
"""The host half of masked diffusion: rates, masks, weights, and rows with blocks."""

import numpy as np
import pytest
from host_half import make_half
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.data.features.diffusion import spread_evenly
from bertjax.models.attention_mask import is_visible

V, MASK = 40, 4
TOKENIZER = fake_tokenizer(V)
OBJECTIVES = ["diffusion", "diffusion:schedule=cosine", "diffusion:block=4"]


def gather(lengths, raw, first=0, packed=False):
    """Return rows of text with sequences of these lengths, special tokens included."""
    draw = np.random.default_rng(5)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    names += ["segment_ids", "position_ids"] * packed
    arrays = {name: np.zeros((len(lengths), raw), np.int32) for name in names}
    for row, sizes in enumerate(lengths):
        begin = 0
        for number, n in enumerate(sizes, 1):
            own = row, slice(begin, begin + n)
            ids = draw.integers(5, V, n)
            ids[0], ids[-1] = TOKENIZER.cls_id, TOKENIZER.sep_id
            arrays["input_ids"][own], arrays["attention_mask"][own] = ids, 1
            if packed:
                arrays["segment_ids"][own] = number
                arrays["position_ids"][own] = np.arange(n)
            begin += n
    place = first + np.arange(len(lengths))
    return GatheredRows(arrays, counter_rng.fold(3, place), place, place)


def make(objective, rows, length, **keys):
    half = make_half(objective, TOKENIZER, length, **keys)
    return half, half.make(rows)


# ---------------------------------------------------------------- a row
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_a_row_holds(objective):
    """Masks are [MASK] and weigh as their rates say, special tokens stay, and counts
    are right."""
    rows = gather([[12], [7], [2], [12]], 12, first=1000)
    length = 24 if "block" in objective else 12
    half, batch = make(objective, rows, length)
    truth = rows.arrays["input_ids"]
    masked = batch["diffusion_weights"] > 0
    noised = batch["input_ids"][:, :12]
    assert (noised == np.where(masked, MASK, truth)).all()
    assert not masked[truth < 5].any() and masked[0].any() and masked[1].any()
    units = np.arange(12) // 4 if "block" in objective else np.zeros(12, int)
    weights = half.rates(rows.place, 3)[1][:, units]
    np.testing.assert_allclose(batch["diffusion_weights"], weights * masked, rtol=1e-6)
    assert batch["diffusion_norm"].tolist() == [10, 5, 0, 10]
    assert (batch["diffusion_ids"] == truth).all()
    assert (half.predicted(batch)[:, :12] == masked).all()
    assert not half.predicted(batch)[:, 12:].any()
    clean = np.take_along_axis(truth, half.origin(batch), 1)
    assert (batch["input_ids"] == np.where(half.predicted(batch), MASK, clean)).all()
    counts = half.count(rows.arrays, batch)
    assert counts["selected"] == counts["masked"] == masked.sum()
    assert counts["maskable"] == 25 and counts["kept"] == 0
    tenths = np.minimum(masked.sum(1) * 10 // [10, 5, 1, 10], 9)
    by_tenths = [counts[f"rows_masked_{10 * k}%"] for k in range(10)]
    assert by_tenths == np.bincount(tenths, minlength=10).tolist()


def test_weights_are_those_of_the_rate():
    """Weights depend on the rate p: linear mdlm (1 - eps) / p, llada 1 / p, none 1."""
    place, eps = np.arange(50), 1e-3
    rate, weight = make_half("diffusion", TOKENIZER, 8).rates(place, 2)
    np.testing.assert_allclose(weight, (1 - eps) / rate, rtol=1e-12)
    assert rate.shape == (50, 2) and rate.min() >= eps and rate.max() <= 1
    same, weight = make_half("diffusion:weights=llada", TOKENIZER, 8).rates(place, 2)
    np.testing.assert_array_equal(rate, same)
    np.testing.assert_allclose(weight, 1 / rate, rtol=1e-12)
    cosine = make_half("diffusion:schedule=cosine,weights=none", TOKENIZER, 8)
    assert (cosine.rates(place, 2)[1] == 1).all()


@pytest.mark.parametrize(
    ("t", "rate", "weight"),
    [
        (0.1, 0.01329934774545738, 17.167283484257833),
        (0.45, 0.24035444036556908, 4.22254695877471),
        (0.9, 0.8437219694248093, 1.8348117088311684),
    ],
)
def test_cosine_is_the_published_one(t, rate, weight):
    """Compare with CosineNoise (kuleshov-group/bd3lms, noise_schedule.py, run at eps
    1e-3), which adds eps to the denominator of the weight a second time."""
    half, eps = make_half("diffusion:schedule=cosine", TOKENIZER, 8), 1e-3
    own = eps + (1 - eps) * half.schedule.share(t)
    slope = (1 - eps) * half.schedule.slope(t)
    assert own == pytest.approx(rate, rel=1e-12)
    assert half.weigh(own, slope) == pytest.approx(weight * (rate + eps) / rate, 1e-12)
    assert half.schedule.time(half.schedule.share(t)) == pytest.approx(t, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "low", "high", "mean", "whole"),
    [
        ("", 1e-3, 1, 0.5005, 0.999),
        ("low=0.45,high=0.95", 0.45, 0.95, 0.7, 0.999),
        ("schedule=cosine", 1e-3, 1, 0.001 + 0.999 * (1 - 2 / np.pi), 0.999),
        ("schedule=cosine,low=0.2", 0.2, 1, None, None),
        ("eps=0.1", 0.1, 1, 0.55, 0.9),
        ("low=0.3,high=0.3", 0.3, 0.3, 0.3, None),
    ],
)
def test_rates_lie_where_they_should(options, low, high, mean, whole):
    """Check the ends and mean of the rates, and what the bound needs: the mean of
    weight x rate is the range of rates that t passes through."""
    half = make_half(f"diffusion:{options}", TOKENIZER, 8)
    rate, weight = half.rates(np.arange(20_000), 1)
    assert low - 1e-12 <= rate.min() <= low + 2e-3 + low * 1e-3
    assert high - 2e-3 <= rate.max() <= high + 1e-12
    if mean:
        assert rate.mean() == pytest.approx(mean, abs=2e-4)
    if whole:
        assert (rate * weight).mean() == pytest.approx(whole, abs=2e-3)


# ---------------------------------------------------------------- by place alone
def star_discrepancy(points):
    """Return the largest difference between x and the share of points below x."""
    x, n = np.sort(points), len(points)
    below = np.arange(n)
    return max((x - below / n).max(), ((below + 1) / n - x).max())


@pytest.mark.parametrize(("stride", "bound"), [(1, 0.012), (2, 0.016), (16, 0.035)])
def test_neighbouring_rows_share_the_rates_evenly(stride, bound):
    """256 places from any start; in a mixture, only every stride-th row is diffusion's.
    256 independent draws have a discrepancy of 0.054 on average."""
    starts = [0, 1, 77, 10**6 + 3, 3 * 10**9, 2**40 - 12345]
    found = [
        star_discrepancy(spread_evenly(first + stride * np.arange(256), np.array(unit)))
        for first in starts
        for unit in (0, 1, 5)
    ]
    assert max(found) < bound
    within = [
        star_discrepancy(spread_evenly(np.array(p), np.arange(64))) for p in starts
    ]
    assert max(within) < 0.04  # independent draws: 0.11


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_each_column_is_masked_at_the_rates(schedule):
    """Run a chi-square test over the columns of text, with 16 degrees of freedom."""
    rows = gather([[18]] * 4000, 18, first=999)
    half, batch = make(f"diffusion:schedule={schedule}", rows, 18)
    rate = half.rates(rows.place, 1)[0]
    masked = (batch["diffusion_weights"] > 0)[:, 1:-1].sum(0)
    square = ((masked - rate.sum()) ** 2 / (rate * (1 - rate)).sum()).sum()
    assert 1e-3 < stats.chi2.cdf(square, 16) < 1 - 1e-3


def test_tokens_are_masked_by_themselves():
    """Compare the masks per row with the binomial distribution of one rate."""
    rows = gather([[18]] * 4000, 18)
    _, batch = make("diffusion:low=0.3,high=0.3", rows, 18)
    found = np.bincount((batch["diffusion_weights"] > 0).sum(1), minlength=17)
    law = 4000 * stats.binom.pmf(np.arange(17), 16, 0.3)
    found, law = (np.r_[x[:1] + x[1], x[2:9], x[9:].sum()] for x in (found, law))
    assert stats.chisquare(found, law).pvalue > 1e-3


# ---------------------------------------------------------------- packed rows, blocks
def test_each_packed_sequence_has_a_rate_of_its_own():
    rows = gather([[40, 30, 20]] * 64, 96, packed=True)
    half, batch = make("diffusion:weights=llada", rows, 96, packed=True)
    rate = half.rates(rows.place, 3)[0]
    sequence, weights = rows.arrays["segment_ids"], batch["diffusion_weights"]
    for number in (1, 2, 3):
        own = np.where(sequence == number, weights, 0)
        expected = np.float32(1 / rate[:, number - 1 : number])
        assert ((own == 0) | (own == expected)).all() and (own > 0).any(1).mean() > 0.9
    assert not weights[sequence == 0].any()


@pytest.mark.parametrize("block", [12, 50])
def test_a_block_of_a_whole_row_is_no_block(block):
    rows = gather([[12], [7], [12]], 12)
    _, plain = make("diffusion", rows, 12)
    _, blocks = make(f"diffusion:block={block}", rows, 24)
    for name in ("diffusion_ids", "diffusion_weights", "diffusion_norm"):
        np.testing.assert_array_equal(plain[name], blocks[name])
    np.testing.assert_array_equal(plain["input_ids"], blocks["input_ids"][:, :12])


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_who_sees_whom_is_bd3s_mask(block, packed):
    """Compare with block_diff_mask of kuleshov-group/bd3lms, models/dit.py: M_BD,
    M_OBC, M_BC."""
    raw = 14
    sizes = [[14], [6, 5, 3], [3, 9]] if packed else [[14], [9], [2]]
    rows = gather(sizes, raw, packed=packed)
    _, batch = make(f"diffusion:block={block}", rows, 2 * raw, packed=packed)
    for row, lengths in enumerate(sizes):
        text = np.concatenate([np.arange(n) for n in lengths]) // block
        number = np.repeat(np.arange(len(lengths)), lengths)
        n = len(text)
        slots = np.r_[:n, raw : raw + n]
        clean = np.arange(2 * n) >= n
        of, same = np.tile(text, 2), np.equal.outer(*[np.tile(number, 2)] * 2)
        q, k = (of[:, None], clean[:, None]), (of[None], clean[None])
        diagonal = (q[0] == k[0]) & (q[1] == k[1])
        offset_causal = (q[0] > k[0]) & k[1] & ~q[1]
        causal = (q[0] >= k[0]) & k[1] & q[1]
        steps = batch["attention_steps"][row][slots]
        seen = is_visible(steps[:, None], steps[None])
        expected = diagonal | offset_causal | causal
        np.testing.assert_array_equal(seen & same, expected & same)
        assert (seen & same).any(1).all()
        rest = np.delete(batch["attention_steps"][row], slots)
        assert (
            not rest.any() and not np.delete(batch["attention_mask"][row], slots).any()
        )
    names = ["attention_mask", "position_ids", *["segment_ids"] * packed]
    for name in names:
        first, second = np.split(batch[name], 2, axis=1)
        np.testing.assert_array_equal(first, second)
    real = rows.arrays["attention_mask"].sum(1)
    np.testing.assert_array_equal(batch["text_tokens"], real)


def test_each_block_has_a_rate_of_its_own():
    rows = gather([[64]] * 40 + [[40]] * 10, 64)
    half, batch = make("diffusion:block=16,weights=llada", rows, 128)
    expected = np.repeat(np.float32(1 / half.rates(rows.place, 4)[0]), 16, axis=1)
    weights = batch["diffusion_weights"]
    assert ((weights == 0) | (weights == expected)).all()
    assert len(np.unique(expected)) == 200 and (weights > 0).mean() > 0.35


def test_rows_beside_causal_ones():
    rows = gather([[12]] * 4, 12)
    half, batch = make("diffusion*1+clm*1", rows, 12)
    assert batch["diffusion_norm"].tolist() == [10, 0, 10, 0]
    assert not batch["diffusion_weights"][1::2].any()
    assert batch["clm_weights"].sum(1).tolist() == [0, 11, 0, 11]
    assert half.count(rows.arrays, batch)["maskable"] == 20


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("schedule=cosin", "schedule='cosin' is unknown; did you mean 'cosine'"),
        ("weights=elbo", "weights='elbo' is unknown; known: llada, mdlm, none"),
        ("low=0.8,high=0.3", "low=0.8, high=0.3 and eps=0.001 are not rates"),
        ("high=1.5", "high=1.5"),
        ("eps=0", "of which low or eps is above 0"),
        ("eps=1", "eps=1.0"),
        ("block=-2", "block=-2: give its tokens, or 0"),
        ("block=2", "data.length=13: with blocks a row holds its text twice"),
        ("block=1.5", "block=1.5 is not a whole number"),
    ],
)
def test_what_is_no_diffusion(options, message):
    with pytest.raises(UserError, match=message) as e:
        make_half(f"diffusion:{options}", TOKENIZER, 13)
    assert "\n" not in str(e.value)


def test_it_says_what_it_does():
    half = make_half("diffusion:schedule=cosine,low=0.2,block=4", TOKENIZER, 24)
    assert half.raw == 12
    assert half.describe() == (
        "20% to 100% masked (cosine, weights mdlm), in blocks of 4 behind clean ones"
    )

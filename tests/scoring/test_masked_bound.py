# SPDX-License-Identifier: Apache-2.0
"""The bound by masks against all orders, on texts short enough to enumerate them."""

import itertools
import math

import jax
import numpy as np
import pytest

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.objectives.base import TokenIds
from bertjax.scoring import masked_bound
from bertjax.scoring.masked_bound import draw_masks, make_bounder, masked_row
from bertjax.scoring.token_rows import Row, Window, cut_windows, make_row_scorer

CFG = EncoderConfig(
    vocab_size=8,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
    initializer_range=0.5,
    pooler=False,
)
IDS = TokenIds()  # cls 2, sep 3, mask 4; the letters are 5, 6, 7
TEXT = np.array([5, 7, 6, 6])


@pytest.fixture(scope="module")
def params():
    a, b = jax.random.split(jax.random.key(5))
    return {"encoder": encoder.init(a, CFG), "mlm": heads.init_mlm(b, CFG)}


@pytest.fixture(scope="module")
def costs(params):
    """-ln p of each token under each mask of TEXT, with and without `before`."""

    @jax.jit
    def logits(ids):
        batch = {"input_ids": ids, "attention_mask": ids * 0 + 1}
        hidden = encoder.apply(params["encoder"], CFG, batch).hidden
        word = params["encoder"]["embeddings"]["word"]
        found = heads.mlm_logits(params["mlm"], word, CFG, hidden)
        return jax.nn.log_softmax(found.at[..., IDS.mask_id].set(-np.inf))

    masks = [*itertools.product((False, True), repeat=4)]
    rows = [[2, *np.where(mask, IDS.mask_id, TEXT), 3] for mask in masks]
    found = np.asarray(logits(np.array(rows, np.int32)), np.float64)
    out = {}
    for before in (False, True):
        at = np.arange(1, 5) - before
        out[before] = {
            mask: -one[at, TEXT] for mask, one in zip(masks, found, strict=True)
        }
    return out


def order_costs(costs):
    """Return the cost, -ln p, of filling in the tokens in each of the 24 orders."""
    found = []
    for order in itertools.permutations(range(4)):
        hidden, total = [True] * 4, 0.0
        for i in order:
            total += costs[tuple(hidden)][i]
            hidden[i] = False
        found.append(total)
    return np.array(found)


def bounder(params, **more):
    given = dict(draws=16, estimator="any_order") | more
    return make_bounder(CFG, params, IDS, **given)


@pytest.mark.parametrize("before", [False, True])
def test_all_masks_give_the_mean_over_all_orders(params, costs, before):
    bound = bounder(params, before=before)
    [(value, variance)] = bound([(TEXT, Window(0, 0, 4))])
    each = order_costs(costs[before])
    assert -value == pytest.approx(each.mean(), rel=1e-5) and variance == 0
    # It is an upper bound of -ln p of a model that draws the order first.
    assert -value > -math.log(np.exp(-each).mean())


@pytest.mark.parametrize("estimator, rel", [("any_order", 0.01), ("continuous", 0.02)])
def test_draws_estimate_it(params, costs, estimator, rel):
    """Estimates with different keys have the right mean, and the variance that they
    report."""
    want = order_costs(costs[False]).mean()
    found, said = [], []
    for seed in range(2000):
        # There are fewer draws than masks, so no estimate is exact.
        drawn = draw_masks(4, 8, estimator, counter_rng.fold(seed, "x"))
        assert not drawn.exact
        each = [-costs[False][tuple(m)][m].sum() for m in drawn.masks.tolist()]
        one = masked_bound.add_up(drawn, np.array(each))
        found.append(-one.value)
        said.append(one.variance)
    assert np.mean(found) == pytest.approx(want, rel=rel)
    # It is conservative, as the means of neighboring parts of the range differ too.
    assert 0.85 < np.mean(said) / np.var(found) < 2


def test_draws_share_the_range_evenly():
    key = counter_rng.fold(1, "x")
    drawn = draw_masks(64, 16, "any_order", key)
    k = drawn.masks.sum(axis=1)
    assert ((k - 1) // 4 == np.arange(16)).all()
    np.testing.assert_allclose(drawn.weights, 64 / (16 * k))
    loose = draw_masks(64, 16, "continuous", key)
    rate = 1 / (16 * loose.weights)
    assert (np.floor((1 - rate) * 16) == np.arange(16)).all() and rate.min() > 0
    assert abs(loose.masks.mean(axis=1) - rate).max() < 0.25


def test_the_mask_has_no_probability(params):
    """The probabilities of the other tokens add up to 1 without [MASK]."""
    for never, total in (IDS.mask_id, 1.0), (None, 1.0):
        run = make_row_scorer(CFG, params, 0, never=never)
        row = masked_row(
            TEXT, Window(0, 0, 4), np.array([1, 0, 0, 1], bool), IDS, False
        )
        tokens = [i for i in range(8) if i != never]
        rows = [Row(row.ids, row.positions[:1], np.array([i])) for i in tokens]
        n = len(rows)
        found = run(np.full(n, 6), np.ones(n, int), lambda i, rows=rows: rows[i])
        assert np.exp(found).sum() == pytest.approx(total, rel=1e-5)
    hidden = Row(row.ids, row.positions[:1], np.array([IDS.mask_id]))
    run = make_row_scorer(CFG, params, 0, never=IDS.mask_id)
    assert run(np.array([6]), np.array([1]), lambda i: hidden)[0] < -1e6


def test_draws_are_of_the_text_alone(params):
    rng = np.random.default_rng(2)
    texts = [rng.integers(5, 8, n) for n in (9, 12, 9, 12)]
    windows = [(text, Window(0, 0, len(text))) for text in texts]
    together = [one.value for one in bounder(params)(windows)]
    [alone] = bounder(params)(windows[1:2])
    assert together[1] == pytest.approx(alone.value, rel=1e-5)
    small = bounder(params, batch_size=6)(windows[::-1])
    assert [one.value for one in small][::-1] == pytest.approx(together, rel=1e-5)
    assert len({*together}) == 4 and bounder(params)([]) == []
    keys = {int(masked_bound.text_key(text)) for text in (*texts, texts[0][::-1])}
    assert len(keys) == 5


def test_what_stands_before_a_window_s_tokens_is_seen(params, costs):
    """The tokens after a context cost the mean over all orders of these tokens."""
    assert cut_windows(4, 2, 2) == [Window(0, 0, 2), Window(2, 2, 4)]
    bound = bounder(params)
    [behind] = bound([(TEXT, Window(0, 2, 4))])
    each = costs[False]
    both = each[False, False, True, True]
    first = both[2] + each[False, False, False, True][3]
    last = both[3] + each[False, False, True, False][2]
    assert -behind.value == pytest.approx((first + last) / 2, rel=1e-5)


def test_the_rows_of_the_worked_example():
    text, mask = np.array([17, 25, 31, 46]), np.array([True, False, True])
    for before, at in (False, [2, 4]), (True, [1, 3]):
        row = masked_row(text, Window(0, 1, 4), mask, IDS, before)
        assert row.ids.tolist() == [2, 17, 4, 31, 4, 3]
        assert row.positions.tolist() == at and row.truth.tolist() == [25, 46]


def test_refusals():
    with pytest.raises(UserError, match=r"--draws=15 is odd.*; give 16"):
        masked_bound.pick_draws(15, 16)
    with pytest.raises(UserError, match=r"'any_ordr'.*did you mean 'any_order'"):
        masked_bound.pick_estimator("any_ordr")

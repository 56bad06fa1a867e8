# SPDX-License-Identifier: Apache-2.0
"""The published schemes: their numbers, rare tokens, repeated draws, entities."""

import dataclasses

import numpy as np
import pytest
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import (
    PRESETS,
    Masking,
    make_masking,
    predictions_per_sequence,
)
from bertjax.data.masking.vocab_tables import make_tables

V, PAD, UNK, CLS, SEP, MASK = 50, 0, 1, 2, 3, 4
VOCABULARY = fake_tokenizer(V)

# As published: unit, lengths, count, mask, random, outcome, weights, P at 128 and 512.
PUBLISHED = {
    "bert": ("token", (1,), "round", 0.8, 0.1, "piece", "uniform", 20, 77),
    "roberta": ("token", (1,), "stochastic", 0.8, 0.1, "word", "uniform", 20, 77),
    "albert": (
        "word", (6 / 11, 3 / 11, 2 / 11), "round", 0.8, 0.1, "piece", "uniform", 20, 77,
    ),
    "electra": ("token", (1,), "round", 0.85, 0.0, "piece", "uniform", 19, 79),
    "distilbert": ("token", (1,), "ceil", 0.8, 0.1, "piece", "rare", 20, 77),
    "spanbert": (
        "word", tuple(0.2 * 0.8**i / (1 - 0.8**10) for i in range(10)), "ceil", 0.8,
        0.1, "span", "uniform", 20, 77,
    ),
    "macbert": (
        "word", (0.4, 0.3, 0.2, 0.1), "round", 0.8, 0.1, "word", "uniform", 20, 77,
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_what_was_published(preset):
    how = PRESETS[preset]
    unit, lengths, count, mask, random, outcome, weights, short, long = PUBLISHED[
        preset
    ]
    assert (how.unit, how.count, how.mask_share, how.random_share) == (
        unit, count, mask, random,
    )  # fmt: skip
    assert how.lengths == pytest.approx(lengths) and sum(how.lengths) == pytest.approx(
        1
    )
    assert (how.outcome, how.weights, how.rate) == (outcome, weights, 0.15)
    assert how.similar == (preset == "macbert") and not how.repeats
    assert (how.eligible, how.random_from) == ("text", "text")
    P = [predictions_per_sequence(how, length) for length in (128, 512)]
    assert P == [short, long]


def test_paper_compat_is_the_official_matrix():
    compat = {p: make_masking(p, paper_compat=True) for p in PRESETS}
    vocabulary = {p for p, how in compat.items() if how.random_from == "vocabulary"}
    assert vocabulary == {"bert", "albert", "distilbert"}
    eligible = {p: how.eligible for p, how in compat.items() if how.eligible != "text"}
    assert eligible == {
        "bert": "unknown", "albert": "unknown", "electra": "unknown", "roberta": "all",
    }  # fmt: skip
    assert [p for p, how in compat.items() if how.repeats] == ["electra"]


def draw(how, ids, counts=None, marks=None, P=None, vocabulary=VOCABULARY):
    tables = make_tables(vocabulary, counts)
    P = P or predictions_per_sequence(how, ids.shape[1])
    keys = counter_rng.fold(8, np.arange(len(ids)))
    return mask_tokens(ids, ids != PAD, keys, how, tables, P, marks)


def test_electra_masks_and_keeps_but_never_draws():
    ids = np.full((4000, 128), 9, np.int32)
    out = draw(make_masking("electra"), ids)
    seen = np.take_along_axis(out.input_ids, out.mlm_positions, 1)[out.mlm_weights > 0]
    assert (out.mlm_weights.sum(1) == 19).all() and set(seen) == {9, MASK}
    assert abs((seen == MASK).mean() - 0.85) < 0.01


def test_repeated_draws_weigh_as_often_as_they_were_drawn():
    """93% of 19 draws from 126 tokens are distinct, as in the official ELECTRA."""
    ids = np.full((4000, 128), 9, np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    out = draw(make_masking("electra", paper_compat=True), ids)
    assert (out.mlm_weights.sum(1) == 19).all() and out.mlm_weights.max() > 2
    different = (out.mlm_weights > 0).sum(1).mean()
    assert abs(different - 126 * (1 - (125 / 126) ** 19)) < 0.05
    counts = np.bincount(
        out.mlm_positions.ravel(), out.mlm_weights.ravel(), minlength=128
    )
    assert not counts[[0, 127]].any()
    assert stats.chisquare(counts[1:127]).pvalue > 1e-4


def test_rare_tokens_are_preferred_as_in_slow_draws_without_replacement():
    """Compare with urns: draw a token by weight, remove it, draw again."""
    n, text = 20_000, np.arange(5, 17)
    counts = np.zeros(V, np.int64)
    counts[text] = [0, 1, 2, 5, 10, 20, 50, 100, 1000, 10_000, 3, 7]
    ids = np.tile(np.concatenate([[CLS], text, [SEP]]), (n, 1)).astype(np.int32)
    out = draw(make_masking("distilbert", rate=0.28), ids, counts)
    assert (out.mlm_weights.sum(1) == 4).all()  # ceil(0.28 * 14)
    got = np.bincount(out.mlm_ids[out.mlm_weights > 0], minlength=17)[5:]
    rng = np.random.default_rng(0)
    weights = np.maximum(counts[text], 1) ** -0.7
    slow = np.zeros(12)
    for _ in range(n):
        left = weights.copy()
        for _ in range(4):
            at = np.searchsorted(np.cumsum(left), rng.random() * left.sum(), "right")
            slow[at] += 1
            left[at] = 0
    assert (got + slow > 10).all()
    assert stats.chi2_contingency([got, slow]).pvalue > 1e-4
    with pytest.raises(UserError, match="needs the counts"):
        draw(make_masking("distilbert"), ids)


def test_ceil_counts_like_the_decimal_it_is_written_as():
    ids = np.full((1, 20), 9, np.int32)
    for length in (20, 40, 60):  # 0.15 * 20 is 3.0000000000000004 in floats
        row = np.pad(ids, ((0, 0), (0, length - 20)), constant_values=9)
        out = draw(Masking(count="ceil"), row, P=30)
        assert out.mlm_weights.sum() == 0.15 * length // 1


def test_entities_are_masked_whole_and_nothing_else():
    ids = np.tile(np.arange(5, 17, dtype=np.int32), (3000, 1))
    marks = np.array([1, 7, 2, 3, 1, 6, 6, 2, 0, 1, 1, 7], np.uint8)
    groups = {1: {1, 2, 3}, 5: {5}, 6: {6, 7}, 11: {11}}
    how = make_masking("bert", unit="entity", rate=0.34)
    out = draw(how, ids, marks=np.tile(marks, (3000, 1)))
    kinds = set()
    for row, weights in zip(out.mlm_positions, out.mlm_weights, strict=True):
        at = set(row[weights > 0].tolist())
        taken = [g for first, g in groups.items() if first in at]
        assert at == set().union(*taken) and len(at) == 4
        kinds.add(frozenset(at))
    assert len(kinds) == 3  # 3 + 1 in two ways, and 1 + 2 + 1
    assert not draw(how, ids).mlm_weights.any()  # without marks there are no entities


def test_marks_say_where_words_begin():
    ids = np.tile(np.arange(5, 17, dtype=np.int32), (500, 1))
    marks = np.tile(np.array([1, 0, 1, 0] * 3, np.uint8), (500, 1))
    out = draw(make_masking("bert", unit="word", rate=0.34), ids, marks=marks)
    assert (out.mlm_weights.sum(1) == 4).all()
    assert (out.mlm_positions[:, ::2] % 2 == 0).all()
    assert (np.diff(out.mlm_positions)[:, ::2] == 1).all()


def test_units_and_laws_refine_any_preset():
    albert = make_masking("bert", unit="ngram")
    assert albert == make_masking("albert")
    assert make_masking("bert", unit="span").outcome == "span"
    assert make_masking("macbert", unit="ngram", lengths="harmonic:2").lengths == (
        pytest.approx((2 / 3, 1 / 3))
    )
    assert make_masking("spanbert", lengths="geometric:0.5:2").lengths == (
        pytest.approx((2 / 3, 1 / 3))
    )
    ngrams = make_masking("roberta", unit="token", lengths="0.5,0.5")
    assert (ngrams.unit, ngrams.lengths) == ("token", (0.5, 0.5))
    mix = make_masking("bert", corruption="0.5,0.25,0.25")
    assert (mix.mask_share, mix.random_share) == (0.5, 0.25)
    plain = make_masking("electra", unit="word", paper_compat=True)
    assert not plain.repeats and plain.eligible == "unknown"
    assert dataclasses.replace(albert, rate=0.3) == make_masking("albert", rate=0.3)


@pytest.mark.parametrize(
    ("preset", "how", "message"),
    [
        ("bert", {"lengths": "0.5,0.4"}, r"data.mask_lengths='0.5,0.4' must sum to 1"),
        ("bert", {"lengths": "a,b"}, r"data.mask_lengths='a,b' must be shares"),
        ("bert", {"lengths": ""}, r"data.mask_lengths='' must be shares"),
        ("bert", {"lengths": "1.5,-0.5"}, r"each share must be from 0 to 1"),
        ("bert", {"lengths": "nan,1"}, r"each share must be from 0 to 1"),
        (
            "bert",
            {"lengths": "geometric:x:3"},
            r"data.mask_lengths.* is not a distribution",
        ),
        (
            "bert",
            {"lengths": "geometric:0.2"},
            r"data.mask_lengths.* is not a distribution",
        ),
        (
            "bert",
            {"lengths": "geometrc:0.2:10"},
            r"data.mask_lengths.* is not a distribution",
        ),
        ("bert", {"lengths": "geometric:0:3"}, r"needs 0 < P < 1"),
        ("bert", {"lengths": "harmonic:0"}, r"longest length of 1 to 1000"),
        ("bert", {"corruption": "0.8,0.2"}, r"data.corruption='0.8,0.2' needs three"),
        ("bert", {"corruption": "0.8,0.1,0.2"}, r"data.corruption=.* must sum to 1"),
        ("bert", {"replacement": "unigrams"}, r"data.replacement='unigrams'"),
        ("bert", {"unit": "ngrams"}, r"data.mask_unit='ngrams' .* mean 'ngram'"),
        ("distilbert", {"unit": "span"}, r"'span' does not go with .*'distilbert'"),
        ("distilbert", {"lengths": "harmonic:3"}, r"data.mask_lengths=.* not go with"),
        ("macbert", {"unit": "token"}, r"'token' does not go with .*whole words"),
    ],
)
def test_what_means_nothing_is_refused(preset, how, message):
    with pytest.raises(UserError, match=message):
        make_masking(preset, **how)

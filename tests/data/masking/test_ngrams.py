# SPDX-License-Identifier: Apache-2.0
"""n-grams and spans: compared with a slow reference and with their distributions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_tokenizer, random_rows
from scipy import stats

from bertjax.data import counter_rng
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import (
    Masking,
    geometric,
    harmonic,
    make_masking,
    predictions_per_sequence,
)
from bertjax.data.masking.vocab_tables import make_tables

V, PAD, UNK, CLS, SEP, MASK = 50, 0, 1, 2, 3, 4


def tables(starts):
    return make_tables(fake_tokenizer(V, word_starts=starts))


# ------------------------------------------------------- the slow reference
def list_words(ids, starts):
    """Return stretches of words, a word being a list of positions."""
    stretches = [[]]
    for at, token in enumerate(ids):
        if token < 5:
            stretches.append([])
        elif starts[token] or not stretches[-1]:
            stretches[-1].append([at])
        else:
            stretches[-1][-1].append(at)
    return [s for s in stretches if s]


def slow_ngrams(ids, starts, key, law, budget, length):
    """Draw lengths and points, insert n-grams and spend the budget, one at a time."""
    stretches = list_words(ids, starts)
    n = sum(map(len, stretches))
    tokens = sum(len(word) for stretch in stretches for word in stretch)
    if not n or budget < 1:
        return [], []
    goal = min(n, 5 * budget * n // (4 * tokens) + 3)
    lengths, bounds = [], np.cumsum(law) / np.sum(law)
    while sum(lengths) < goal:
        u = counter_rng.uniform(counter_rng.fold(key, "length"), len(lengths))
        lengths.append(1 + int((u >= np.floor(bounds[:-1] * 2**53) / 2**53).sum()))
    cut = (length - 1).bit_length() + len(law).bit_length()
    points = [
        (int(counter_rng.bits(counter_rng.fold(key, "place"), j)) >> 1 + cut) * n
        / 2 ** (63 - cut)
        for j in range(len(lengths))
    ]  # fmt: skip
    ngrams, begin = {}, 0
    for stretch in stretches:
        room = len(stretch)
        inside = [j for j, p in enumerate(points) if begin <= min(int(p), n - 1)
                  < begin + room]  # fmt: skip
        inside.sort(key=lambda j: points[j])
        spare = max(0, room - sum(lengths[j] for j in inside))
        before = 0
        for j in inside:
            gap = min(int((points[j] - begin) / room * (spare + 1)), spare)
            ngrams[j] = stretch[gap + before :][: lengths[j]]
            before += lengths[j]
        begin += room
    chosen, drawn, left, over = [], [], budget, False
    for j in range(len(lengths)):
        words, taken = ngrams[j][:1] if over else ngrams[j], []
        for word in words:
            if len(word) > left:
                break
            taken.append(word)
            left -= len(word)
        if taken and not over:
            drawn.append(len(ngrams[j]))
        over = over or len(taken) < len(words)
        chosen += taken
    order = counter_rng.bits(counter_rng.fold(key, "choose"), np.arange(length))
    order &= np.uint64(2**63 - 1)
    words = [w for s in stretches for w in s if w not in chosen]
    for word in sorted(words, key=lambda w: order[w[0]]):
        if len(word) <= left:
            chosen.append(word)
            left -= len(word)
    return sorted(at for word in chosen for at in word), drawn


LAWS = [
    harmonic(3),
    geometric(0.2, 10),
    (0.4, 0.3, 0.2, 0.1),
    (0.0, 1.0),
    (0.5, 0.5, 0.0),
    (0.1,) * 10,
]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(0.03, 1), st.floats(0, 1), st.integers(3, 90),
    st.sampled_from([0, 0.05, 0.3]), st.sampled_from(LAWS), st.booleans(),
)  # fmt: skip
def test_equal_to_the_slow_reference(seed, rate, begin, length, unknown, law, single):
    starts = np.random.default_rng(seed).random(V) < begin
    ids, real = random_rows(4, length, seed, unknown, size=V)
    keys = counter_rng.fold(seed, np.arange(4))
    P = predictions_per_sequence(rate, length)
    how = Masking(rate=rate, unit="token" if single else "word", lengths=law)
    drawn = []
    out = mask_tokens(ids, real, keys, how, tables(starts), P, None, drawn)
    lengths = []
    for r in range(4):
        budget = min(P, max(1, round(rate * int(real[r].sum()))))
        begins = np.ones(V, bool) if single else starts
        wanted, more = slow_ngrams(ids[r], begins, keys[r], law, budget, length)
        count = int(out.mlm_weights[r].sum())
        assert out.mlm_positions[r, :count].tolist() == wanted
        lengths += more
    assert np.concatenate(drawn).tolist() == lengths


# ------------------------------------------------------- laws
def masked(how, length=128, n=4000, sizes=1.0, P=None, specials=(0, 60, -1)):
    """Mask n full rows of two segments; `sizes`: share of pieces that begin a word."""
    rng = np.random.default_rng(7)
    starts = np.arange(V) % 10 < 10 * sizes
    ids = rng.integers(5, V, (n, length)).astype(np.int32)
    ids[:, list(specials)] = SEP
    keys, drawn = counter_rng.fold(1, np.arange(n)), []
    P = P or predictions_per_sequence(how.rate, length)
    real = np.ones_like(ids)
    out = mask_tokens(ids, real, keys, how, tables(starts), P, None, drawn)
    return ids, out, np.concatenate(drawn)


@pytest.mark.parametrize("sizes", [1.0, 0.7])
@pytest.mark.parametrize(
    ("unit", "lengths", "law"),
    [
        ("ngram", None, (6 / 11, 3 / 11, 2 / 11)),
        ("ngram", "0.4,0.3,0.2,0.1", (0.4, 0.3, 0.2, 0.1)),
        ("token", "harmonic:3", (6 / 11, 3 / 11, 2 / 11)),
        ("span", None, np.array([0.2 * 0.8**i for i in range(10)]) / (1 - 0.8**10)),
        ("word", "0,0,1", (0, 0, 1)),
        ("word", "0.0000005,1", (0, 1)),  # the shares sum to slightly more than 1
    ],
)
def test_drawn_lengths_follow_their_law(unit, lengths, law, sizes):
    how = make_masking("bert", unit=unit, lengths=lengths)
    _, out, drawn = masked(how, sizes=sizes)
    counts = np.bincount(drawn, minlength=len(law) + 1)[1:]
    law = np.asarray(law)
    assert not counts[law == 0].any()
    if (law > 0).sum() > 1:
        expected = law[law > 0] * counts.sum()
        assert stats.chisquare(counts[law > 0], expected).pvalue > 1e-4
    number = out.mlm_weights.sum(1)
    assert (number <= 19).all() and (number == 19).mean() > 0.99


def test_what_stands_in_the_text_follows_the_law_away_from_the_edges():
    """Compare the lengths of masked runs, at a rate at which few n-grams touch."""
    how = make_masking("spanbert", rate=0.05, corruption="1,0,0")
    _, out, drawn = masked(how, length=512, specials=(0, -1))
    assert (out.mlm_weights.sum(1) == 26).all()  # ceil(0.05 * 512)
    masks = np.pad(out.input_ids == MASK, ((0, 0), (1, 1))).astype(int)
    runs = np.flatnonzero(np.diff(masks.ravel()) == -1)
    runs -= np.flatnonzero(np.diff(masks.ravel()) == 1)
    law = np.array(geometric(0.2, 10))
    seen = np.bincount(runs, minlength=11)[1:11] / len(runs)
    assert np.abs(seen - law).max() < 0.03
    assert abs(drawn.mean() - 3.797) < 0.05


def test_every_word_is_about_as_likely_but_at_the_ends_of_a_segment():
    _, out, _ = masked(make_masking("albert"), n=20_000)
    counts = np.bincount(out.mlm_positions[out.mlm_weights > 0], minlength=128)
    assert not counts[[0, 60, 127]].any()
    middle = np.delete(counts, [0, 1, 2, 58, 59, 60, 61, 62, 125, 126, 127])
    assert middle.std() / middle.mean() < 0.03
    assert counts[[1, 59, 61, 126]].min() > 0.6 * middle.mean()


def test_a_span_or_a_word_shares_one_outcome():
    span = make_masking("spanbert", rate=0.08)
    for how, several in (
        (span, False),
        (dataclasses.replace(span, outcome="piece"), True),
    ):
        ids, out, _ = masked(how, sizes=1.0, n=6000)
        row, slot = np.nonzero(out.mlm_weights)
        at = out.mlm_positions[row, slot]
        state = np.where(out.input_ids[row, at] == MASK, 0, 1)
        changed = out.input_ids[row, at] != ids[row, at]
        assert abs((state == 0).mean() - 0.8) < 0.01
        assert abs((changed & (state == 1)).mean() - 0.1) < 0.01
        near = (row[1:] == row[:-1]) & (at[1:] == at[:-1] + 1)
        mixed = (state[1:] != state[:-1])[near].mean()  # touching spans may differ
        assert (mixed > 0.25) == several and (mixed < 0.06) != several


def test_ngrams_keep_to_their_segment_and_cut_where_there_is_no_room():
    ids = np.array([[CLS, 5, 6, SEP, 7, UNK, 8, 9, 10, SEP]], np.int32)
    n = 3000
    keys, drawn = counter_rng.fold(3, np.arange(n)), []
    how = Masking(rate=0.3, lengths=(0.0, 0.0, 1.0))
    out = mask_tokens(
        np.tile(ids, (n, 1)), np.ones((n, 10)), keys, how, tables(np.ones(V, bool)), 3,
        None, drawn,
    )  # fmt: skip
    assert (out.mlm_weights == 1).all()
    kinds = {tuple(p) for p in out.mlm_positions.tolist()}
    assert (6, 7, 8) in kinds and all(not {0, 3, 5, 9} & set(k) for k in kinds)
    assert set(np.concatenate(drawn)) == {1, 2, 3}  # at most as long as their segments


def test_no_room_left_over_still_meets_the_budget():
    how = make_masking("spanbert", rate=1.0)
    _, out, _ = masked(how, length=40, n=200, sizes=0.5, specials=(0, 20, -1))
    assert (out.mlm_weights.sum(1) == 37).all()


def test_no_row_has_a_budget():
    """RoBERTa's budget may be 0: floor(0.15 * 3 + U), here in all rows of a batch."""
    ids = np.array([[CLS, 7, SEP]], np.int32)
    masking = make_masking("roberta", unit="ngram")
    seen = [
        mask_tokens(
            ids, np.ones_like(ids), np.array([key], np.uint64), masking,
            tables(np.ones(V, bool)), 1,
        ).mlm_weights.sum()
        for key in range(40)
    ]  # fmt: skip
    assert set(seen) == {0, 1}

# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_tokenizer, random_rows
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.masking import masker
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import (
    PRESETS,
    UNITS,
    Masking,
    make_masking,
    predictions_per_sequence,
)
from bertjax.data.masking.similar_words import make_similar
from bertjax.data.masking.vocab_tables import make_tables

V, PAD, UNK, CLS, SEP, MASK = 50, 0, 1, 2, 3, 4
SPECIAL = np.array([PAD, UNK, CLS, SEP, MASK])


COUNTS = np.arange(V) ** 2
SIMILAR = make_similar({(9,): [(11,), (12,)], (9, 10): [(13, 14)]})
TABLES = make_tables(fake_tokenizer(V), similar=SIMILAR)


def fits(observed, expected=None):
    return stats.chisquare(observed, expected).pvalue > 1e-4


def all_schemes():
    """Yield every preset with every valid unit, by default and with paper_compat."""
    for preset in PRESETS:
        for unit in (None, *UNITS):
            for compat in (False, True):
                if (preset, unit) in REFUSED:
                    continue
                yield make_masking(preset, unit=unit, paper_compat=compat)


REFUSED = {("distilbert", "ngram"), ("distilbert", "span"), ("macbert", "token")}
ALL = list(dict.fromkeys(all_schemes()))


def name(how):
    changed = {
        f.name: getattr(how, f.name)
        for f in dataclasses.fields(how)
        if getattr(how, f.name) != f.default and f.name != "lengths"
    }
    return "-".join([str(len(how.lengths)), *(f"{k}={v}" for k, v in changed.items())])


@pytest.mark.parametrize("rate", [0.15, 0.6])
@pytest.mark.parametrize("how", ALL, ids=name)
def test_what_always_holds(how, rate):
    how = dataclasses.replace(how, rate=rate)
    rng = np.random.default_rng(1)
    starts = rng.random(V) < 0.6
    tables = make_tables(fake_tokenizer(V, starts), COUNTS, SIMILAR)
    ids, real = random_rows(300, 40, size=V)
    marks = rng.choice([0, 1, 2, 3, 6, 7], ids.shape).astype(np.uint8)
    if how.unit == "concept":
        starts = np.arange(V) % 3 > 0
        marks = (starts[ids] + 16 * (ids % 2)).astype(np.uint8)
    marks = marks if how.unit in ("entity", "concept") else None
    keys = counter_rng.fold(0, np.arange(300))
    P = predictions_per_sequence(how, 40)
    before, drawn = ids.copy(), []
    out = mask_tokens(ids, real, keys, how, tables, P, marks, drawn)
    assert (ids == before).all()
    assert [a.dtype for a in out] == [np.int32] * 3 + [np.float32]
    used = out.mlm_weights > 0
    assert how.repeats or (used == out.mlm_weights).all()
    assert (used[:, :-1] >= used[:, 1:]).all()
    assert not out.mlm_positions[~used].any() and not out.mlm_ids[~used].any()
    row, slot = np.nonzero(used)
    at = out.mlm_positions[row, slot]
    both = used[:, 1:]
    assert (np.diff(out.mlm_positions, axis=1)[both] > 0).all()
    assert (out.mlm_ids[row, slot] == ids[row, at]).all()
    selected = np.zeros(ids.shape, bool)
    selected[row, at] = True
    assert (out.input_ids == ids)[~selected].all() and real[selected].all()
    never = {"text": SPECIAL, "unknown": [CLS, SEP], "all": []}[how.eligible]
    assert not np.isin(ids[selected], never).any()
    new = out.input_ids[selected]
    if how.random_from == "text":
        assert not np.isin(new[new != ids[selected]], [PAD, UNK, CLS, SEP]).any()
    assert (new == MASK).any() != how.similar or how.random_from == "vocabulary"
    tokens, number = real.sum(1), out.mlm_weights.sum(1)
    limit = {
        "round": np.maximum(1, np.rint(rate * tokens)),
        "ceil": np.ceil(rate * tokens - 1e-9),
        "stochastic": np.floor(rate * tokens) + 1,
    }[how.count]
    limit = np.minimum(limit, P)
    assert (number <= limit).all()
    free = ~np.isin(ids, never) & (real == 1)
    if how.unit == "entity":
        free &= marks & 2 > 0
        assert free[selected].all()
    begins = marks & 4 > 0 if how.unit == "entity" else starts[ids]
    if how.unit == "token":
        least = np.minimum(limit - (how.count == "stochastic"), free.sum(1))
        assert (number >= (least > 0) if how.repeats else number >= least).all()
    else:
        joined = free[:, 1:] & free[:, :-1] & ~begins[:, 1:]
        assert (selected[:, 1:] == selected[:, :-1])[joined].all()
        # The budget is met as nearly as units allow: no unchosen unit would fit.
        # (Concepts are chosen in pairs: test_concepts.py.)
        if how.count != "stochastic" and how.unit != "concept":
            spare = limit - number
            for r in np.flatnonzero(spare > 0):
                assert min(left_over(free[r], begins[r], selected[r])) > spare[r]
    lengths = np.concatenate(drawn)
    assert lengths.min() >= 1 and lengths.max() <= len(how.lengths)


def left_over(free, begins, selected):
    """Return the sizes of the units of a row that are not selected."""
    sizes = [10**9]
    for at in np.flatnonzero(free):
        if at == 0 or not free[at - 1] or begins[at]:
            sizes.append(0 if not selected[at] else 10**9)
        sizes[-1] += 1
    return sizes


@pytest.mark.parametrize("unit", ["token", "word"])
def test_round_count_is_exact_and_stochastic_count_is_right_on_average(unit):
    ids, real = random_rows(3000, 40, unknown=0, size=V)
    keys, tokens = counter_rng.fold(0, np.arange(3000)), real.sum(1)
    for rate in (0.15, 0.5, 1.0):
        P = predictions_per_sequence(rate, 40)
        wanted = [min(P, max(1, round(rate * int(n))), int(n) - 2) for n in tokens]
        how = make_masking("bert", rate=rate, unit=unit)
        out = mask_tokens(ids, real, keys, how, TABLES, P)
        assert out.mlm_weights.sum(1).tolist() == wanted
    how = make_masking("roberta", unit=unit)
    count = mask_tokens(ids, real, keys, how, TABLES, 6).mlm_weights.sum(1)
    share = 0.15 * tokens
    assert (count >= np.floor(share)).all() and (count <= np.floor(share) + 1).all()
    assert (count == 0).any()
    assert abs((count - share).mean()) < 5 * 0.5 / np.sqrt(3000)


def test_max_predictions_is_a_limit():
    ids, real = random_rows(50, 40, size=V)
    out = mask_tokens(ids, real, np.arange(50), make_masking("bert"), TABLES, 2)
    assert out.mlm_weights.shape == (50, 2) and out.mlm_weights.sum(1).max() == 2


@pytest.mark.parametrize("unit", ["token", "word"])
def test_selection_is_uniform_over_positions_and_pairs(unit):
    n = 20_000
    ids = np.tile(np.array([[CLS, *range(5, 25), SEP, PAD]], np.int32), (n, 1))
    real = (ids != PAD).astype(np.int32)
    how = make_masking("bert", unit=unit)
    keys = counter_rng.fold(2, np.arange(n))
    out = mask_tokens(ids, real, keys, how, TABLES, 4)
    assert (out.mlm_weights.sum(1) == 3).all()
    counts = np.bincount(out.mlm_positions[:, :3].ravel(), minlength=23)
    assert not counts[[0, 21, 22]].any() and fits(counts[1:21])
    first, last = out.mlm_positions[:, 0], out.mlm_positions[:, 2]
    ranges = np.bincount(last - first, minlength=20)[2:]
    law = np.array([(20 - d) * (d - 1) for d in range(2, 20)])
    assert fits(ranges, law / law.sum() * n)


@pytest.mark.parametrize("replacement", ["uniform", "unigram"])
def test_outcomes_are_80_10_10_and_replacements_follow_their_law(replacement):
    n = 30_000
    ids = np.full((n, 22), 7, np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    weights = np.zeros(V, int)
    weights[5:] = np.arange(1, 46)
    tables = make_tables(fake_tokenizer(V), weights)
    how = make_masking("bert", replacement=replacement)
    keys = counter_rng.fold(3, np.arange(n))
    out = mask_tokens(ids, np.ones_like(ids), keys, how, tables, 4)
    new = np.take_along_axis(out.input_ids, out.mlm_positions[:, :3], 1).ravel()
    counts = np.bincount(new, minlength=V)
    law = (
        weights[5:] / weights.sum() if replacement == "unigram" else np.full(45, 1 / 45)
    )
    expected = np.zeros(V)
    expected[5:] = 0.1 * law
    expected[7] += 0.1
    expected[MASK] = 0.8
    assert not counts[[PAD, UNK, CLS, SEP]].any()
    assert fits(counts[4:], expected[4:] * new.size)


def test_paper_compat_restores_what_the_official_code_does():
    n = 20_000
    ids = np.tile(np.array([[CLS, UNK, 9, 9, SEP, PAD]], np.int32), (n, 1))
    real = (ids != PAD).astype(np.int32)
    keys = counter_rng.fold(4, np.arange(n))
    bert = make_masking("bert", rate=0.4, paper_compat=True)
    out = mask_tokens(ids, real, keys, bert, TABLES, 3)
    assert set(out.mlm_positions[:, :2].ravel()) == {1, 2, 3}
    changed = out.input_ids[:, 2][out.input_ids[:, 2] != 9]
    counts = np.bincount(changed, minlength=V)
    assert fits(np.delete(counts, [MASK, 9]))
    roberta = make_masking("roberta", rate=0.4, paper_compat=True)
    out = mask_tokens(ids, real, keys, roberta, TABLES, 3)
    assert fits(np.bincount(out.mlm_positions[out.mlm_weights == 1], minlength=5))


def skip_words(ids, starts, order, budget):
    """Take words one by one, as the official code does; return their positions."""
    words = []
    for at, token in enumerate(ids):
        if token in SPECIAL:
            words.append(None)
        elif starts[token] or not words or words[-1] is None:
            words.append([at])
        else:
            words[-1].append(at)
    words = sorted((w for w in words if w), key=lambda w: order[w[0]])
    taken = []
    for word in words:
        if len(taken) + len(word) <= budget:
            taken += word
    return sorted(taken)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 1), st.floats(0, 1), st.integers(4, 70))
def test_whole_words_equal_the_loop_that_skips_overflowing_words(
    seed, rate, begin, length
):
    starts = np.random.default_rng(seed).random(V) < begin
    tables = make_tables(fake_tokenizer(V, starts))
    ids, real = random_rows(5, length, seed, size=V)
    keys = counter_rng.fold(seed, np.arange(5))
    noise = counter_rng.bits(
        counter_rng.fold(keys, "choose")[:, None], np.arange(length)
    )
    noise &= np.uint64(2**63 - 1)  # a set top bit means "not to be predicted"
    P = predictions_per_sequence(rate, length)
    out = mask_tokens(ids, real, keys, Masking(rate=rate, unit="word"), tables, P)
    for r in range(5):
        budget = min(P, max(1, round(rate * int(real[r].sum()))))
        expected = skip_words(ids[r], starts, noise[r], budget)
        count = int(out.mlm_weights[r].sum())
        assert out.mlm_positions[r, :count].tolist() == expected


def test_pieces_draw_alone_or_together():
    n = 5000
    starts = np.ones(V, bool)
    starts[10] = False
    tables = make_tables(fake_tokenizer(V, starts))
    ids = np.tile(np.array([[CLS, 9, 10, 10, SEP]], np.int32), (n, 1))
    keys = counter_rng.fold(5, np.arange(n))
    how = Masking(rate=0.6, unit="word")
    for outcome in ("piece", "word"):
        how = dataclasses.replace(how, outcome=outcome)
        new = mask_tokens(ids, np.ones_like(ids), keys, how, tables, 3).input_ids
        masked = (new[:, 1:4] == MASK).sum(1)
        assert set(masked) == ({0, 1, 2, 3} if outcome == "piece" else {0, 3})
        assert abs(masked.mean() / 3 - 0.8) < 0.03


@pytest.mark.parametrize("how", ALL, ids=name)
def test_rows_do_not_depend_on_their_neighbours_or_on_blocks(how, monkeypatch):
    ids, real = random_rows(60, 33, size=V)
    marks = np.random.default_rng(2).choice([0, 1, 2, 3, 6, 7], ids.shape)
    keys = counter_rng.fold(6, np.arange(60))
    tables = make_tables(fake_tokenizer(V, np.arange(V) % 3 > 0), COUNTS, SIMILAR)
    for rate, P in ((0.15, 5), (0.9, 30)):
        how = dataclasses.replace(how, rate=rate)
        whole = mask_tokens(ids, real, keys, how, tables, P, marks)
        monkeypatch.setattr(masker, "_BLOCK", 70)
        for pick in (slice(3, 50, 7), slice(11, 12), slice(0, 0)):
            part = mask_tokens(
                ids[pick], real[pick], keys[pick], how, tables, P, marks[pick]
            )
            for a, b in zip(whole, part, strict=True):
                assert (a[pick] == b).all()


@pytest.mark.parametrize(
    "how", [how for how in ALL if how.eligible == "text"], ids=name
)
def test_nothing_to_predict_is_no_error(how):
    tables = make_tables(fake_tokenizer(V), COUNTS, SIMILAR)
    ids = np.array([[CLS, SEP, PAD], [CLS, UNK, SEP], [PAD] * 3], np.int32)
    real = (ids != PAD).astype(np.int32)
    for n in (3, 0):
        keys = counter_rng.fold(0, np.arange(n))
        out = mask_tokens(ids[:n], real[:n], keys, how, tables, 1)
        assert not out.mlm_weights.any() and (out.input_ids == ids[:n]).all()


def test_ids_outside_the_vocabulary_raise():
    ids = np.array([[CLS, V, SEP]], np.int32)
    with pytest.raises(IndexError):
        mask_tokens(
            ids, np.ones_like(ids), np.zeros(1), make_masking("bert"), TABLES, 1
        )


def test_predictions_per_sequence_is_not_fooled_by_floats():
    assert predictions_per_sequence(0.15, 128) == 20
    assert predictions_per_sequence(0.15, 512) == 77
    assert predictions_per_sequence(0.07, 100) == 7
    assert predictions_per_sequence(0.1, 30) == 3
    assert predictions_per_sequence(1, 8) == 8


def test_replacements_as_common_as_they_are_need_counts():
    how = make_masking("bert", replacement="unigram")
    ids, real = random_rows(40, 20, size=V)
    with pytest.raises(UserError, match="needs the counts"):
        mask_tokens(ids, real, np.arange(40), how, TABLES, 3)

# SPDX-License-Identifier: Apache-2.0
"""Concept masking: as many words of a concept as others, and labels for both."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows, Spec
from bertjax.data.features.concept_labels import label_specs, make_labels
from bertjax.data.masking.choose import find_units
from bertjax.data.masking.concepts import choose_concepts
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import make_masking
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.token_flags import BEGINS_WORD, CONCEPT, CONTROL

V, PAD, CLS, SEP, MASK = 60, 0, 2, 3, 4
VOCABULARY = fake_tokenizer(V, word_starts=np.arange(V) < 50)
TABLES = make_tables(VOCABULARY)


def mask(ids, concept, rate=0.3, keys=None, **how):
    """Mask rows; concept: bool [b, L]. Words begin at ids below 50."""
    ids = np.asarray(ids, np.int32)
    marks = (ids < 50) * BEGINS_WORD + concept * CONCEPT
    keys = counter_rng.fold(7, np.arange(len(ids))) if keys is None else keys
    masking = make_masking("bert", unit="concept", rate=rate, **how)
    P = int(np.ceil(rate * ids.shape[1]))
    return mask_tokens(ids, ids != PAD, keys, masking, TABLES, P, marks.astype("u1"))


def chosen(out, shape):
    where = np.zeros(shape, bool)
    row, slot = np.nonzero(out.mlm_weights)
    where[row, out.mlm_positions[row, slot]] = True
    return where


def test_the_example_of_the_docstring():
    noise = np.array([[8, 9, 2, 11, 4]], np.uint64) << np.uint64(8)
    noise |= np.arange(5, dtype=np.uint64)  # noise order: c e a b d
    noise[0, 4] = 4  # noise order: e c a b d
    begins = np.ones((1, 5), bool)
    marks = np.array([[0, 1, 0, 0, 1]], np.uint8) * CONCEPT
    units = find_units(begins, begins)
    for budget, taken in ((4, [0, 1, 2, 4]), (3, [2, 4]), (1, [])):
        got = choose_concepts(noise, units, begins, marks, np.array([budget]))
        assert got.tolist() == taken


@given(st.integers(0, 2**32), st.integers(0, 12), st.floats(0.05, 0.9))
def test_as_many_of_the_concept_as_others_and_whole_words(seed, hidden, rate):
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, V, (6, 24))
    ids[:, 0], ids[:, 1], ids[:, -1] = CLS, 9, SEP
    ids[:, 12] = SEP
    ids[0, 20:] = PAD
    begins = ids < 50
    begins[:, [1, 13]] = True
    word = np.cumsum(begins, axis=1)
    mine = (word * 7 + np.arange(6)[:, None]) % 12 < hidden
    mine &= ids >= 5
    out = mask(ids, mine, rate)
    where = chosen(out, ids.shape)
    assert not where[ids < 5].any()
    real = (ids != PAD).sum(1)
    assert (where.sum(1) <= np.maximum(1, np.rint(rate * real))).all()
    for r in range(6):
        words = {
            (w, m) for w, m in zip(word[r][where[r]], mine[r][where[r]], strict=True)
        }
        # A separator within a word makes two stretches with one number; check
        # stretches.
        assert all(where[r][(word[r] == w) & (ids[r] >= 5)].all() for w, _ in words)
        assert sum(m for _, m in words) * 2 == len(words)


def test_each_word_is_chosen_as_often_and_corrupted_in_the_shares():
    n = 8000
    ids = np.tile([CLS, *range(10, 30), SEP], (n, 1))
    concept = np.zeros(ids.shape, bool)
    concept[:, [3, 8, 15]] = True
    out = mask(ids, concept, rate=0.19)
    where = chosen(out, ids.shape)
    assert (where.sum(1) == 4).all()  # two pairs; there are three concept words
    counts = where.sum(0)
    assert stats.chisquare(counts[[3, 8, 15]]).pvalue > 1e-4
    assert stats.chisquare(np.delete(counts, [0, 3, 8, 15, 21])).pvalue > 1e-4
    assert not counts[[0, 21]].any()
    seen, truth = out.input_ids[where], ids[where]
    shares = [(seen == MASK).sum(), ((seen != MASK) & (seen != truth)).sum()]
    shares.append(len(seen) - sum(shares))
    drawn = 1 / (V - 5)  # a random token may equal the true one
    expected = np.array([0.8, 0.1 * (1 - drawn), 0.1 * (1 + drawn)]) * len(seen)
    assert stats.chisquare(shares, expected).pvalue > 1e-4
    assert seen[(seen != MASK) & (seen != truth)].min() >= 5


def test_rows_without_one_kind_predict_nothing_and_rows_stand_alone():
    ids = np.tile([CLS, *range(10, 30), SEP], (4, 1))
    concept = np.zeros(ids.shape, bool)
    concept[1], concept[2, 5] = ids[1] >= 5, True
    out = mask(ids, concept)
    assert out.mlm_weights.sum(1).tolist() == [0, 0, 2, 0]
    keys = counter_rng.fold(7, np.arange(4))
    alone = mask(ids[2:3], concept[2:3], keys=keys[2:3])
    for a, b in zip(alone, out, strict=True):
        assert (a[0] == b[2]).all()


def test_lengths_of_spans_do_not_go_with_a_concept():
    with pytest.raises(UserError, match="chosen one at a time"):
        make_masking("bert", unit="concept", lengths="0.5,0.5")


def test_labels_say_what_is_of_each_concept():
    marks = np.array([[1, 1, 17, 1, 33], [1, 1, 1, 1, 1]], np.uint8)
    arrays = {"input_ids": np.zeros((2, 5), np.int32), "marks": marks}
    rows = GatheredRows(arrays, np.zeros(2), np.zeros(2), np.zeros(2), 0.25)
    at = np.array([[2, 4, 0], [1, 2, 0]])
    got = make_labels(["concept", "control"], rows, at)
    assert got["concept_labels"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert got["control_labels"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert got["concept_texts"].tolist() == [1, 0]
    assert got["phase_progress"].tolist() == [0.25, 0.25]
    specs = label_specs(["concept", "control"], 3, arrays)
    assert {k: (v.shape[1:], v.dtype.name) for k, v in got.items()} == {
        k: (spec.shape, spec.dtype) for k, spec in specs.items()
    }
    assert make_labels([], rows, at) == label_specs([], 3, arrays) == {}
    assert marks[0, 2] & CONCEPT and marks[0, 4] & CONTROL


def test_packed_rows_have_a_label_a_sequence():
    marks = np.array([[1, CONCEPT, 1, CONCEPT, 0], [1, 1, CONCEPT, 0, 0]], np.uint8)
    arrays = {
        "input_ids": np.zeros((2, 5), np.int32),
        "marks": marks,
        "segment_ids": np.array([[1, 1, 2, 3, 0], [1, 2, 2, 0, 0]]),
        "cls_positions": np.array([[0, 2, 3, 0], [0, 1, 0, 0]]),
    }
    rows = GatheredRows(arrays, np.zeros(2), np.zeros(2), np.zeros(2))
    got = make_labels(["concept"], rows, np.array([[1], [0]]))["concept_texts"]
    assert got.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]] and got.dtype == np.int32
    specs = label_specs(["concept"], 1, {"cls_positions": Spec((4,))})
    assert specs["concept_texts"].shape == (4,)

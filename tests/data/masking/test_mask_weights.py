# SPDX-License-Identifier: Apache-2.0
"""Adaptive masking: the weights of pieces, their file, and what they choose."""

import itertools
import json

import numpy as np
import pytest
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.masking.mask_weights import (
    LEAST,
    format_weights,
    read_mask_weights,
    weigh,
)
from bertjax.data.masking.masker import make_masker, mask_tokens
from bertjax.data.masking.presets import make_masking
from bertjax.data.masking.vocab_tables import make_tables

V, PAD, CLS, SEP = 12, 0, 2, 3
VOCABULARY = fake_tokenizer(
    V,
    word_starts=np.arange(V) < 9,
    pieces=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", '"', "\\", "é", *"xyz"],
    identity="1f",
)
# Special tokens have the highest weights, but are never chosen.
WEIGHTS = np.array([9, 9, 9, 9, 9, 1, 0.5, 0.25, 0.2, 0.1, 1 / 3, LEAST])


def draw(how, ids, weights=WEIGHTS):
    ids = np.asarray(ids, np.int32)
    keys = counter_rng.fold(7, np.arange(len(ids)))
    tables = make_tables(VOCABULARY, weights=weights)
    return mask_tokens(ids, ids != PAD, keys, how, tables, ids.shape[1])


def count(out):
    return np.bincount(out.mlm_ids[out.mlm_weights > 0], minlength=V)


def test_one_token_a_row_is_chosen_in_proportion_to_its_weight():
    rng, n = np.random.default_rng(0), 20_000
    ids = rng.integers(5, V, (n, 8))
    ids[:, 0], ids[:, 7] = CLS, SEP
    got = count(draw(make_masking("bert", rate=0.1, weights="file"), ids))
    share = WEIGHTS[ids[:, 1:7]] / WEIGHTS[ids[:, 1:7]].sum(1, keepdims=True)
    expected = np.bincount(ids[:, 1:7].ravel(), share.ravel(), V)
    assert got.sum() == n and not got[:5].any()
    assert stats.chisquare(got[5:], expected[5:]).pvalue > 1e-4
    even = np.bincount(ids[:, 1:7].ravel(), minlength=V)[5:] / 6
    assert stats.chisquare(got[5:], even).pvalue < 1e-9


def test_several_tokens_are_drawn_one_after_the_other():
    """Compare with the sum over all orders in which three of seven can be drawn."""
    n, text = 20_000, range(5, V)
    expected = np.zeros(V)
    for order in itertools.permutations(text, 3):
        left, p = WEIGHTS[5:].sum(), 1.0
        for piece in order:
            p *= WEIGHTS[piece] / left
            left -= WEIGHTS[piece]
        expected[list(order)] += p
    out = draw(
        make_masking("bert", rate=0.33, weights="f"), [[CLS, *text, SEP, PAD]] * n
    )
    sets = out.mlm_ids[:, :3]
    assert (out.mlm_weights.sum(1) == 3).all()
    got = np.bincount(sets.ravel(), minlength=V)
    assert np.abs(got / n - expected).max() < 4 * 0.5 / n**0.5


@pytest.mark.parametrize("preset", ["bert", "roberta", "electra", "distilbert"])
def test_as_many_are_chosen_as_without_weights(preset):
    rng = np.random.default_rng(1)
    ids = rng.integers(4, V, (300, 40))
    ids[:, 0] = CLS
    ids[np.arange(40) >= rng.integers(3, 41, 300)[:, None]] = PAD
    plain = draw(make_masking(preset), ids, np.ones(V))
    out = draw(make_masking(preset, weights="file"), ids)
    assert (out.mlm_weights.sum(1) == plain.mlm_weights.sum(1)).all()
    assert not count(out)[:5].any() and (out.mlm_ids != plain.mlm_ids).any()


def test_whole_words_have_the_weight_of_their_first_piece():
    ids = [[CLS, 5, 9, 8, 9, SEP]] * 8000  # a word of weight 1 and one of weight 0.2
    out = draw(make_masking("bert", rate=0.33, unit="word", weights="file"), ids)
    words = out.mlm_ids[:, 0]
    assert ((out.mlm_weights.sum(1) == 2) & np.isin(words, [5, 8])).all()
    assert abs((words == 5).mean() - 1 / 1.2) < 0.02


def test_weights_are_the_shares_of_wrong_guesses():
    guesses, right = np.zeros(V), np.zeros(V)
    guesses[5:8], right[5:8] = [3, 96, 1], [0, 95, 0]  # 95 of 100 right
    weights = weigh(guesses, right)
    assert weights[[0, 8]] == pytest.approx(0.05)  # never predicted: the mean
    assert weights[5:8] == pytest.approx([1 - 0.95 / 4, LEAST, 1 - 0.95 / 2])
    with pytest.raises(UserError, match="--mask_weights: nothing was predicted"):
        weigh(np.zeros(V), np.zeros(V))


def test_a_file_gives_back_what_was_written(tmp_path):
    (tmp_path / "w.json").write_text(format_weights(WEIGHTS, VOCABULARY))
    found = read_mask_weights(tmp_path / "w.json", VOCABULARY)
    assert found == pytest.approx(WEIGHTS, abs=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokenizer": "2e"}, "is of another tokenizer than the run's"),
        ({"weights": [["a", 1.0]]}, "is of another tokenizer than the run's"),
        ({"format": 2}, "has format 2: this version reads 1"),
        ({"weights": [["a", 0.0]] * V}, "each weight must be a number above 0"),
        ({"weights": [["a", float("nan")]] * V}, "must be a number above 0"),
        ({"weights": [["a", "b"]] * V}, "is not a file of weights"),
        ({"weights": 3}, "is not a file of weights"),
        (None, "is not a file of weights, which bertjax.evaluate --what=mlm"),
    ],
)
def test_other_files_are_refused(tmp_path, change, words):
    content = json.loads(format_weights(WEIGHTS, VOCABULARY))
    text = "the 0.5\n" if change is None else json.dumps(content | change)
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(UserError, match=rf"^data\.mask_weights=.*w\.json.*{words}"):
        read_mask_weights(tmp_path / "w.json", VOCABULARY)


@pytest.mark.parametrize(
    "name, how, words",
    [
        ("albert", {}, r"mask_weights='f' does not go with .*'albert': weighted"),
        ("bert", {"unit": "span"}, r"mask_unit='span' does not go with .*weighted tok"),
        (
            "electra",
            {"paper_compat": True},
            r"mask_weights='f' does not .*paper_compat",
        ),
        (
            "lab.every_third",
            {},
            r"data\.mask_weights refines presets, and .* is not a preset",
        ),
    ],
)
def test_what_does_not_go_together(name, how, words):
    with pytest.raises(UserError, match=words):
        make_masker(name, weights="f", **how)

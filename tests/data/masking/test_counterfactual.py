# SPDX-License-Identifier: Apache-2.0
"""Counterfactual words in rows: whole words, an involution, half of the rows."""

import numpy as np
import pytest
from host_half import make_half
from made_up import fake_tokenizer
from scipy import stats

from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.data.masking.choose import Rows
from bertjax.data.masking.counterfactual import draw_rows, make_pair_table, swap_words
from bertjax.data.masking.similar_words import make_similar
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.data.tokenizers.word_pairs import swap_text, written_forms

V, PAD, CLS, SEP, MASK = 50, 0, 2, 3, 4
VOCABULARY = fake_tokenizer(V, word_starts=np.arange(V) < 30)
# The pairs: 7 and 9, and the two-piece words (11, 30) and (12, 31).
PAIRS = {(7,): [(9,)], (9,): [(7,)], (11, 30): [(12, 31)], (12, 31): [(11, 30)]}
TABLES = make_tables(VOCABULARY, pairs=make_similar(PAIRS))
ROW = [CLS, 7, 11, 30, 9, SEP, 7, 32, 12, 31, 30, SEP, PAD]
OTHER = [CLS, 9, 12, 31, 7, SEP, 7, 32, 12, 31, 30, SEP, PAD]  # 7 32 is another word


def test_whole_words_change_in_the_rows_that_are_drawn():
    ids = np.array([ROW, ROW, OTHER], np.int32)
    rows = Rows(ids, (ids != PAD).astype(np.int32), np.zeros(3, np.uint64))
    out = swap_words(rows, TABLES, np.array([True, False, True]))
    assert out.tolist() == [OTHER, ROW, ROW]
    assert (ids == [ROW, ROW, OTHER]).all()  # the input is unchanged


def test_twice_is_nothing_whatever_the_row():
    rng = np.random.default_rng(0)
    ids = rng.choice([CLS, SEP, PAD, 1, 7, 9, 11, 12, 13, 30, 31], (500, 24))
    ids = ids.astype(np.int32)
    real = (ids != PAD).astype(np.int32)
    rows, which = Rows(ids, real, np.zeros(500, np.uint64)), np.ones(500, bool)
    once = swap_words(rows, TABLES, which)
    changed = once != ids
    assert changed.any(1).mean() > 0.9 and (ids[changed] >= 7).all()
    assert (swap_words(rows._replace(ids=once), TABLES, which) == ids).all()


def test_half_of_the_rows_are_swapped_before_they_are_masked():
    half = make_half(frozenset({"mlm"}), VOCABULARY, len(ROW), TABLES)
    n = 2000
    ids = np.tile(np.array(ROW, np.int32), (n, 1))
    arrays = {"input_ids": ids, "attention_mask": (ids != PAD).astype(np.int32)}
    keys = counter_rng.fold(3, np.arange(n))
    rows = GatheredRows(arrays, keys, np.arange(n), np.arange(n))
    batch = half.make(rows)
    drawn = draw_rows(keys)
    assert stats.binomtest(int(drawn.sum()), n).pvalue > 1e-4
    swapped = np.where(drawn[:, None], np.array(OTHER), ids)
    truth = np.take_along_axis(swapped, batch["mlm_positions"], 1)
    weights = batch["mlm_weights"] > 0
    assert (truth[weights] == batch["mlm_ids"][weights]).all()
    seen = batch["input_ids"].copy()
    np.put_along_axis(seen, batch["mlm_positions"], truth, 1)
    assert (seen == swapped).all()
    counts = half.count({**arrays, "keys": keys}, batch)
    assert counts["swapped"] == 4 * drawn.sum() and not counts["special_selected"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "she", "He", "She"]
    pieces += ["act", "##or", "##ress", ".", "king", "qu", "##een", "man", "woman"]
    path.write_text("\n".join(pieces) + "\n")
    return load_tokenizer(path)


def test_pairs_of_unlike_numbers_of_pieces_are_counted(tokenizer):
    pairs = {"he": "she", "actor": "actress", "king": "queen", "man": "woman"}
    pairs |= {b: a for a, b in pairs.items()}
    table = make_pair_table(written_forms(pairs), tokenizer)
    # Known: he, He, actor, man and their partners; king and queen differ in length;
    # other capitalized forms are unknown.
    assert len(table.keys) == 8 and table.skipped["other length"] == 2
    assert table.skipped["unknown"] == 14 and not table.skipped["same"]
    text = "He . woman he actor"
    ids = np.array([[CLS, *tokenizer.encode(text), SEP]], np.int32)
    rows = Rows(ids, np.ones_like(ids), np.zeros(1, np.uint64))
    tables = make_tables(tokenizer, pairs=table)
    got = swap_words(rows, tables, np.ones(1, bool))
    assert got[0, 1:-1].tolist() == tokenizer.encode(swap_text(text, pairs))

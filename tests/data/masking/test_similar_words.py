# SPDX-License-Identifier: Apache-2.0
"""Similar words: the table, how it is read, and how MacBERT uses it."""

import gzip
from collections import Counter

import numpy as np
import pytest
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import make_masking
from bertjax.data.masking.similar_words import (
    hash_words,
    ids_within_sentences,
    make_similar,
    read_similar,
)
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer

V, PAD, UNK, CLS, SEP, MASK = 50, 0, 1, 2, 3, 4
STARTS = np.arange(V) < 30  # 30 to 49 continue a word


def mask(row, table, how=None, n=4000, P=None):
    vocabulary = fake_tokenizer(V, word_starts=STARTS)
    ids = np.tile(np.array([row], np.int32), (n, 1))
    keys = counter_rng.fold(4, np.arange(n))
    how = how or make_masking("macbert", rate=1.0)
    tables = make_tables(vocabulary, similar=table)
    return mask_tokens(ids, ids != PAD, keys, how, tables, P or len(row))


def test_words_share_their_outcome_and_similar_ones_fit():
    row = [CLS, 9, 30, 31, 10, 11, 30, SEP]
    near = [(12, 40, 41), (13, 42, 43), (14, 44, 45)]
    table = make_similar({(9, 30, 31): near, (10,): [(15,)], (11, 31): [(16, 46)]})
    out = mask(row, table)
    assert not (out.input_ids == MASK).any()
    words = out.input_ids[:, 1:4]
    seen = Counter(map(tuple, words.tolist()))
    assert abs(seen[9, 30, 31] / 4000 - 0.1) < 0.02
    counts = [seen[w] for w in near]
    assert (
        abs(sum(counts) / 4000 - 0.8) < 0.02 and stats.chisquare(counts).pvalue > 1e-4
    )
    assert abs((out.input_ids[:, 4] == 15).mean() - 0.8) < 0.03
    # (11, 30) is in no table: as many random pieces replace it.
    changed = (out.input_ids[:, 5:7] != [11, 30]).any(1)
    assert abs(changed.mean() - 0.9) < 0.02
    drawn = out.input_ids[changed, 5:7]
    assert len(set(drawn[:, 0])) > 40 and len(set(drawn[:, 1])) > 40
    assert drawn.min() >= 5


def test_each_word_of_an_ngram_is_looked_up_alone():
    row = [CLS, *[9, 10] * 10, SEP]
    table = make_similar({(9,): [(15,)], (10,): [(16,)], (9, 10): [(20, 21)]})
    how = make_masking("macbert", rate=0.4, lengths="0,1", corruption="1,0,0")
    out = mask(row, table, how, P=9)
    assert (out.mlm_weights.sum(1) == 9).all()
    seen = np.take_along_axis(out.input_ids, out.mlm_positions, 1)
    assert (seen == np.where(out.mlm_ids == 9, 15, 16)).all()


def test_an_empty_table_is_random_replacement():
    row = [CLS, 9, 30, 10, 11, SEP]
    empty = make_similar({})
    got = mask(row, empty)
    how = make_masking("macbert", rate=1.0, corruption="0,0.9,0.1")
    for a, b in zip(got, mask(row, empty, how), strict=True):
        assert (a == b).all()
    assert not (got.input_ids == MASK).any()
    with pytest.raises(UserError, match=r"needs data.similar"):
        mask(row, None)


def test_ngrams_are_of_words_in_the_published_shares():
    # Words of one and of two pieces alternate; lengths count words, not pieces.
    row = [CLS, *[9, 10, 30] * 40, SEP]
    drawn = []
    vocabulary = fake_tokenizer(V, word_starts=STARTS)
    ids = np.tile(np.array([row], np.int32), (1000, 1))
    tables = make_tables(vocabulary, similar=make_similar({}))
    keys, how = counter_rng.fold(4, np.arange(1000)), make_masking("macbert")
    out = mask_tokens(ids, ids != PAD, keys, how, tables, 19, drawn=drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=5)[1:]
    assert len(counts) == 4 and counts.sum() > 5000
    shares = counts.sum() * np.array([0.4, 0.3, 0.2, 0.1])
    assert stats.chisquare(counts, shares).pvalue > 1e-4
    # Whole words: the second piece is predicted if and only if the first is.
    chosen = np.zeros(ids.shape, bool)
    at, slot = np.nonzero(out.mlm_weights)
    chosen[at, out.mlm_positions[at, slot]] = True
    assert (chosen[:, 2:-1:3] == chosen[:, 3:-1:3]).all()
    assert not chosen[:, [0, -1]].any() and out.input_ids[chosen].min() >= 5


def test_hashes_differ_by_piece_order_and_number():
    words = [(5,), (5, 5), (5, 6), (6, 5), (6,), (5, 6, 5), *((i, j) for i in range(60)
             for j in range(7, 60))]  # fmt: skip
    flat = np.array([i for w in words for i in w])
    size = np.array([len(w) for w in words])
    codes = hash_words(flat, np.cumsum(size) - size, size)
    assert len(set(codes.tolist())) == len(words)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "big", "large", "huge",
              "##r", "small", "tiny", "我", "你", "们"]  # fmt: skip
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return load_tokenizer(path)


def read(tmp_path, text, tokenizer):
    path = tmp_path / "similar.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_similar(path, tokenizer)


def pairs(table, words):
    """Look words up by their ids; return all their similar words."""
    found = {}
    for word in words:
        ids, draws = np.array(word), np.arange(200)
        got = table.draw(
            np.tile(ids, 200), draws * len(word), np.full(200, len(word)),
            np.full(200, 7, np.uint64), draws,
        )  # fmt: skip
        found[word] = set(map(tuple, got.reshape(200, -1).tolist()))
    return found


def test_files_are_read_and_what_does_not_fit_is_counted(tmp_path, tokenizer):
    lines = ["\ufeffbig large Huge biggr bigr xyz BIG", "", " bigr\thuger smallr"]
    text = "\n".join([*lines, "我们 你们", "big tiny", ""])
    table = read(tmp_path, text, tokenizer)
    assert table.skipped == {"other length": 1, "unknown": 2, "same": 1}
    found = pairs(table, [(5,), (5, 8), (11, 13), (6,)])
    assert found == {
        (5,): {(6,), (7,), (10,)}, (5, 8): {(7, 8), (9, 8)}, (11, 13): {(12, 13)},
        (6,): {(-1,)},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("big large\nsmall\n", r"similar.txt: line 2 holds 'small' and no similar"),
        (b"big large\n\xff\xfe x\n", r"similar.txt: not UTF-8 .byte 10, line 2"),
        ("\n\u3000\n", r"similar.txt holds no words"),
        ("\n  \n", r"similar.txt: the file is empty"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, tokenizer, text, message):
    with pytest.raises(UserError, match=r"data.similar=.*" + message):
        read(tmp_path, text, tokenizer)
    with pytest.raises(
        UserError, match=r"data.similar=.*none.txt: cannot be read \(No s"
    ):
        read_similar(tmp_path / "none.txt", tokenizer)


def test_nothing_in_a_gz_file_is_nothing(tmp_path, tokenizer):
    path = tmp_path / "similar.txt.gz"
    path.write_bytes(gzip.compress(b"\n"))
    with pytest.raises(UserError, match=r"similar.txt.gz: the file is empty"):
        read_similar(path, tokenizer)


TEXTS = ["the big house and the small house are big or small", "我们去吧你们去吧"] * 30


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece", "byte_bpe"])
def test_words_have_the_pieces_of_the_middle_of_a_sentence(kind):
    tokenizer = train_tokenizer(TEXTS, kind, {"byte_bpe": 330}.get(kind, 60))
    words = ["big", "house", "small", "们去"]
    ids = dict(zip(words, ids_within_sentences(words, tokenizer), strict=True))
    english = tokenizer.encode("the big house and the small house")
    assert english[-len(ids["house"]) :] == list(ids["house"])
    for word in ("big", "small"):
        n = len(ids[word])
        assert ids[word] in [tuple(english[i : i + n]) for i in range(len(english))]
    assert tokenizer.encode("我们去")[-len(ids["们去"]) :] == list(ids["们去"])
    text = tokenizer.decode(ids["们去"])
    assert text.replace(" ", "") == "们去"

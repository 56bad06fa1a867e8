# SPDX-License-Identifier: Apache-2.0
"""Tables of similar words: found by vectors or a thesaurus, written, read again."""

from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError, prepare
from bertjax.data.masking import find_similar
from bertjax.data.masking.similar_words import HEADER, NONE, read_similar
from bertjax.data.token_flags import BEGINS_WORD
from bertjax.data.tokenizers.tokenizer import load_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "big", "large", "huge", "##r"]
PIECES += ["small", "tiny", "我", "你", "们", "1", ".", "他"]
BIG, LARGE, HUGE, R, SMALL, TINY, WO, NI, MEN, ONE, DOT, TA = range(5, 17)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return load_tokenizer(path)


def store(sentences, marks=None):
    ends = np.cumsum([0, *map(len, sentences)])
    tokens = np.array([i for s in sentences for i in s], np.uint16)
    return SimpleNamespace(tokens=tokens, sentences=ends, marks=marks)


def test_words_are_numbered_across_stores_the_commonest_first(tokenizer):
    one = store([[BIG, R, SMALL], [SMALL, 1, R, SMALL]])
    # Marks state where words begin: here the two characters are one word.
    two = store([[WO, MEN, SMALL]], np.array([1, 0, 1], np.uint8) * BEGINS_WORD)
    got = find_similar.number_words([one, two], tokenizer)
    assert got.ids[0] == (SMALL,) and set(got.ids[1:]) == {(BIG, R), (WO, MEN)}
    assert got.count.tolist() == [4, 1, 1]
    bigger, we = got.ids.index((BIG, R)), got.ids.index((WO, MEN))
    # [UNK] with its continuation is no word.
    assert got.text.tolist() == [bigger, 0, 0, -1, 0, we, 0]
    assert got.ends.tolist() == [2, 5, 7]


def test_words_are_those_that_can_be_looked_up_again(tokenizer):
    ids = [(BIG, R), (WO, MEN), (ONE,), (DOT,), (R,), (SMALL,)]
    numbered = find_similar.Numbered(ids, np.ones(6), np.zeros(0), np.zeros(0))
    texts = find_similar.write_words(numbered, tokenizer)
    # No numbers, no full stops, and not "##r", which does not begin a word.
    assert texts == ["bigr", "我们", "", "", "", "small"]


def test_the_nearest_have_the_same_size_and_are_close():
    vectors = np.array(
        [[1, 0], [0.9, 0.1], [0.8, 0.3], [1, 0.01], [-1, 0], [0, 0], [1, 0.02]], float
    )
    sizes = np.array([1, 1, 1, 2, 1, 1, 1])
    usable = np.array([True] * 6 + [False])
    near = find_similar.nearest_words(vectors, sizes, usable)
    assert near == [[1, 2], [0, 2], [1, 0], [], [], [], []]
    many = np.random.default_rng(0).normal(size=(1500, 8))
    size = np.arange(1500) % 2
    near = find_similar.nearest_words(many, size, np.ones(1500, bool))
    unit = many / np.linalg.norm(many, axis=1, keepdims=True)
    for word in (0, 1, 1499):
        cosine = np.where(size == size[word], unit @ unit[word], -1)
        cosine[word] = -1
        assert near[word] == np.argsort(-cosine)[: find_similar.NEAREST].tolist()


def test_vectors_find_words_of_like_neighbours_and_are_the_same_again(tokenizer):
    pytest.importorskip("gensim")
    rng = np.random.default_rng(1)
    pools = [(BIG, LARGE, HUGE), (SMALL, TINY)]
    text = []
    for _ in range(3000):
        pool = pools[0] if rng.random() < 0.5 else pools[1]
        marker = WO if pool is pools[0] else NI
        text.append([marker, rng.choice(pool), marker, rng.choice(pool), marker])
    found = find_similar.similar_by_text([store(text)], tokenizer)
    assert {*found["big"][:2]} == {"large", "huge"} and found["small"][0] == "tiny"
    assert find_similar.similar_by_text([store(text)], tokenizer) == found
    with pytest.raises(UserError, match=r"no word of data.train occurs 10 times"):
        find_similar.similar_by_text([store(text[:1])], tokenizer)


def test_a_thesaurus_gives_the_words_that_fit(tmp_path, tokenizer):
    path = tmp_path / "thesaurus.txt"
    lines = ["Aa01A01= big large bigr big", "Aa01A02# big small", "Aa01A03@ tiny"]
    path.write_text("\n".join([*lines, "我们 你们 我", "big huge xyz"]) + "\n")
    words = find_similar.read_synonyms(str(path), "--synonyms=x")
    assert words["big"] == ["large", "bigr", "huge", "xyz"] and "small" not in words
    words = find_similar.fitting_words(words, tokenizer)
    assert words["big"] == ["large", "huge"] and words["我们"] == ["你们"]
    assert "我" not in words and "bigr" not in words
    path.write_text("Aa01A01@ big\n")
    with pytest.raises(UserError, match="--synonyms=x: no line holds two synonyms"):
        find_similar.read_synonyms(str(path), "--synonyms=x")


def test_tables_are_read_as_they_are_written(tmp_path, tokenizer):
    path = tmp_path / "similar.txt"
    words = {"big": ["large", "huge"], "我们": ["你们"]}
    path.write_text(find_similar.format_words(words, "by hand"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").splitlines()[:2] == [
        "# bertjax similar words, format 1, by hand", "big large huge",
    ]  # fmt: skip
    table = read_similar(path, tokenizer)
    assert len(table.keys) == 2 and not any(table.skipped.values())
    path.write_text(f"{HEADER}\n")
    assert not len(read_similar(path, tokenizer).keys)
    path.write_text("# bertjax similar words, format 2\nbig large\n")
    with pytest.raises(UserError, match="has format 2: this version reads 1"):
        read_similar(path, tokenizer)


def test_prepare_writes_a_table_and_runs_take_it(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "x.txt").write_text("big large.\n\nsmall tiny huge.\n")
    (tmp_path / "thesaurus.txt").write_text("big large\nhuge big small\n")
    given = {"train": "x.txt", "valid": "", "vocab": "vocab.txt", "cache": "cache"}
    flags = ["--config=macbert.py:tiny"]
    flags += [f"--config.data.{k}={v and tmp_path / v}" for k, v in given.items()]
    out = tmp_path / "similar.txt"
    thesaurus = f"--synonyms={tmp_path / 'thesaurus.txt'}"
    assert prepare.main([*flags, f"--similar={out}", thesaurus]) == 0
    assert capsys.readouterr().out.endswith(f"similar {out} 4 words\n")
    assert out.read_text().splitlines()[1:] == [
        "big large huge small", "large big", "huge big small", "small huge big",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"--synonyms=.* needs --similar=FILE"):
        prepare.main([*flags, thesaurus, f"--config.data.similar={NONE}"])
    with pytest.raises(UserError, match="--similar needs the whole text"):
        prepare.main([*flags, f"--similar={out}", "--shard=0/2", thesaurus])
    with pytest.raises(UserError, match=r"give a file of them, --config.data.similar"):
        prepare.main(flags)

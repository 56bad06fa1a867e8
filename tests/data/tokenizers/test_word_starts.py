# SPDX-License-Identifier: Apache-2.0
"""Marks of words and entities; ids stay those of the tokenizer."""

import gzip
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.tokenizers import word_starts
from bertjax.data.tokenizers.backends import encode_sentences
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bertjax.data.tokenizers.word_starts import make_marker

TEXTS = [
    f"The cats number {i} of Rome sat on mats. 我来到北京清华大学的T恤 {i * 7}½ ﬁ."
    for i in range(100)
]
KINDS = ["wordpiece", "byte_bpe", "unigram", "bpe"]
DICTIONARY = "北京 9\n大学 9\n北京大学 99\n来到 9\n我 9\nT恤 9\n卡拉OK 9\n".encode()


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(TEXTS, kind, 420) for kind in KINDS}


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"我来到北京大学在恤卡拉t"]
    pieces += ["rome", "##o", "new", "york", "ok", "##s", ",", "."]
    path = tmp_path_factory.mktemp("v") / "vocab.txt"
    path.write_text("\n".join(pieces), "utf-8")
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory) -> str:
    pytest.importorskip("jieba")
    path = tmp_path_factory.mktemp("d") / "dict.txt.gz"
    path.write_bytes(gzip.compress(DICTIONARY))
    return f"jieba:{path}"


def told(marker, tokenizer, sentence, entities=()):
    """Write | before tokens that begin a word, {n} before tokens with other bits."""
    ((ids, marks),) = marker.encode([sentence], [False], tuple(entities))
    assert ids == tokenizer.encode(sentence)
    assert len(marks) == len(ids) and marks.dtype == np.uint8
    out = ""
    for i, mark in zip(ids, marks.tolist(), strict=True):
        bits = "".join(c for c, b in (("|", 1), ("[", 4), ("_", 2)) if mark & b)
        out += bits + tokenizer.pieces[i]
    return out


def test_words_of_chinese(words, dictionary):
    marker = make_marker(words, dictionary)
    for sentence, expected in {
        "我来到北京大学": "|我|来到|北京大学",
        "romeo在北京.": "|rome##o|在|北京|.",
        "卡拉OK,T恤": "|卡拉ok|,|t恤",
        "new york": "|new|york",
        "": "",
    }.items():
        assert told(marker, words, sentence) == expected


def test_signs_belong_to_the_character_before_them(trained):
    """Vowel signs and tones of scripts without spaces do not begin words."""
    marker = make_marker(trained["byte_bpe"])
    for text, count in {"สวัสดี": 4, "น้ำ": 2, "か\u3099": 1}.items():
        ((_, marks),) = marker.encode([text], [False], ())
        assert marks.sum() == count, text
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "วั", "ั", "▁ั", "ี", "า", "。"]
    roles = dict(zip(("pad", "unk", "cls", "sep", "mask"), range(5), strict=True))
    made = Tokenizer("unigram", pieces, False, roles, (), {})
    assert make_marker(made, entities=True).identity.startswith("marks-2|")
    assert marker.identity.startswith("marks-1|")  # stores of version 0.1 are used
    assert made.word_starts[5:].tolist() == [True, False, True, False, True, True]


def test_entities(words, dictionary):
    names = ("北京大学", "北京", "New York", "Rome", "京")
    for segmenter in ("", dictionary):
        marker = make_marker(words, segmenter, entities=True)
        found = told(marker, words, "New York, Rome. Romeo在北京大学,北京", names)
        found = found.replace("|", "")
        assert found == "[_new_york,[_rome.rome##o在[_北_京_大_学,[_北_京"
        assert "_" not in told(marker, words, "Rome", ())
        assert told(marker, words, "Rome在", names).startswith("|[_rome")
    assert "_" not in told(make_marker(words, dictionary), words, "Rome", names)


def test_first_words_of_byte_bpe(trained):
    tokenizer = trained["byte_bpe"]
    marker = make_marker(tokenizer)
    sentences = ["The cats sat.", " The cats.", "好。"]
    encoded = marker.encode(sentences, [False, False, True], ())
    assert [i for i, _ in encoded] == tokenizer.encode_batch(sentences)
    first, second, third = [m.tolist() for _, m in encoded]
    assert not tokenizer.word_starts[encoded[0][0][0]]
    assert first[0] == second[0] == third[0] == 1
    assert sum(third) == 2 < len(third)  # a character and a stop, cut into bytes


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_characters_and_pieces_across_words(kind, trained, dictionary):
    tokenizer = trained[kind]
    marker = pickle.loads(pickle.dumps(make_marker(tokenizer, dictionary, True)))
    text = "我来到北京大学 in Rome 龘."
    ((ids, marks),) = marker.encode([text], [False], ("Rome",))
    assert ids == tokenizer.encode(text)
    spans = tokenizer.engine.encode_spans([text])[0][1]
    begun = set()
    for (start, end), mark in zip(spans, marks.tolist(), strict=True):
        inside = [w for w in (0, 1, 3) if start <= w < end and w not in begun]
        begun |= set(inside)
        if end <= 7 and start < end and not text[start:end].isspace():
            assert mark & 1 == bool(inside)
    named = [s for s, m in zip(spans, marks.tolist(), strict=True) if m & 2]
    at = text.index("Rome")
    assert min(s for s, _ in named) in (at - 1, at)
    assert max(e for _, e in named) == at + 4
    assert sum(m & 4 > 0 for m in marks.tolist()) == 1


ODD = st.text(
    st.sampled_from("aB cé½ﬁİΣß\u3000我来到北京大学龘.,\0𠀀ก") | st.characters()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ODD.map(lambda t: t.encode("utf-8", "replace").decode()), max_size=4))
def test_ids_are_the_tokenizers(trained, dictionary, sentences):
    for tokenizer in trained.values():
        marker = make_marker(tokenizer, dictionary, True)
        joined = [n % 3 == 2 for n in range(len(sentences))]
        encoded = marker.encode(sentences, joined, ("a", "北京", "İ", "é½"))
        assert [ids for ids, _ in encoded] == encode_sentences(
            tokenizer.engine.encode_batch, sentences, joined
        )
        for (ids, marks), text in zip(encoded, sentences, strict=True):
            assert len(ids) == len(marks) and (not ids or marks[0] & 1)
            _, spans = tokenizer.engine.encode_spans([text])[0]
            assert all(0 <= a <= b <= len(text) for a, b in spans)
            assert not any(m & 4 and not m & 2 for m in marks.tolist())


def test_the_usual_dictionary_and_identities(words, dictionary):
    usual = make_marker(words, "jieba")
    assert told(usual, words, "我来到北京大学") == "|我|来到|北京大学"
    again = pickle.loads(pickle.dumps(usual))
    assert again.identity == usual.identity
    made = [make_marker(words, s, e) for s in (dictionary, "") for e in (True, False)]
    assert made.pop() is None
    assert len({m.identity for m in [usual, *made]}) == 4


def test_refusals(words, tmp_path, monkeypatch):
    (tmp_path / "bad.txt").write_text("北京 9\n大学 many\n", "utf-8")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(DICTIONARY)[:-9])
    for value, message in {
        "jeba": "data.segmenter='jeba' is unknown",
        f"jieba:{tmp_path}/none": "cannot be read",
        f"jieba:{tmp_path}/bad.txt": r"bad\.txt, line 2: not a word",
        f"jieba:{tmp_path}/cut.gz": "truncated",
    }.items():
        with pytest.raises(UserError, match=message):
            make_marker(words, value)
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(UserError, match=r"pip install 'bertjax\[zh\]'"):
        make_marker(words, "jieba")


def test_tokens_of_spans_are_found_without_looking_at_all_tokens():
    """Each span of a line used to be compared with each of its tokens: 25,000 words
    without a full stop took four seconds, ten times as many seven minutes."""
    spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=9)

    @settings(max_examples=300, deadline=None)
    @given(spans, spans)
    def check(drawn, places):
        where = [(a, a + n) for a, n in drawn]  # in any order
        wanted = [(a, a + n + 1) for a, n in places]
        assert [*word_starts._tokens_of(wanted, where)] == [
            [
                i
                for i, (a, b) in enumerate(where)
                if a < last and (b > first or a == first)
            ]
            for first, last in wanted
        ]

    check()
    looked = []

    class Tokens(list):
        def __getitem__(self, at):
            found = super().__getitem__(at)
            looked.append(len(found))
            return found

    where = Tokens((i, i + 1) for i in range(10_000))
    every = [(i, i + 2) for i in range(0, 9_998, 4)]
    found = word_starts._tokens_of(every, where)
    assert [*found] == [[i, i + 1] for i in range(0, 9_998, 4)]
    assert sum(looked) <= 4 * len(every)

# SPDX-License-Identifier: Apache-2.0
"""Words of data.concept and data.control: how they are named and marked."""

import pytest

from bertjax import UserError
from bertjax.data.token_flags import CONCEPT, CONTROL
from bertjax.data.tokenizers.marked_words import read_marked_words
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.data.tokenizers.word_starts import make_marker

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "##ness", "a", "bad"]
PIECES += [".", "film", "好", "人", "很", "的", "Good"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return load_tokenizer(path)


def marked(marker, sentence, entities=()):
    [(_, marks)] = marker.encode([sentence], [False], entities)
    return marks.tolist()


def test_listed_words_are_marked_whole_and_whatever_their_capitals(tokenizer, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("Bad\n\ngoodness\n")
    given = {"concept": "words:good", "control": str(file)}
    marker = make_marker(tokenizer, marked=given)
    # good ##ness is another word than good, with all its pieces.
    got = marked(marker, "Good goodness a bad film.")
    assert got == [1 + CONCEPT, 1 + CONTROL, CONTROL, 1, 1 + CONTROL, 1, 1]
    plain = make_marker(tokenizer, entities=True)
    same = make_marker(tokenizer, entities=True, marked={"concept": "", "control": ""})
    assert plain.identity == same.identity != marker.identity
    other = make_marker(tokenizer, marked=given | {"concept": "words:film"})
    assert other.identity != marker.identity
    assert make_marker(tokenizer, marked={"concept": ""}) is None


def test_spaces_around_listed_words_are_none_of_them(tokenizer, tmp_path):
    marker = make_marker(tokenizer, marked={"concept": "words:good, bad"})
    assert marked(marker, "a bad film") == [1, 1 + CONCEPT, 1]
    assert read_marked_words("data.concept", "words: good ,bad", 1, None, False) == (
        read_marked_words("data.concept", "words:bad,good", 1, None, False)
    )


def test_records_may_list_the_words_that_a_tagger_told(tokenizer):
    marker = make_marker(tokenizer, "", True, {"concept": "entities"})
    assert marked(marker, "a bad film", ("bad",)) == [1, 1 + 2 + 4 + CONCEPT, 1]
    assert marked(marker, "a bad film") == [1, 1, 1]


def test_parts_of_speech_are_those_of_the_segmenter(tokenizer, tmp_path):
    pytest.importorskip("jieba")
    dictionary = tmp_path / "dictionary"
    dictionary.write_text("好人 50 n\n很 10 d\n好 90 a\n人 5 n\n的 9 uj\n")
    marker = make_marker(tokenizer, f"jieba:{dictionary}", False, {"concept": "pos:a"})
    # 好 has this part of speech; 好人 is another word.
    assert marked(marker, "好人很好") == [1, 0, 1, 1 + CONCEPT]
    with pytest.raises(UserError, match=r"no word of data.segmenter's dictionary"):
        make_marker(tokenizer, f"jieba:{dictionary}", False, {"concept": "pos:x"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("entities", r"data.concept=entities are what data.entity_field lists"),
        ("pos:a", r"data.concept=pos:a needs data.segmenter"),
        ("words:", r"data.concept=words: names no word"),
        ("words:a, very bad", r"words:a, very bad: 'very bad' is not one word"),
        ("nosuch.txt", r"data.concept=nosuch.txt: cannot be read"),
    ],
)
def test_what_names_no_words_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        read_marked_words("data.concept", value, CONCEPT, None, False)


def test_a_line_holds_one_word(tmp_path):
    (tmp_path / "words.txt").write_text("good\nvery bad\n")
    with pytest.raises(UserError, match=r"line 2: 'very bad' is not one word"):
        read_marked_words("data.concept", str(tmp_path / "words.txt"), 1, None, False)

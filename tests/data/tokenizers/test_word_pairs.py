# SPDX-License-Identifier: Apache-2.0
"""Pairs of words: read from a file, swapped in texts, and swapped back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.tokenizers.word_pairs import read_pairs, swap_text

PAIRS = {
    "he": "she",
    "she": "he",
    "man": "woman",
    "woman": "man",
    "他": "她",
    "她": "他",
}


def test_words_change_places_and_keep_their_capitals():
    text = "He saw a MAN; the woman's hat (SHE, he said) hE other. 他们看她"
    other = "She saw a WOMAN; the man's hat (HE, she said) hE other. 她们看他"
    assert swap_text(text, PAIRS) == other and swap_text(other, PAIRS) == text


WORDS = ["he", "She", "MAN", "woman", "the", "hem", "x1he", "他", "们", "her", "hE"]


@given(st.lists(st.sampled_from([*WORDS, " ", ".", "-", "'"]), max_size=30))
def test_twice_is_the_text_again(parts):
    text = "".join(parts)
    swapped = swap_text(text, PAIRS)
    assert swap_text(swapped, PAIRS) == text
    # Words outside the pairs are unchanged.
    names = {form for w in PAIRS for form in (w, w.title(), w.upper())}
    if not any(name in text for name in names):
        assert swapped == text


def test_files_have_a_pair_a_line(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("He she\n\nman\twoman\n他 她\n", encoding="utf-8")
    assert read_pairs(str(file), "data.swap") == PAIRS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("he she\nher him\nhis her", r"line 3: 'her' has another partner already"),
        ("he", r"line 1: 'he' is not a pair of two words"),
        ("he He", r"line 1: 'he He' is not a pair of two words"),
        ("i you", r"line 1: 'i' has no capitals of its own"),
        ("\u3000\nx", "not a pair of two words"),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "pairs.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"data.swap=.*{message}"):
        read_pairs(str(file), "data.swap")

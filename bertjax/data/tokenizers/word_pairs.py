# SPDX-License-Identifier: Apache-2.0
"""Pairs of words that stand for each other: he and she, him and her, Ann and Bob.

A text in which the words of all pairs have changed places is a counterfactual of it
(Lu et al. 2018, arXiv 1807.11714); done twice, it is the text again. So no word is in
two pairs: "her", which is both "him" and "his", can have one of them.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from bertjax import UserError
from bertjax.data.tokenizers.vocab_files import read_lines
from bertjax.data.tokenizers.word_starts import whole_word

Pairs = Mapping[str, str]  # each word of a pair and the other, in small letters


def read_pairs(path: str, key: str) -> Pairs:
    """Read a file of pairs, two words a line, parted by white space.

    Capitals do not count: those of a text are kept. Raises UserError, which names key
    and line: no two words, a word in two pairs, words that capitals cannot be put on
    and off (one letter, or one that has no capital of one letter).
    """
    where, pairs = f"{key}={path}", {}
    for number, line in enumerate(read_lines(Path(path), where), 1):
        words = line.lower().split()
        place = f"{where}, line {number}"
        if not words:
            continue
        if len(words) != 2 or words[0] == words[1]:
            raise UserError(f"{place}: {line.strip()!r} is no pair of two words")
        for word in words:
            if word in pairs:
                raise UserError(f"{place}: {word!r} has another partner already")
            if len({*_forms(word)}) < 3 and word.upper() != word:
                raise UserError(f"{place}: {word!r} has no capitals of its own")
        pairs |= {words[0]: words[1], words[1]: words[0]}
    if not pairs:
        raise UserError(f"{where} holds no pair")
    return pairs


def _forms(word: str) -> tuple[str, str, str]:
    """Return a word in small letters, with a capital, and in capitals."""
    return word, word[0].upper() + word[1:], word.upper()


def written_forms(pairs: Pairs) -> dict[str, str]:
    """Return how the words of pairs are written, and the other written alike.

    >>> written_forms({"he": "she", "she": "he"})["HE"]
    'SHE'
    """
    return {
        one: two
        for word, other in pairs.items()
        for one, two in zip(_forms(word), _forms(other), strict=True)
    }


def swap_text(text: str, pairs: Pairs) -> str:
    """Put the other word of its pair in the place of each word; capitals stay.

    A word stands between what are no letters; next to a script without spaces it ends
    all the same. What is written otherwise (hE) stays.

    >>> swap_text("He met her. THE END", {"he": "she", "she": "he"})
    'She met her. THE END'
    """
    forms, pattern = _compile(tuple(sorted(pairs.items())))
    return pattern.sub(lambda match: forms[match[0]], text)


@lru_cache(maxsize=4)
def _compile(
    pairs: tuple[tuple[str, str], ...],
) -> tuple[dict[str, str], re.Pattern[str]]:
    forms = written_forms(dict(pairs))
    longest_first = sorted(forms, key=lambda word: (-len(word), word))
    return forms, re.compile("|".join(map(whole_word, longest_first)))

# SPDX-License-Identifier: Apache-2.0
"""Pairs of words that are counterparts: he and she, him and her, Ann and Bob.

Swapping the words of all pairs turns a text into its counterfactual (Lu et al. 2018,
arXiv 1807.11714); a second swap restores the text. Therefore no word is in two pairs:
"her", which is the counterpart of both "him" and "his", can have only one of them.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from bertjax import UserError
from bertjax.data.tokenizers.vocab_files import read_lines
from bertjax.data.tokenizers.word_starts import whole_word

Pairs = Mapping[str, str]  # each word of a pair -> the other, in lower case


def read_pairs(path: str, key: str) -> Pairs:
    """Read a file of pairs: two words per line, separated by white space.

    Case is ignored; a swap keeps the case of the text. Raises UserError, which names
    key and line, for a line without two words, a word in two pairs, and a word whose
    case cannot be changed reversibly (one letter, or a letter without a capital that is
    one letter).
    """
    where, pairs = f"{key}={path}", {}
    for number, line in enumerate(read_lines(Path(path), where), 1):
        words = line.lower().split()
        place = f"{where}, line {number}"
        if not words:
            continue
        if len(words) != 2 or words[0] == words[1]:
            raise UserError(f"{place}: {line.strip()!r} is not a pair of two words")
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
    """Return a word in lower case, capitalized, and in upper case."""
    return word, word[0].upper() + word[1:], word.upper()


def written_forms(pairs: Pairs) -> dict[str, str]:
    """Return each written form of the words, and the same form of the other word.

    >>> written_forms({"he": "she", "she": "he"})["HE"]
    'SHE'
    """
    return {
        one: two
        for word, other in pairs.items()
        for one, two in zip(_forms(word), _forms(other), strict=True)
    }


def swap_text(text: str, pairs: Pairs) -> str:
    """Replace each word of a pair by the other one, in the same case.

    A word is bounded by characters that are no letters, or by a script without spaces.
    Other forms (hE) stay.

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

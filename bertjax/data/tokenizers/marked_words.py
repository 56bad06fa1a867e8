# SPDX-License-Identifier: Apache-2.0
"""Words of a text that belong to a concept: data.concept and data.control.

The words are listed in a file or in the config, or they are the words with some part of
speech in the segmenter's dictionary, or those that a tagger found and that the record
of each document lists (data.entity_field).
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.data.tokenizers.backends import Span
from bertjax.data.tokenizers.vocab_files import read_lines

# Letters and digits; an apostrophe or hyphen inside is part of the word.
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
ENTITIES = "entities"


class MarkedWords(NamedTuple):
    """Words that get a bit of the marks; words None: those that the record lists."""

    flag: int
    words: frozenset[str] | None

    @property
    def identity(self) -> str:
        """A string that changes whenever other words may be marked."""
        listed = "\n".join([ENTITIES] if self.words is None else sorted(self.words))
        return f"{self.flag} {hashlib.sha256(listed.encode()).hexdigest()}"

    def find(self, sentence: str, words: list[Span], named: list[Span]) -> list[Span]:
        """Return the spans of these words; case is ignored.

        words: the spans that a segmenter found; outside these, a word is bounded by
        characters that are no letters; named: the spans of what the record lists.

        >>> MarkedWords(16, frozenset({"good"})).find("Good, goodly, good.", [], [])
        [(0, 4), (14, 18)]
        """
        if self.words is None:
            return named
        inside = {at for word in words for at in range(*word)}
        spaced = (match.span() for match in _WORD.finditer(sentence))
        spans = words + [span for span in spaced if span[0] not in inside]
        is_mine = self.words.__contains__
        return [(a, b) for a, b in spans if is_mine(sentence[a:b].lower())]


def read_marked_words(
    key: str, value: str, flag: int, segmenter: Any, entities: bool
) -> MarkedWords:
    """Read data.concept or data.control, whose name is `key`.

    value: "words:good,bad"; "pos:a,ad", parts of speech in the dictionary of segmenter
    (word_starts.Jieba, or None); "entities", which needs data.entity_field (entities);
    or a file with one word per line. Raises UserError.
    """
    where = f"{key}={value}"
    if value == ENTITIES:
        if not entities:
            raise UserError(f"{where} are what data.entity_field lists: give it")
        return MarkedWords(flag, None)
    how, _, rest = value.partition(":")
    words = [part.strip() for part in rest.split(",")]
    if how == "pos":
        if segmenter is None:
            raise UserError(f"{where} needs data.segmenter, whose dictionary has them")
        words = segmenter.words_of({*words})
        if not words:
            raise UserError(f"{where}: no word of data.segmenter's dictionary has it")
    else:
        if is_file := how != "words":
            lines = read_lines(Path(value), where)
            words = [line.strip() for line in lines]
        for number, word in enumerate(words, 1):
            if word.split()[1:]:
                line = f", line {number}" * is_file
                raise UserError(f"{where}{line}: {word!r} is not one word")
    found = frozenset(word.lower() for word in words if word)
    if not found:
        raise UserError(f"{where} names no word")
    return MarkedWords(flag, found)

# SPDX-License-Identifier: Apache-2.0
"""Tables of similar words, looked up by the ids of a word's pieces (MacBERT).

A word is found by a 64-bit hash of its ids, so that all words of a batch are looked up
at once. Only similar words with the same number of pieces are stored, because rows keep
their length.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.tokenizers.tokenizer import SPACELESS
from bertjax.data.tokenizers.vocab_files import read_lines

FORMAT = 1
HEADER = f"# bertjax similar words, format {FORMAT}"  # first line of what is written
NONE = "none"  # the value of data.similar that means no similar words
UNFIT = "other length", "unknown", "same"  # why a word cannot stand in for another


@dataclass(frozen=True, eq=False)
class Similar:
    """Similar words of n words.

    keys: u64 [n] ascending, hashes of the words' ids.
    first, number: i64 [n], where the similar words of each word begin in `ids`, and how
        many there are; each has as many ids as the word.
    ids: i32 [m].
    skipped: why similar words were left out, and how many: "other length" (another
        number of pieces), "unknown" (a special piece), "same" (as the word).
    """

    keys: np.ndarray
    first: np.ndarray
    number: np.ndarray
    ids: np.ndarray
    skipped: Mapping[str, int] = field(default_factory=dict)

    def draw(
        self,
        ids: np.ndarray,
        first: np.ndarray,
        size: np.ndarray,
        keys: np.ndarray,
        slot: np.ndarray,
    ) -> np.ndarray:
        """Draw a similar word for each word, i64 aligned with `ids`; -1 if it has none.

        Word w has the ids [first[w] : first[w] + size[w]]; together the words cover all
        of `ids`. Word w draws at the address (keys[w], slot[w]).
        """
        if not len(self.keys) or not len(ids):
            return np.full(len(ids), -1)
        code = hash_words(ids, first, size)
        at = np.minimum(np.searchsorted(self.keys, code), len(self.keys) - 1)
        pick = self.first[at] + size * counter_rng.below(keys, slot, self.number[at])
        found = np.repeat(self.keys[at] == code, size)
        piece = np.repeat(pick - first, size) + np.arange(len(ids))
        return np.where(found, self.ids.take(piece, mode="clip"), -1)


def hash_words(ids: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Hash the ids of each word, and their number, to u64."""
    code = counter_rng.fold(0, "word", size)
    for piece in range(int(size.max(initial=0))):
        more = np.flatnonzero(size > piece)
        code[more] = counter_rng.fold(code[more], ids[first[more] + piece])
    return code


def make_similar(words: Mapping[tuple[int, ...], list[tuple[int, ...]]]) -> Similar:
    """Create the table from words as ids; similar words must have as many ids.

    >>> make_similar({(7, 8): [(9, 9), (5, 6)]}).ids.tolist()
    [9, 9, 5, 6]
    """
    words = {word: near for word, near in words.items() if near}
    size = np.array([len(w) for w in words], np.int64)
    flat = np.array([i for word in words for i in word], np.int64)
    code = hash_words(flat, np.cumsum(size) - size, size)
    order = np.argsort(code)
    number = np.array([len(near) for near in words.values()], np.int64)
    taken = size * number
    ids = [i for near in words.values() for word in near for i in word]
    return Similar(
        code[order], (np.cumsum(taken) - taken)[order], number[order],
        np.array(ids, np.int32),
    )  # fmt: skip


def read_similar(path: str | os.PathLike[str], tokenizer: Any) -> Similar:
    """Read data.similar: UTF-8 text, a word and then its similar words on each line.

    White space separates the words; the lines of a repeated word are joined. A table
    written by bertjax.prepare --similar begins with HEADER and may hold no words. A
    word is encoded as it is within a sentence: after a space if its script uses spaces.
    Similar words that cannot replace their word are left out and counted in `skipped`.

    Raises UserError, which names the file and the line, if the file is missing, is not
    UTF-8, has a later format, has a word without similar words, or has no words.
    """
    where = f"data.similar={os.fspath(path)}"
    listed: dict[str, dict[str, None]] = {}
    lines = read_lines(Path(path), where)
    headed = bool(lines) and _check_header(lines[0], where)
    for number, line in enumerate(lines[headed:], 1 + headed):
        words = line.split()
        if len(words) == 1:
            raise UserError(
                f"{where}: line {number} holds {words[0]!r} and no similar word"
            )
        for word in words[1:]:
            listed.setdefault(words[0], {})[word] = None
    if not listed and not headed:
        raise UserError(f"{where} holds no words")
    texts = [*dict.fromkeys(w for word in listed for w in (word, *listed[word]))]
    ids = dict(zip(texts, ids_within_sentences(texts, tokenizer), strict=True))
    special = set(map(int, tokenizer.special_ids))
    known: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    skipped = dict.fromkeys(UNFIT, 0)
    for word, near in listed.items():
        for other in near:
            if why := why_unfit(ids[word], ids[other], special):
                skipped[why] += 1
            else:
                known.setdefault(ids[word], {})[ids[other]] = None
    table = make_similar({word: list(near) for word, near in known.items()})
    return replace(table, skipped=skipped)


def why_unfit(word: tuple[int, ...], other: tuple[int, ...], special: set[int]) -> str:
    """Return why the ids `other` cannot replace the ids of a word: one of UNFIT, or "".

    special: ids of the special pieces."""
    if not other or not special.isdisjoint(other):
        return "unknown"
    if len(other) != len(word):
        return "other length"
    return "same" if other == word else ""


def _check_header(line: str, where: str) -> bool:
    """Return whether a line is HEADER. Raises UserError for another format."""
    match = re.match(r"# bertjax similar words, format (\d+)", line)
    if match and int(match[1]) != FORMAT:
        raise UserError(f"{where} has format {match[1]}: this version reads {FORMAT}")
    return bool(match)


def ids_within_sentences(texts: list[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the ids that words have in the middle of a sentence."""
    joined = [bool(SPACELESS.match(t)) for t in texts]
    ids = tokenizer.encode_batch(
        [t if j else f" {t}" for t, j in zip(texts, joined, strict=True)]
    )
    if tokenizer.kind in ("unigram", "bpe"):  # these put a space before a text
        for i in np.flatnonzero(joined):
            ids[i] = tokenizer.engine.encode_batch([texts[i]], after=True)[0]
            if ids[i] and tokenizer.pieces[ids[i][0]] == "▁":
                ids[i] = ids[i][1:]
    return [tuple(map(int, word)) for word in ids]

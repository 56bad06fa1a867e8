# SPDX-License-Identifier: Apache-2.0
"""Marks of tokens that the vocabulary alone does not show: words and entities.

A piece shows whether it begins a word ("##", "▁", "Ġ"; `word_starts` of the tokenizer),
with three exceptions:
- Chinese has no spaces, so that a segmenter decides what a word is: jieba
  (https://github.com/fxsjy/jieba), as in "Pre-Training with Whole Word Masking for
  Chinese BERT" (Cui et al. 2021, section 3.1; they use LTP);
- the document's record states which words are an entity;
- in byte BPE the first word of a paragraph has no space before it, and so no "Ġ"; and a
  part of a Chinese character does not show that the character begins with it.
"""

import hashlib
import io
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, registry
from bertjax.data.token_flags import BEGINS_ENTITY, BEGINS_WORD, ENTITY, MARKED
from bertjax.data.tokenizers.backends import Span, encode_sentences
from bertjax.data.tokenizers.marked_words import MarkedWords, read_marked_words
from bertjax.data.tokenizers.tokenizer import HAN, SIGNS, SPACELESS, WIDE, Tokenizer
from bertjax.data.tokenizers.vocab_files import read_unzipped

# Version of the marks; any change of them needs a new one. The second is for
# vocabularies with vowel signs (SIGNS), which began words in the first.
RULES = "marks-1", "marks-2"
_HAN = re.compile(f"[{HAN}]")
# Each match is a word: a character of a script without spaces, with its vowel signs
# and tones, or a punctuation mark of such a script.
ALONE = re.compile(f"(?:(?![{SIGNS}]){SPACELESS.pattern}|[{WIDE}])[{SIGNS}]*")


class Jieba:
    """Chinese words by jieba, with its own dictionary (None) or that of a file."""

    def __init__(self, dictionary: bytes | None) -> None:
        self.dictionary = dictionary
        digest = hashlib.sha256(_content(dictionary)).hexdigest()
        self.identity = f"jieba {_jieba().__version__} {digest}"

    def words_of(self, tags: set[str]) -> list[str]:
        """Return the words of the dictionary whose part of speech, in its third column,
        is one of `tags`."""
        lines = _content(self.dictionary).decode("utf-8").splitlines()
        parts = (line.split() for line in lines)
        return [word for word, *more in parts if more[1:] and more[1] in tags]

    def words(self, text: str) -> list[Span]:
        """Return the spans of the words with a Chinese character.

        >>> Jieba(None).words("我来到北京 today")
        [(0, 1), (1, 3), (3, 5)]
        """
        if not _HAN.search(text):
            return []
        spans, at = [], 0
        for word in _make_cutter(self.dictionary).cut(text):
            if _HAN.search(word):
                spans.append((at, at + len(word)))
            at += len(word)
        return spans


def _jieba() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about jieba's regular expressions
        return registry.import_extra("jieba", "zh", "data.segmenter=jieba")


def _content(dictionary: bytes | None) -> bytes:
    if dictionary is not None:
        return dictionary
    with _jieba().Tokenizer().get_dict_file() as file:
        return file.read()


@lru_cache(maxsize=1)
def _make_cutter(dictionary: bytes | None) -> Any:
    """Create jieba's tokenizer (takes a second) without its cache in /tmp."""
    cutter = _jieba().Tokenizer()
    file = io.BytesIO(_content(dictionary))
    file.name = "dictionary"
    cutter.FREQ, cutter.total = cutter.gen_pfdict(file)
    cutter.initialized = True
    return cutter


@dataclass
class Marker:
    """Encodes sentences and marks their tokens; `make_marker` creates it."""

    tokenizer: Tokenizer
    segmenter: Jieba | None
    entities: bool
    marked: tuple[MarkedWords, ...] = ()

    @property
    def identity(self) -> str:
        """A string that changes whenever the marks may change."""
        name = self.segmenter.identity if self.segmenter else ""
        marked = "".join(f"|{words.identity}" for words in self.marked)
        texts = map(self.tokenizer.text_of, self.tokenizer.pieces)
        rule = RULES[any(re.search(f"[{SIGNS}]", text or "") for text in texts)]
        return f"{rule}|{name}|{self.entities}{marked}"

    def encode(
        self,
        sentences: list[str],
        joined: list[bool],
        entities: tuple[str, ...],
        spanned: list[tuple[list[int], list[Span]]] | None = None,
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return the ids and marks of each sentence.

        Args:
          sentences: with the space before them in byte BPE; the ids are those of
            `backends.encode_sentences`.
          joined: whether the sentence follows another without a space.
          entities: the document's strings to look for; the longest match wins, and a
            part of a word does not match.
          spanned: the result of the tokenizer's encode_spans for the sentences, if
            known.

        Returns:
          ids and marks u8 [n] of each sentence; the bits are those of token_flags.py: 1
          begins a word, 2 part of an entity, 4 begins one, 16 and 32 part of a marked
          word.

        Worked example, with jieba, where 北京 is an entity:

            pieces     我   来   到   北   京      words 我, 来到, 北京
            marks      1    1    0    7    2
        """
        words = [self._words(s) for s in sentences]
        named: list[list[Span]] = [[] for _ in sentences]
        if entities and self.entities:
            pattern = _entity_pattern(entities)
            named = [[m.span() for m in pattern.finditer(s)] for s in sentences]
        classes: list[list[tuple[int, list[Span]]]] = [[] for _ in sentences]
        if self.marked:
            classes = [
                [(one.flag, one.find(s, w, e)) for one in self.marked]
                for s, w, e in zip(sentences, words, named, strict=True)
            ]
        # Spans take time to compute; most sentences need none.
        needs = [
            bool(w or e or any(spans for _, spans in c))
            for w, e, c in zip(words, named, classes, strict=True)
        ]

        def encode(function: Any, spans: bool) -> Iterator[Any]:
            chosen = [n for n, need in enumerate(needs) if need == spans]
            texts, after = [sentences[n] for n in chosen], [joined[n] for n in chosen]
            return iter(encode_sentences(function, texts, after))

        if spanned is None:
            with_spans = encode(self.tokenizer.engine.encode_spans, True)
            plain = encode(self.tokenizer.engine.encode_batch, False)
            spanned = [
                next(with_spans) if need else (next(plain), []) for need in needs
            ]
        result = []
        every = self._begins(sentences, [ids for ids, _ in spanned])
        for n, (sentence, begins) in enumerate(zip(sentences, every, strict=True)):
            ids, where = spanned[n]
            if words[n]:
                _begin_words(begins, where, words[n], len(sentence))
            marks = begins.astype(np.uint8) * BEGINS_WORD
            for inside in _tokens_of(named[n], where):
                marks[inside] |= ENTITY
                marks[inside[:1]] |= BEGINS_ENTITY
            for flag, spans in classes[n]:
                for inside in _tokens_of(spans, where):
                    marks[inside] |= flag
            result.append((ids, marks))
        return result

    def _begins(self, sentences: list[str], ids: list[Any]) -> list[np.ndarray]:
        """Return which tokens begin a word according to their pieces: bool [n] each."""
        flat = np.fromiter(chain.from_iterable(ids), np.int64)
        begins = self.tokenizer.word_starts[flat]
        edges = [0, *accumulate(map(len, ids))]
        pairs = zip(sentences, pairwise(edges), strict=True)
        begins[[a for text, (a, b) in pairs if b > a and text[0] != " "]] = True
        return [begins[a:b] for a, b in pairwise(edges)]

    def _words(self, sentence: str) -> list[Span]:
        """Return the spans of words whose starts the pieces do not show."""
        words = self.segmenter.words(sentence) if self.segmenter else []
        if self.tokenizer.joins_with_space:
            inside = {at for word in words for at in range(*word)}
            # A character that begins a word does so whatever bytes it is cut into.
            alone = (m.span() for m in ALONE.finditer(sentence))
            words += [span for span in alone if span[0] not in inside]
        return words


@lru_cache(maxsize=1)
def _entity_pattern(entities: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the entities of a document."""
    # Longest first: the alternatives are tried in order.
    ordered = sorted(set(entities), key=lambda e: (-len(e), e))
    return re.compile("|".join(map(whole_word, ordered)))


def whole_word(entity: str) -> str:
    """Return a pattern for an entity that matches whole words only.

    >>> [bool(re.search(whole_word(e), "Romeo在北京")) for e in ("Rome", "北京")]
    [False, True]
    """

    def spaced(character: str) -> bool:
        return character.isalnum() and not SPACELESS.match(character)

    # A word also ends next to a script without spaces.
    before = rf"(?:(?<={SPACELESS.pattern})|(?<!\w))" if spaced(entity[0]) else ""
    after = rf"(?:(?={SPACELESS.pattern})|(?!\w))" if spaced(entity[-1]) else ""
    return before + re.escape(entity) + after


def _begin_words(
    begins: np.ndarray, where: list[Span], words: list[Span], size: int
) -> None:
    """Correct `begins`, bool [n], in place for tokens within `words`.

    Such a token begins a word if a word starts in the part of its span that no earlier
    token covers."""
    covered = np.zeros(size, np.bool_)
    first = np.zeros(size, np.bool_)
    for start, end in words:
        covered[start:end] = True
        first[start] = True
    done = 0
    for n, (start, end) in enumerate(where):
        if end > start and covered[start:end].any():
            new = max(start, done)
            outside = new < end and begins[n] and not covered[new]
            begins[n] = outside or first[new:end].any()
        done = max(done, end)


def _tokens_of(spans: list[Span], where: list[Span]) -> Iterator[list[int]]:
    """Yield the tokens that overlap each of the spans of characters.

    where: the spans of the tokens, which ascend except for marks that a normalization
    reorders."""
    # Tokens before `low` end before the span, and those from `high` on begin after it.
    ends = [*accumulate((end for _, end in where), max)]
    begins = [*accumulate((start for start, _ in reversed(where)), min)][::-1]
    for first, last in spans:
        low, high = bisect_left(ends, first), bisect_left(begins, last)
        yield [
            at
            for at, (start, end) in enumerate(where[low:high], low)
            if start < last and (end > first or start == first)
        ]


def make_marker(
    tokenizer: Tokenizer,
    segmenter: str = "",
    entities: bool = False,
    marked: Mapping[str, str] | None = None,
) -> Marker | None:
    """Create a marker, or return None if the tokenizer's own table is sufficient.

    segmenter: "" (none), "jieba", or "jieba:FILE" with a dictionary of lines "word
    frequency", also .gz. entities: whether documents have entities. marked: the values
    of data.concept and data.control, "" for none.

    Raises UserError for an unknown segmenter, a missing package or dictionary, and in
    the cases of `read_marked`.
    """
    chosen = make_segmenter(segmenter)
    words = read_marked(marked or {}, chosen, entities)
    if not (chosen or entities or words or tokenizer.joins_with_space):
        return None
    return Marker(tokenizer, chosen, entities, words)


def read_marked(
    marked: Mapping[str, str], segmenter: Jieba | None, entities: bool
) -> tuple[MarkedWords, ...]:
    """Read which words get marks: {name of MARKED: value}. Raises UserError."""
    return tuple(
        read_marked_words(f"data.{name}", value, MARKED[name], segmenter, entities)
        for name, value in marked.items()
        if value
    )


def make_segmenter(segmenter: str) -> Jieba | None:
    """Create the segmenter of data.segmenter, None for ""; raises as `make_marker`."""
    name, _, path = segmenter.partition(":")
    if name not in ("", "jieba") or (path and not name):
        raise registry.unknown("data.segmenter", segmenter, ("jieba", "jieba:FILE"))
    if not name:
        return None
    _jieba()
    if not path:
        return Jieba(None)
    where = f"data.segmenter={segmenter}"
    content = read_unzipped(Path(path), where)
    for number, line in enumerate(content.splitlines(), 1):
        parts = line.decode("utf-8", "replace").strip().split(" ")
        if len(parts) < 2 or not parts[1].isdecimal() or "\ufffd" in parts[0]:
            raise UserError(f"{where}, line {number}: not a word and its frequency")
    return Jieba(content)

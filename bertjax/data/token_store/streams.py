# SPDX-License-Identifier: Apache-2.0
"""Streams of a store: ids aligned with its tokens or its sentences.

  <name>.bin    u16 or u32 [n]: one id per token (kind token) or per sentence (kind
                sentence); in pieces as well as in stores (format 3)
  streams.json  {name: {"kind": ..., "dtype": ..., "vocabulary": ...}}, only in stores

Id 0 is not a value, 1 an unknown value (data/tokenizers/stream_vocab.py).
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.corpus.aligned_records import SPEAKER, TURNS
from bertjax.data.tokenizers.backends import Span
from bertjax.data.tokenizers.stream_vocab import (
    NO_VALUE,
    SENTENCE,
    TOKEN,
    UNKNOWN,
    StreamVocab,
    read_streams,
    streams_of,
)
from bertjax.data.tokenizers.tokenizer import Tokenizer

SPEAKERS = StreamVocab(SENTENCE)  # the speakers of a conversation, by their numbers


class StreamError(UserError):
    """A value of another kind than its stream has."""


class Stream:
    """Converts the values of a stream to ids; it can be sent to another process."""

    def __init__(self, vocab: StreamVocab) -> None:
        self.kind, self.vocab = vocab.kind, vocab
        self.dtype = "<u2" if vocab.size <= 1 << 16 else "<u4"

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.vocab.ids

    @property
    def identity(self) -> str:
        """A hash that changes whenever the same values may get other ids."""
        facts = json.dumps([*self.vocab], ensure_ascii=False)
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, str]:
        """The entry of the stream in streams.json."""
        return {"kind": self.kind, "dtype": self.dtype, "vocabulary": self.identity}

    def id_of(self, value: Any) -> int:
        """Return the id of a value; None means no value."""
        if value is None:
            return NO_VALUE
        if self.vocab.values is None:
            return min(int(value), self.vocab.size - 1)
        return self._ids.get(value, UNKNOWN)

    def check(self, name: str, value: Any) -> None:
        """Raise StreamError for a value of the other kind; no value fits both kinds."""
        if value and isinstance(value, tuple) != (self.kind == TOKEN):
            both = "ranges", "a value per sentence"
            own, usual = both if self.kind != TOKEN else both[::-1]
            raise StreamError(f"`{name}` has {own} here, and {usual} before")

    def of_sentences(self, name: str, values: Sequence[Mapping[str, Any]]) -> Any:
        """Return the id of each sentence, [s]. Raises StreamError."""
        own = [value[name] for value in values]
        for value in own:
            self.check(name, value)
        own = [None if isinstance(value, tuple) else value for value in own]
        return np.array([self.id_of(value) for value in own], self.dtype)

    def of_tokens(self, name: str, ranges: Any, spans: Sequence[Span]) -> np.ndarray:
        """Return the ids of tokens, [n]; spans: the characters of each.

        A token has the value of the range that it overlaps, the last one if several.

        Worked example: "int count;" with the range [4, 9, "int"], whose id is 2:

            pieces   int  co  ##unt  ;
            ids        0   2      2  0
        """
        self.check(name, ranges)
        ids = np.zeros(len(spans), self.dtype)
        if ranges:
            begins, ends = [a for a, _ in spans], [b for _, b in spans]
            for first, last, value in ranges:
                # A piece without characters, such as a space before a word, belongs to
                # whatever begins at its place.
                low = min(bisect_right(ends, first), bisect_left(begins, first))
                ids[low : bisect_left(begins, last)] = self.id_of(value)
        return ids


def check_kinds(
    streams: Mapping[str, Stream], values: Iterable[Mapping[str, Any]]
) -> None:
    """Raise StreamError for a value of another kind than its stream has."""
    for value in values:
        for name, stream in streams.items():
            stream.check(name, value[name])


def make_streams(tokenizer: Tokenizer, written: str, layout: str) -> dict[str, Stream]:
    """Return the streams to encode text with: those of data.streams, whose vocabularies
    the tokenizer has, and for conversations the speakers."""
    if layout == TURNS and SPEAKER in read_streams(written):
        raise UserError(
            f"data.streams={written}: conversations have their {SPEAKER} without it, "
            "and the model its role: leave it out"
        )
    vocabs = streams_of(tokenizer)
    streams = {name: Stream(vocabs[name]) for name in read_streams(written)}
    return streams | ({SPEAKER: Stream(SPEAKERS)} if layout == TURNS else {})

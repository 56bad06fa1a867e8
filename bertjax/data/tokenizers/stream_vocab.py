# SPDX-License-Identifier: Apache-2.0
"""Streams: values that records have besides their text, and their vocabularies.

A stream has one value per sentence (its speaker) or values for ranges of characters
(types of identifiers). A vocabulary maps values to ids: it holds the most frequent
values of the training text, up to a cap. Id 0 means no value (special tokens, padding,
text outside all ranges), id 1 a value that is not in the vocabulary.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from bertjax import UserError, registry
from bertjax.data.tokenizers.tokenizer import STREAMS, Tokenizer

KINDS = SENTENCE, TOKEN = "sentence", "token"
NO_VALUE, UNKNOWN, FIRST = 0, 1, 2
CAP = (1 << 16) - FIRST  # so that ids fit 16 bits
MOST = (1 << 31) - 1 - FIRST
# Names of a batch's or a store's own arrays: {name}_ids, {name}.bin.
TAKEN = "input token_type position segment attention lm mlm par clm decoder region"
TAKEN += " tokens sentences documents counts marks text turns knowledge"
TAKEN += " blocks lengths role turn complete edges dialogue mntp prefix diffusion"
TAKEN += " decoder_input"
TAKEN = frozenset(TAKEN.split())
_NAME = re.compile("[a-z][a-z0-9_]*")


class StreamVocab(NamedTuple):
    """A stream's kind, and its values in the order of their ids, the first being FIRST.

    values None: the values are ids themselves, such as speaker numbers in a
    conversation.
    """

    kind: str
    values: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ids; every id is below it."""
        return 1 << 16 if self.values is None else FIRST + len(self.values)

    @property
    def ids(self) -> dict[str, int]:
        """The id of each value."""
        return {value: FIRST + i for i, value in enumerate(self.values or ())}

    def name(self, number: int) -> str:
        """Name an id for people.

        >>> [StreamVocab("token", ("int", "String")).name(i) for i in range(4)]
        ['-', '?', 'int', 'String']
        """
        if number == NO_VALUE or self.values is None:
            return str(number) if number else "-"
        return "?" if number == UNKNOWN else self.values[number - FIRST]


def read_streams(written: str) -> dict[str, int]:
    """Read the value of data.streams: {name: how many values get an id}.

    >>> read_streams("speaker,type:50000")
    {'speaker': 65534, 'type': 50000}

    Raises UserError for a name that is invalid, taken or given twice, and for an
    invalid number.
    """
    where = f"data.streams={written}"
    caps: dict[str, int] = {}
    for entry in registry.split_list(written):
        name, colon, number = entry.partition(":")
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{where}: {name!r} is not a stream's name: write small letters and _"
            )
        if name in TAKEN:
            raise UserError(f"{where}: {name!r} is the name of something else")
        if name in caps:
            raise UserError(f"{where}: {name!r} is given twice")
        if colon and not (number.isdecimal() and 1 <= int(number) <= MOST):
            raise UserError(f"{where}: {number!r} is not a number of values")
        caps[name] = int(number) if colon else CAP
    return caps


def make_vocab(kind: str, counts: Mapping[str, int], cap: int) -> StreamVocab:
    """Return the vocabulary of the `cap` most frequent values; ties are sorted by
    value."""
    order = sorted(counts, key=lambda value: (-counts[value], value))
    return StreamVocab(kind, tuple(order[:cap]))


def count_values(
    values: Iterable[Mapping[str, object]],
    names: Iterable[str],
    counts: Mapping[str, dict[str, Counter[str]]],
) -> None:
    """Count the values of each stream, by their kind, in `counts`.

    values: for each sentence a value or None, or ranges (start, end, value).
    """
    values = [*values]
    for name in names:
        column = [own[name] for own in values]
        ranges = [value for value in column if isinstance(value, tuple)]
        alone = [str(v) for v in column if v is not None and not isinstance(v, tuple)]
        counts[name][TOKEN].update([value for own in ranges for _, _, value in own])
        counts[name][SENTENCE].update(alone)


def streams_of(tokenizer: Tokenizer) -> dict[str, StreamVocab]:
    """Return the vocabularies that are saved with a tokenizer, by name."""
    return from_json(tokenizer.files.get(STREAMS, b"{}"))


def from_json(content: bytes) -> dict[str, StreamVocab]:
    """Read what `to_json` wrote."""
    return {
        name: StreamVocab(one["kind"], tuple(one["values"]))
        for name, one in json.loads(content).items()
    }


def with_streams(tokenizer: Tokenizer, vocabs: Mapping[str, StreamVocab]) -> Tokenizer:
    """Return the tokenizer with these vocabularies in its files."""
    if not vocabs:
        return tokenizer
    return replace(tokenizer, files={**tokenizer.files, STREAMS: to_json(vocabs)})


def to_json(vocabs: Mapping[str, StreamVocab]) -> bytes:
    """Format vocabularies as the file that `streams_of` reads."""
    data = {name: one._asdict() for name, one in sorted(vocabs.items())}
    return (json.dumps(data, ensure_ascii=False, indent=0) + "\n").encode()

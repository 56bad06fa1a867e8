# SPDX-License-Identifier: Apache-2.0
"""Read sentences of tagged words from CoNLL's columns, JSON lines or plain text.

- `a.bio`, `b.conll.gz`, `c.txt`: one word per line; columns are separated by tabs, or
  by spaces in a line without a tab; a blank line ends a sentence. Columns are numbered:
  1 is the first, -1 the last. -DOCSTART- lines also end a sentence; they are skipped
  and counted
- `d.jsonl`: one object per line, with a list of words and a list of tags; their names
  are `tokens` and `tags` if the requested columns are numbers
- `tfds:conll2003:train`: the same from TensorFlow Datasets, with its column names
- without tags, a `.txt` or standard input that has no tab: one sentence per line, words
  separated by spaces
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bertjax import UserError, counted
from bertjax.tasks import tables
from bertjax.tasks.tables import Columns, Say

WANTED = "FILE.bio, .conll, .tsv, .txt or .jsonl"
SUFFIX = re.compile(r"\.(bio|conll|iob|iob2|tsv|txt|jsonl|json)(\.gz|\.zst)?$", re.I)
NUMBER = re.compile(r"-?[1-9]\d*")
NAMES = "tokens", "tags"  # in JSON lines
DOCUMENT = "-DOCSTART-"
HEADER = "word words token tokens text form tag tags label labels pos upos ner pos_tag"
HEADER = {*f"{HEADER} pos_tags ner_tag ner_tags".split()}  # usual column names


class Sentence(NamedTuple):
    """A sentence: its words, and as many tags, or None.

    begin: its place, "train.jsonl:2"; or, if each word has its own line, the file, and
    line is that of the first word.
    """

    words: Sequence[str]
    tags: Sequence[str] | None
    begin: str
    line: int | None = None

    def place(self, i: int) -> str:
        """Return the place of word i: "train.bio:7", "train.jsonl:2 (word 3)"."""
        if self.line is None:
            return f"{self.begin} (word {i + 1})"
        return f"{self.begin}:{self.line + i}"


def read_sentences(value: str, key: str, columns: Columns, say: Say) -> list[Sentence]:
    """Read the sentences of all files that a config value names, in order.

    value: files and patterns, separated by commas; key: the config key, for messages.
    columns: {config key or flag: column} of the words, and then, if requested, of the
    tags. Raises UserError, naming file and line, for an invalid file.
    """
    named = in_objects(columns)

    def read_tfds(entry: str) -> list[Sentence]:
        rows = tables.read_rows(entry, key, named)
        return checked([sentence_of(row, named) for row in rows], entry)

    def read_path(path: str) -> list[Sentence]:
        suffix = SUFFIX.search(path)
        if suffix is None:
            raise UserError(
                f"{path}: tags are read from .bio, .conll, .tsv, .txt and .jsonl"
            )
        parse = PARSERS.get(suffix[1].lower(), parse_columns)
        return checked([*parse(tables.read_text(path), path, columns, say)], path)

    def checked(sentences: list[Sentence], source: str) -> list[Sentence]:
        words = [word for sentence in sentences for word in sentence.words]
        if sentences and len(columns) > 1 and not any(map(str.strip, words)):
            raise UserError(f"{key}={source}: every word is empty")
        return sentences

    return tables.read_entries(value, key, WANTED, "sentences", read_tfds, read_path)


def parse_text(text: str, name: str, columns: Columns, say: Say) -> list[Sentence]:
    """Parse a text: JSON lines if it begins with a brace, otherwise as a `.txt`."""
    parse = parse_json if text.lstrip()[:1] == "{" else parse_lines
    return list(parse(text, name, columns, say))


def parse_lines(text: str, name: str, columns: Columns, say: Say) -> Iterator[Sentence]:
    """Yield the sentences of columns, or, without tags, of plain text.

    Without tags, a text with tabs or -DOCSTART- is still read as columns.
    """
    tall = len(columns) > 1 or "\t" in text or text.startswith(DOCUMENT)
    if len(columns) == 1:
        say(f"{name} is read as {'a word' if tall else 'a sentence'} a line")
    parse = parse_columns if tall else parse_sentences
    if text:
        yield from parse(text, name, columns, say)


def parse_sentences(
    text: str, name: str, columns: object = None, say: object = None
) -> Iterator[Sentence]:
    """Yield the sentences of plain text: one per line, words separated by spaces."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield Sentence(line.split(), None, f"{name}:{number}")


def parse_columns(
    text: str, name: str, columns: Columns, say: Say
) -> Iterator[Sentence]:
    """Yield the sentences of CoNLL's columns."""
    where: list[int] = []
    width = documents = total = spaced = 0
    found: list[list[str]] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        line = line.removesuffix("\r")
        if not line.strip(" \t") or line.startswith(DOCUMENT):
            documents += line.startswith(DOCUMENT)
            if found:
                words, *tags = ([row[i] for row in found] for i in where)
                begin = number - len(found)
                yield Sentence(words, tags[0] if tags else None, name, begin)
                found = []
            continue
        # Other whitespace, such as a no-break space, is part of a word.
        cells = line.split("\t") if "\t" in line else [*filter(None, line.split(" "))]
        if not where:
            width, where = len(cells), _columns(columns, len(cells), f"{name}:{number}")
        if len(cells) != width:
            raise UserError(
                f"{name}:{number}: the line has {counted(len(cells), 'column')}, the "
                f"first one {width}"
            )
        if not total and {cells[i].strip().lower() for i in where} <= HEADER:
            shown = ", ".join(repr(cells[i]) for i in where)
            say(
                f"{name}:{number}: looks like names of columns, and is read as a word "
                f"and its tag: {shown}; if so, leave the line out"
            )
        total += 1
        spaced += " " in cells[where[0]].strip()
        found.append(cells)
    if 2 * spaced > total:
        raise UserError(
            f"{name}: {spaced:,} of {total:,} words hold spaces: this looks like a "
            "table of texts; here a line has a word and its tag"
        )
    if documents:
        skipped = counted(documents, f"line {DOCUMENT}", f"lines {DOCUMENT}")
        say(f"{name}: {skipped} skipped")


def _columns(columns: Columns, width: int, place: str) -> list[int]:
    """Return the indices of the requested columns, the words' first."""
    where = []
    for key, column in columns.items():
        if not NUMBER.fullmatch(column):
            if len(columns) > 1:
                raise UserError(
                    f"{place}: {key}={column!r} is not a number of a column (1 is the "
                    "first, -1 the last)"
                )
            column = "1"  # the model was trained on JSON lines, with column names
        i = int(column) - (int(column) > 0)
        if not -width <= i < width:
            raise UserError(
                f"{place}: {key}={column}: the line has {counted(width, 'column')}"
            )
        where.append(i % width)
    if len({*where}) < len(where):
        raise UserError(f"{place}: words and tags are one column of {width}")
    return where


def parse_json(text: str, name: str, columns: Columns, say: Say) -> Iterator[Sentence]:
    """Yield the sentences of JSON lines."""
    named = in_objects(columns)
    for row in tables.parse_rows(text, "json", name, named, say):
        yield sentence_of(row, named)


def in_objects(columns: Columns) -> dict[str, str]:
    """Return the columns to read from objects: NAMES in place of numbers."""
    named = zip(columns.items(), NAMES, strict=False)
    return {k: name if NUMBER.fullmatch(c) else c for (k, c), name in named}


def sentence_of(row: tables.Row, named: Mapping[str, str]) -> Sentence:
    """Build a sentence from a row with lists of words and tags. Raises UserError."""
    column, *of_tags = named.values()
    words, tags = row.cells[column], None
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise UserError(f"{row.place}: {column} has to be a list of texts")
    for column in of_tags:
        tags = row.cells[column]
        if not isinstance(tags, list) or not all(type(t) in (str, int) for t in tags):
            raise UserError(f"{row.place}: {column} has to be a list of tags")
        if len(tags) != len(words):
            counts = f"{counted(len(words), 'word')}, but {counted(len(tags), 'tag')}"
            raise UserError(f"{row.place}: {counts}")
        tags = [str(tag) for tag in tags]
    return Sentence(words, tags, row.place)


PARSERS = {"txt": parse_lines, "json": parse_json, "jsonl": parse_json}

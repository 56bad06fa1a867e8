# SPDX-License-Identifier: Apache-2.0
"""Sentences of words with tags, out of CoNLL's columns, JSON lines or plain text.

- `a.bio`, `b.conll.gz`, `c.txt`: a word a line, columns between tabs, or between spaces
  in a line that has no tab; a blank line ends a sentence. Columns have numbers: 1 is
  the first, -1 the last. Lines of -DOCSTART- end one too; they are skipped and counted
- `d.jsonl`: an object a line with a list of words and a list of tags; `tokens` and
  `tags` where the columns asked for are numbers
- `tfds:conll2003:train`: the same of TensorFlow Datasets, with its names of columns
- where no tags are asked for, a `.txt` or standard input without a tab: a sentence a
  line, words between spaces
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
HEADER = {*f"{HEADER} pos_tags ner_tag ner_tags".split()}  # of columns, in any case


class Sentence(NamedTuple):
    """Words, and as many tags or None. begin: the place it stands, "train.jsonl:2"; or
    the file, and the line of its first word, where each has a line."""

    words: Sequence[str]
    tags: Sequence[str] | None
    begin: str
    line: int | None = None

    def place(self, i: int) -> str:
        """Say where word i stands: "train.bio:7", "train.jsonl:2 (word 3)"."""
        if self.line is None:
            return f"{self.begin} (word {i + 1})"
        return f"{self.begin}:{self.line + i}"


def read_sentences(value: str, key: str, columns: Columns, say: Say) -> list[Sentence]:
    """Read the sentences of all files that a config value names, in order.

    value: files and patterns with commas; key: the config key that messages name.
    columns: {what asks: column} of the words and then, if they are asked for, of the
    tags. Raises UserError, naming file and line, for what is no such file.
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
    """Read a text: JSON lines where it begins with a brace, else as a `.txt`."""
    parse = parse_json if text.lstrip()[:1] == "{" else parse_lines
    return list(parse(text, name, columns, say))


def parse_lines(text: str, name: str, columns: Columns, say: Say) -> Iterator[Sentence]:
    """Yield the sentences of columns, or of plain text if no tags are asked for."""
    tall = len(columns) > 1 or "\t" in text or text.startswith(DOCUMENT)
    if len(columns) == 1:
        say(f"{name} is read as {'a word' if tall else 'a sentence'} a line")
    parse = parse_columns if tall else parse_sentences
    if text:
        yield from parse(text, name, columns, say)


def parse_sentences(
    text: str, name: str, columns: object = None, say: object = None
) -> Iterator[Sentence]:
    """Yield the sentences of plain text, a line each, words between spaces."""
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
        # Other white space, a no-break space for instance, is part of a word.
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
    """Return the indices of the columns asked for, the words' first."""
    where = []
    for key, column in columns.items():
        if not NUMBER.fullmatch(column):
            if len(columns) > 1:
                raise UserError(
                    f"{place}: {key}={column!r} is no number of a column (1 is the "
                    "first, -1 the last)"
                )
            column = "1"  # of a model that learnt from JSON lines
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
    """Name the columns of objects, where those asked for are numbers."""
    named = zip(columns.items(), NAMES, strict=False)
    return {k: name if NUMBER.fullmatch(c) else c for (k, c), name in named}


def sentence_of(row: tables.Row, named: Mapping[str, str]) -> Sentence:
    """Make a sentence of a row with lists of words and of tags. Raises UserError."""
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

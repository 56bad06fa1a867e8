# SPDX-License-Identifier: Apache-2.0
"""Files of text and of JSON lines: they are cut into pieces and read as documents."""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO

from bertjax import UserError
from bertjax.data.corpus import aligned_records, code_files, files
from bertjax.data.corpus.documents import Document, Source, make_document
from bertjax.data.corpus.line_repair import (
    DOCUMENT_LIMIT,
    Counts,
    group,
    json_lines,
    text_lines,
)

# A piece may begin after a line end and a blank line. The white space in a blank line
# is what `line_repair.clean` and `strip` remove. Rarer characters and longer lines are
# missing here: then a place for a cut is missed, but no document is lost.
_WHITE = rb"(?:[\x00-\x09\x0b\x0c\x0e-\x20]|\xc2\xa0|\xe3\x80\x80){0,99}[\r\n]"
_BLANK = re.compile(rb"(?:\n|\r(?!\n))" + _WHITE)
# The same for text without \r; far faster, since the pattern begins with a fixed byte.
_USUAL = re.compile(rb"\n(?=[\x00-\x20\xc2\xe3])" + _WHITE)
_NEWLINE = re.compile(rb"\n")
# If there is no blank line for SPAN bytes: after a line end, or else between
# characters.
# SPAN is the most bytes that DOCUMENT_LIMIT characters can have, so that only documents
# are cut there that are split anyway; it is longer than a match of _BLANK.
SPAN = 4 * DOCUMENT_LIMIT
_PLACES = (re.compile(rb"[\r\n]"), re.compile(rb"[\x80-\xbf]{0,3}"))
# In WikiText: before a title that `line_repair.group` recognizes; rarer forms are
# missing here, too.
_TITLE = re.compile(
    rb"\n[ \t]{0,99}\r?\n(?= = [!-<>-~][ -~]{0,200} = \r?\n[ \t]{0,99}\r?\n)"
)
CUTS = "spans-1"  # version of these rules


@dataclass
class FileSource(Source):
    """A file of text or JSON lines, local or behind a URL that etils.epath opens.

    A piece (`start`, `end`) holds the documents that begin between the boundaries that
    these bytes determine. titled: documents begin at titles, as in WikiText.
    """

    titled: bool = False
    path: str = ""  # where the file is, if that differs from its name

    def __post_init__(self) -> None:
        self.path = self.path or self.name

    @property
    def pack(self) -> str:
        """How the file is compressed: ".gz", ".zst" or ""."""
        return files.part_name(self.path)[1]

    @property
    def is_json(self) -> bool:
        """Whether each line is a record."""
        return files.part_name(self.path)[0].endswith((".jsonl", ".ndjson", ".json"))

    @property
    def _make(self) -> Callable[..., Document]:
        if self.fields.code_field:
            return functools.partial(code_files.make_document, parses=self.parses)
        return (
            aligned_records.make_document if self.fields.is_aligned else make_document
        )

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return how the bytes are read, e.g. "text.gz", and their SHA-256."""
        digest, self.seen = files.file_hash(self.path, cache_dir)
        if self.is_json:
            return f"json{self.pack}{self.fields.suffix()}:{digest}"
        return f"{'wikitext' if self.titled else 'text'}{self.pack}:{digest}"

    def cut_rule(self) -> str:
        """Return the rule that cuts documents over SPAN; call `fingerprint` first."""
        large = self.seen is not None and self.seen.stamp[0] > SPAN
        return CUTS if large and not (self.is_json or self.pack) else ""

    def split(self, piece_bytes: int) -> list[Source]:
        """Cut into ranges of `piece_bytes`; a compressed file is one piece."""
        if self.pack:
            return [self]
        with files.reading(self.path):
            size = files.stat(self.path)[0]
        places = [*range(0, max(size, 1), piece_bytes), size]
        return [replace(self, start=a, end=b) for a, b in pairwise(places)]

    def text_bytes(self) -> int | None:
        """Return the unpacked bytes if the file states them; None otherwise.

        Raises UserError for a file behind a URL that cannot be read. The cuts of files
        depend on their sizes, so that a moment without network must not look like an
        unknown size.
        """
        if self.end is not None:
            return self.end - self.start
        try:
            with files.reading(self.path):
                size = files.stat(self.path)[0]
                if size and self.pack == ".gz":
                    # A gzip file ends with the size of its text modulo 2**32.
                    with files.open_file(self.path) as file:
                        file.seek(-4, os.SEEK_END)
                        size = max(size, int.from_bytes(file.read(4), "little"))
        except UserError:
            if "://" in self.path:
                raise
            return None
        return None if self.pack == ".zst" else size

    def _chunks(self, counter: Counter[str]) -> Iterator[bytes]:
        if self.pack:
            yield from files.unpacked(self.path)
            return
        with files.reading(self.path), files.open_file(self.path) as raw:
            start, end, cut = self._edges(raw)
            counter["long_documents"] += cut and start < end
            yield from byte_range(raw, start, end)

    def _edges(self, raw: IO[bytes]) -> tuple[int, int, bool]:
        """Return the edges of the piece, and whether it begins within a document."""
        size = files.stat(self.path)[0]
        ends = size if self.end is None else self.end
        if self.is_json:
            start, end = (json_edge(raw, at, size) for at in (self.start, ends))
            return start, end, False
        start, cut = text_edge(raw, self.start, size, self.titled)
        if ends < size:
            size = text_edge(raw, ends, size, self.titled)[0]
        return start, size, cut

    def _lines_before(self) -> int:
        """Count the lines before the piece."""
        with files.reading(self.path), files.open_file(self.path) as raw:
            start, _, _ = self._edges(raw)
            return sum(chunk.count(b"\n") for chunk in byte_range(raw, 0, start))

    def locate(self, paragraph: str, max_line_bytes: int) -> str:
        """Return the file and the line of a paragraph, counted as lines are read."""
        whole = replace(self, start=0, end=None)
        counter: Counter[str] = Counter()
        chunks = whole._chunks(counter)
        if self.is_json:
            for record, where in json_lines(self.name, chunks, max_line_bytes, counter):
                document = self._make(record, self.fields, where, counter)
                if paragraph in document.paragraphs:
                    return where()
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            for number, line in enumerate(lines, 1):
                if line == paragraph:
                    return f"{self.name}, line {number}"
        return self.name

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        counter = counts[self.name]
        chunks = counts.reading(self._chunks(counter))
        if self.is_json:
            skipped = self._lines_before if self.start else int
            records = json_lines(self.name, chunks, max_line_bytes, counter, skipped)
            for record, where in records:
                yield self._make(record, self.fields, where, counter)
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            yield from map(Document, group(lines, counter, self.titled))


@dataclass
class BuiltinSource(FileSource):
    """One side ("train" or "valid") of the embedded corpus."""

    side: str = "train"

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Create the corpus in `cache_dir` if it is missing; return its hash."""
        from bertjax.data.corpus import builtin

        corpus = builtin.materialize(cache_dir, say)
        self.path = corpus[self.side]
        return f"builtin:{self.side}:{corpus['hash']}"


def byte_range(raw: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes [start, end) of an open file, or those that exist."""
    raw.seek(start)
    while start < end and (data := raw.read(min(files.CHUNK, end - start))):
        start += len(data)
        yield data


def _search(
    raw: IO[bytes], start: int, end: int, pattern: re.Pattern[bytes]
) -> int | None:
    """Return the end of the first match that begins in the bytes [start, end)."""
    tail, at = b"", start
    for chunk in byte_range(raw, start, end + 512):
        tail += chunk
        at += len(chunk)
        usual = pattern is _BLANK and b"\r" not in tail
        if match := (_USUAL if usual else pattern).search(tail):
            begins, ends = (at - len(tail) + n for n in match.span())
            return ends if begins < end else None
        tail = tail[-512:]  # longer than a match, which may begin here
    return None


def text_edge(
    raw: IO[bytes], at: int, size: int, titled: bool = False
) -> tuple[int, bool]:
    """Return the start of the piece that contains `at`, and whether it cuts a document.

    titled: documents begin at titles, as in WikiText, not after blank lines.

    The result depends on the bytes and `at` alone and grows with `at`, so that each
    piece ends where the next one begins. No more than 3 SPAN are read, however long a
    document is.
    """
    if at == 0:
        return 0, False
    whole = _TITLE if titled else _BLANK
    for pattern in (whole, *_PLACES):
        edge = _search(raw, at, min(at + SPAN, size), pattern)
        if edge is not None:
            return edge, pattern is not whole
        at += SPAN
    return size, False


def json_edge(raw: IO[bytes], at: int, size: int) -> int:
    """Return the start of the first line that begins at `at` or after it."""
    if at <= 1:
        return 0
    edge = _search(raw, at - 1, size, _NEWLINE)
    return size if edge is None else edge

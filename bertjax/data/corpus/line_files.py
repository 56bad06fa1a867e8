# SPDX-License-Identifier: Apache-2.0
"""Files of text and of JSON lines: cut into pieces, read as documents."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO

from bertjax import UserError
from bertjax.data.corpus import files
from bertjax.data.corpus.boundaries import CUTS, SPAN, byte_range, json_edge, text_edge
from bertjax.data.corpus.documents import Document, Source, make_document
from bertjax.data.corpus.line_repair import Counts, group, json_lines, text_lines


@dataclass
class FileSource(Source):
    """A file of text or JSON lines, local or behind a URL that etils.epath opens.

    A piece (`start`, `end`) has the documents that begin between the boundaries that
    belong to these bytes. titled: documents begin at titles, as in WikiText.
    """

    titled: bool = False
    start: int = 0
    end: int | None = None
    path: str = ""  # where it lies, if that is not its name

    def __post_init__(self) -> None:
        self.path = self.path or self.name

    @property
    def pack(self) -> str:
        """How the file is compressed: ".gz", ".zst" or ""."""
        return next((p for p in (".gz", ".zst") if self.path.lower().endswith(p)), "")

    @property
    def is_json(self) -> bool:
        """Whether each line is a record."""
        path = self.path.lower().removesuffix(self.pack)
        return path.endswith((".jsonl", ".ndjson", ".json"))

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return how the bytes are read, e.g. "text.gz", and their SHA-256."""
        digest, self.seen = files.file_hash(self.path, cache_dir)
        if self.is_json:
            return f"json{self.pack}{self.fields.suffix()}:{digest}"
        return f"{'wikitext' if self.titled else 'text'}{self.pack}:{digest}"

    def cut_rule(self) -> str:
        """Name the rule for large text: a document over SPAN is cut where pieces are.

        `fingerprint` comes first.
        """
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

    def span(self) -> tuple[int, int | None]:
        return self.start, self.end

    def text_bytes(self) -> int | None:
        """Return the bytes, unpacked where the file says how many; None otherwise.

        Raises UserError for a file behind a URL that cannot be read: how files are cut
        depends on their sizes, so that a moment without network must not pass for one.
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
        """Return where the piece begins and ends, and if it begins in a document."""
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
        """Name the file and the line, counted as lines are read."""
        whole = replace(self, start=0, end=None)
        counter: Counter[str] = Counter()
        chunks = whole._chunks(counter)
        if self.is_json:
            for record, where in json_lines(self.name, chunks, max_line_bytes, counter):
                document = make_document(record, self.fields, where, counter)
                if paragraph in document.paragraphs:
                    return where()
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            for number, line in enumerate(lines, 1):
                if line == paragraph:
                    return f"{self.name}, line {number}"
        return self.name

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        counter = counts.of(self.name)
        chunks = counts.reading(self._chunks(counter))
        if self.is_json:
            skipped = self._lines_before if self.start else int
            records = json_lines(self.name, chunks, max_line_bytes, counter, skipped)
            for record, where in records:
                yield make_document(record, self.fields, where, counter)
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            yield from map(Document, group(lines, counter, self.titled))


@dataclass
class BuiltinSource(FileSource):
    """One side ("train" or "valid") of the embedded corpus."""

    side: str = "train"

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Put the corpus in `cache_dir` unless it is there; return its hash."""
        from bertjax.data.corpus import builtin

        corpus = builtin.materialise(cache_dir, say)
        self.path = corpus[self.side]
        return f"builtin:{self.side}:{corpus['hash']}"

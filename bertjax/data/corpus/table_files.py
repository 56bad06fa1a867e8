# SPDX-License-Identifier: Apache-2.0
"""CSV and TSV files: each row is a document."""

import codecs
import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bertjax import UserError, counted
from bertjax.data.corpus import files
from bertjax.data.corpus.documents import Document, Source, refuse_missing
from bertjax.data.corpus.line_repair import Counts

ENDS = (".csv", ".tsv")
# The largest cell in characters: a cell may hold a whole book, as a JSON record may.
csv.field_size_limit(2**31 - 1)


def is_table(path: str) -> bool:
    """Return whether the name of a file is that of a table."""
    return files.part_name(path)[0].endswith(ENDS)


@dataclass
class TableSource(Source):
    """A CSV or TSV file whose first line names the columns.

    In CSV, quoted cells may hold commas, quotes and line ends; in TSV, a quote is an
    ordinary character and each line is a row. Empty rows are skipped.
    """

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        digest, self.seen = files.file_hash(self.name, cache_dir)
        return f"{files.part_name(self.name)[0][-3:]}{self.fields.suffix()}:{digest}"

    def text_bytes(self) -> int | None:
        """Return the file's size, or None if it is compressed."""
        if files.part_name(self.name)[1]:
            return None
        try:
            return files.stat(self.name)[0]
        except OSError:
            return None

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield a document for each row.

        Raises UserError for a missing or repeated column, for a row with more or fewer
        cells than the first line, for quotes that do not close, and for a row over
        `max_line_bytes`.
        """
        rows = self._rows(max_line_bytes)
        place, header = next(rows, (self.name, []))
        names, wanted = [name.strip() for name in header], self.fields.keys()
        if header:
            refuse_missing(wanted, names, place, "column")
        if twice := [name for name in wanted if names.count(name) > 1]:
            raise UserError(f"{place}: two columns are `{twice[0]}`")
        for place, cells in rows:
            if len(cells) != len(names):
                raise UserError(
                    f"{place}: the row has {counted(len(cells), 'cell')}, the first "
                    f"line {len(names)}"
                )
            # Encode again: `make` repairs and counts bytes that are not UTF-8.
            found = (cell.encode("utf-8", "surrogateescape") for cell in cells)
            record = dict(zip(names, found, strict=True))
            yield self.make(record, place.__str__, counts)

    def _rows(self, limit: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the place and cells of each row that is not empty."""
        last, begun, size = 0, 1, 0  # lines read; first line and bytes of the row

        def lines() -> Iterator[str]:
            nonlocal last, size
            for line in _split_lines(files.unpacked(self.name), limit):
                last, size = last + 1, size + len(line)
                if size > limit:
                    raise UserError(
                        f"{self.name}:{begun}: a row of more than {limit:,} bytes "
                        "(data.max_line_bytes): are its quotes closed?"
                    )
                yield line.decode("utf-8", "surrogateescape")

        rows: Iterator[tuple[int, list[str]]]
        if files.part_name(self.name)[0].endswith(".csv"):
            rows = csv_rows(lines(), self.name)
        else:
            cells_of = (line.rstrip("\r\n").split("\t") for line in lines())
            rows = enumerate(cells_of, 1)
        for number, cells in rows:
            if any(map(str.strip, cells)):
                yield f"{self.name}:{number}", cells
            begun, size = last + 1, 0


def csv_rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line, counted from 1, and the cells of each row of CSV.

    lines: with their line ends. Raises UserError, which names file and line.

    >>> list(csv_rows(['a,"b\\n', 'c"\\n', 'd\\n'], "x.csv"))
    [(1, ['a', 'b\\nc']), (3, ['d'])]
    """
    reader, begun = csv.reader(lines, strict=True), 1
    try:
        for cells in reader:
            yield begun, cells
            begun = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{name}:{begun}: is not CSV ({error})") from None


def _split_lines(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Yield lines with their ends, without a byte order mark before the first.

    A line over the limit, which is refused, is yielded as far as it was read."""
    rest, first = b"", True
    for chunk in chunks:
        if first and chunk:
            chunk, first = chunk.removeprefix(codecs.BOM_UTF8), False
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
        if len(rest) > limit:
            yield rest
    if rest:
        yield rest

# SPDX-License-Identifier: Apache-2.0
"""Parquet files: each row is a document."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bertjax import UserError, registry
from bertjax.data.corpus import files
from bertjax.data.corpus.documents import Document, Source, refuse_missing
from bertjax.data.corpus.line_repair import Counts

ROWS = 64  # decoded at once; a single row may hold a whole book


@dataclass
class ParquetSource(Source):
    """A Parquet file, or its row groups from `start` to before `end`."""

    size: int | None = None  # the bytes of these row groups

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        digest, self.seen = files.file_hash(self.name, cache_dir)
        return f"parquet{self.fields.suffix()}:{digest}"

    @contextmanager
    def _open(self) -> Iterator[Any]:
        pyarrow: Any = registry.import_extra("pyarrow", "parquet", self.name)
        from pyarrow import parquet

        with files.reading(self.name), files.open_file(self.name) as raw:
            try:
                # Read a column while it is decoded, not as a whole.
                with parquet.ParquetFile(
                    raw, buffer_size=files.CHUNK, pre_buffer=False
                ) as file:
                    names = file.schema_arrow.names
                    refuse_missing(self.fields.keys(), names, self.name, "column")
                    yield file
            except (pyarrow.ArrowException, OSError) as err:
                if getattr(err, "errno", None) is not None:  # not an Arrow error
                    raise
                reason = " ".join(str(err).split())[:200]
                raise UserError(
                    f"{self.name}: damaged Parquet file ({reason})"
                ) from None

    def split(self, piece_bytes: int) -> list[Source]:
        """Cut between row groups."""
        pieces: list[Source] = []
        start = size = 0
        with self._open() as file:
            for end in range(1, file.num_row_groups + 1):
                size += file.metadata.row_group(end - 1).total_byte_size
                if size >= piece_bytes or end == file.num_row_groups:
                    pieces.append(replace(self, start=start, end=end, size=size))
                    start, size = end, 0
        return pieces or [self]  # a file without rows has no row group

    def text_bytes(self) -> int | None:
        """Return the bytes of the row groups, or the size of a whole file."""
        try:
            return files.stat(self.name)[0] if self.size is None else self.size
        except OSError:
            return None

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        columns = list(self.fields.keys())
        with self._open() as file:
            end = file.num_row_groups if self.end is None else self.end
            before = map(file.metadata.row_group, range(self.start))
            row = sum(group.num_rows for group in before)

            def where() -> str:
                return f"{self.name}, row {row}"

            groups = range(self.start, end)
            for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns):
                for record in _as_bytes(batch).to_pylist():
                    row += 1
                    yield self.make(record, where, counts)


def _as_bytes(batch: Any) -> Any:
    """Return a batch with bytes for strings, since invalid UTF-8 is repaired later."""
    import pyarrow as pa

    strings = {"string": pa.binary(), "large_string": pa.large_binary()}
    strings["string_view"] = pa.binary()  # by name: older versions have no such type

    def bare(kind: Any) -> Any:
        if pa.types.is_dictionary(kind):
            return bare(kind.value_type)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            make = pa.list_ if pa.types.is_list(kind) else pa.large_list
            return make(bare(kind.value_type))
        return strings.get(str(kind), kind)

    columns = [column.cast(bare(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)

# SPDX-License-Identifier: Apache-2.0
"""Files of text and of JSON lines: opened, unpacked, hashed, cut into pieces."""

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import re
import socket
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from bertjax import UserError
from bertjax.data.text.documents import (
    TEXT,
    Document,
    Fields,
    Source,
    counted,
    make_document,
)
from bertjax.data.text.edges import CUTS, SPAN, byte_range, json_edge, text_edge
from bertjax.data.text.lines import Counts, group, json_lines, text_lines

CHUNK = 1 << 20  # bytes a read
HASHES = "fingerprints.json"  # in the cache


def remote(path: str) -> Any:
    """Return what etils.epath makes of a URL."""
    from etils import epath

    return epath.Path(path)


@contextlib.contextmanager
def reaching() -> Iterator[None]:
    """Make any error of what opens URLs an OSError: the clouds' raise many kinds."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as err:
        reason = getattr(err, "strerror", None) or str(err) or type(err).__name__
        if isinstance(err, KeyError):  # epath's, of "foo://"
            reason = f"no such kind of URL: {err.args[0]}"
        raise OSError(errno.EIO, reason.strip().splitlines()[0][:200]) from None


class Seen(NamedTuple):
    """What `stat` told of a file, and the machine: another may have a copy of it."""

    host: str
    stamp: tuple[int, ...]


class _Far(io.RawIOBase):
    """A remote file whose errors are OSErrors."""

    def __init__(self, path: str) -> None:
        with reaching():
            self.inner = remote(path).open("rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with reaching():
            found = self.inner.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with reaching():
            self.inner.seek(offset, whence)
            return self.inner.tell()

    def tell(self) -> int:
        return self.inner.tell()

    def close(self) -> None:
        if not self.closed and hasattr(self, "inner"):
            self.inner.close()
        super().close()


def stat(path: str) -> tuple[int, ...]:
    """Return the bytes, and what else tells of a change of the file; raises OSError.

    The time of modification in ns; on this machine, of the last change of any kind as
    well, which nobody can set back. No inode: mounted buckets draw these anew.
    """
    if "://" in path:
        with reaching():
            found = remote(path).stat()
            return found.length, int(found.mtime * 1e9)
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def open_file(path: str) -> IO[bytes]:
    """Open a file or URL for reading bytes; it and reading raise OSError alone."""
    if "://" in path:
        return io.BufferedReader(_Far(path), CHUNK)
    return open(path, "rb")


def is_dir(path: str) -> bool:
    """Tell whether a path or URL is a directory; raises OSError."""
    if "://" not in path:
        return os.path.isdir(path)
    with reaching():
        return remote(path).is_dir()


def find(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted; raises OSError."""
    if "://" not in pattern:
        return sorted(
            p for p in glob.glob(pattern, recursive=True) if not os.path.isdir(p)
        )
    head = pattern[: re.search(r"[*?\[]", pattern).start()].rpartition("/")[0]
    with reaching():
        found = remote(head).glob(pattern[len(head) + 1 :])
        return sorted(os.fspath(p) for p in found if not p.is_dir())


def unpacked(path: str, size: int = 0) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked as it is named, about `size` (CHUNK) at a time.

    Raises UserError where it is damaged.
    """
    size = size or CHUNK
    try:
        with open_file(path) as raw:
            if not path.lower().endswith(tuple(PACKED.values())):
                while chunk := raw.read(size):
                    yield chunk
            elif path.lower().endswith(".gz"):
                import gzip

                with gzip.GzipFile(fileobj=raw) as unpacked:
                    while chunk := unpacked.read(size):
                        yield chunk
            else:
                yield from _zstd_chunks(path, raw)
    except (EOFError, zlib.error) as err:
        raise UserError(f"{path}: damaged or truncated .gz file ({err})") from None
    except OSError as err:  # gzip.BadGzipFile has no errno
        if err.errno is None and path.lower().endswith(".gz"):
            raise UserError(f"{path}: damaged or truncated .gz file ({err})") from None
        raise unreadable(path, err) from None


def unreadable(path: str, err: OSError) -> UserError:
    """Say that a file cannot be read, and why."""
    return UserError(f"{path}: cannot be read ({err.strerror or err})")


def _zstd_chunks(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{path}: reading .zst needs zstandard (pip install 'bertjax[zstd]')"
        ) from None
    # As much as `zstd --long=31` may have used.
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    try:
        while data := raw.read(CHUNK >> 4):
            while data:
                frame = frame or unpacker.decompressobj()
                if chunk := frame.decompress(data):
                    yield chunk
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as err:
        raise UserError(f"{path}: damaged .zst file ({err})") from None
    if frame is not None:
        raise UserError(f"{path}: truncated .zst file")


@dataclass
class FileSource(Source):
    """A file of text or JSON lines, local or behind a URL that etils.epath opens.

    A piece (`start`, `end`) has the documents that begin between the boundaries that
    belong to these bytes.
    """

    name: str
    path: str = ""  # where it lies, if that is not its name
    fields: Fields = TEXT
    start: int = 0
    end: int | None = None
    seen: Seen | None = field(default=None, repr=False)

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

    @property
    def format(self) -> str:
        """Name how the bytes are read, e.g. "text.gz"; part of the fingerprint."""
        told = "json" if self.is_json else "text"
        return told + self.pack + (self.fields.told() if self.is_json else "")

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return format and SHA-256 of the bytes."""
        digest, self.seen = file_hash(self.path, cache_dir)
        return f"{self.format}:{digest}"

    def refuse_changed(self) -> None:
        """Raise UserError where the file is not what `fingerprint` saw any more."""
        refuse_changed(self.path, self.seen)

    def cuts(self) -> str:
        """Name the rule for large text: a document over SPAN is cut where pieces are.

        `fingerprint` comes first.
        """
        large = self.seen is not None and self.seen.stamp[0] > SPAN
        return CUTS if large and not (self.is_json or self.pack) else ""

    def split(self, piece_bytes: int) -> list[Source]:
        """Cut into ranges of `piece_bytes`; a compressed file is one piece."""
        if self.pack:
            return [self]
        try:
            size = stat(self.path)[0]
        except OSError as err:
            raise unreadable(self.name, err) from None
        ends = [*range(piece_bytes, size, piece_bytes), size]
        starts = [0, *ends[:-1]]
        return [
            replace(self, start=a, end=b) for a, b in zip(starts, ends, strict=True)
        ]

    def span(self) -> tuple[int, int | None]:
        """Return the range of bytes."""
        return self.start, self.end

    def text_bytes(self) -> int | None:
        """Return the bytes, unpacked where the file says how many; None otherwise.

        Raises UserError for a file behind a URL that cannot be read: how files are cut
        depends on their sizes, so that a moment without network must not pass for one.
        """
        if self.end is not None:
            return self.end - self.start
        try:
            size = stat(self.path)[0]
            if size and self.pack == ".gz":
                # A gzip file ends with the size of its text modulo 2**32.
                with open_file(self.path) as file:
                    file.seek(-4, os.SEEK_END)
                    size = max(size, int.from_bytes(file.read(4), "little"))
        except OSError as err:
            if "://" in self.path:
                raise unreadable(self.name, err) from None
            return None
        return None if self.pack == ".zst" else size

    def _chunks(self, counter: Counter[str]) -> Iterator[bytes]:
        try:
            size = stat(self.path)[0]
            with open_file(self.path) as raw:
                start, end, cut = self._edges(raw, size)
                counter["long_documents"] += cut and start < end
                yield from byte_range(raw, start, end, CHUNK)
        except OSError as err:
            raise unreadable(self.name, err) from None

    def _edges(self, raw: IO[bytes], size: int) -> tuple[int, int, bool]:
        """Return where the piece begins and ends, and if it begins in a document."""
        ends = size if self.end is None else self.end
        if self.is_json:
            start, end = (json_edge(raw, at, size) for at in (self.start, ends))
            return start, end, False
        start, cut = text_edge(raw, self.start, size)
        return start, size if ends >= size else text_edge(raw, ends, size)[0], cut

    def _lines_before(self) -> int:
        """Count the lines before the piece."""
        try:
            with open_file(self.path) as raw:
                start, _, _ = self._edges(raw, stat(self.path)[0])
                chunks = byte_range(raw, 0, start, CHUNK)
                return sum(chunk.count(b"\n") for chunk in chunks)
        except OSError as err:
            raise unreadable(self.name, err) from None

    def where(self, paragraph: str, max_line_bytes: int) -> str:
        """Name the file and the line, counted as lines are read."""
        whole = replace(self, start=0, end=None)
        counter: Counter[str] = Counter()
        chunks = unpacked(self.path) if self.pack else whole._chunks(counter)
        if self.is_json:
            for record, where in json_lines(self.name, chunks, max_line_bytes, counter):
                found = make_document(record, self.fields, where, counter)
                if paragraph in found.paragraphs:
                    return where()
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            for number, line in enumerate(lines, 1):
                if line == paragraph:
                    return f"{self.name}, line {number}"
        return self.name

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents of the file, or of the piece."""
        counter = counts.of(self.name)
        chunks = unpacked(self.path) if self.pack else self._chunks(counter)
        if self.is_json:
            skipped = self._lines_before if self.start else int
            records = json_lines(self.name, chunks, max_line_bytes, counter, skipped)
            found = (
                make_document(record, self.fields, where, counter)
                for record, where in records
            )
        else:
            lines = text_lines(chunks, max_line_bytes, counter)
            found = map(Document, group(lines, counter))
        yield from counted(found, counter)


# What files that are no text have at which byte, and what they are.
FOREIGN = {
    (0, b"BZh"): "bzip2",
    (0, b"\xfd7zXZ"): "xz",
    (0, b"PK\x03\x04"): "a zip archive",
    (0, b"PAR1"): "Parquet, whose files are named *.parquet here",
    (0, b"%PDF"): "PDF",
    (0, b"7z\xbc\xaf"): "7z",
    (0, b"\xff\xfe"): "UTF-16, and text has to be UTF-8",
    (0, b"\xfe\xff"): "UTF-16, and text has to be UTF-8",
    (257, b"ustar"): "a tar archive",
}
HEAD = 512  # bytes that are looked at
PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


def refuse_foreign(path: str, key: str) -> None:
    """Raise UserError for a file that is neither text nor compressed as it is named."""
    try:
        with open_file(path) as raw:
            head = raw.read(HEAD)
    except OSError as err:
        raise unreadable(path, err) from None
    for magic, suffix in PACKED.items():
        if head.startswith(magic):
            if not path.lower().endswith(suffix):
                raise UserError(
                    f"{key}={path}: compressed text has to be named *{suffix} here"
                )
            head = next(unpacked(path, HEAD), b"")
            break
    for (at, magic), what in FOREIGN.items():
        if head.startswith(magic, at):
            raise UserError(f"{key}={path}: no text but {what}")


def refuse_changed(name: str, seen: Seen | None) -> None:
    """Raise UserError for a file that is not what was seen on this machine."""
    if seen is None or ("://" not in name and seen.host != socket.gethostname()):
        return
    try:
        changed = stat(name)[:2] != seen.stamp[:2]  # new permissions are no change
    except OSError as err:
        raise unreadable(name, err) from None
    if changed:
        raise UserError(f"{name}: the file changed while it was read")


def file_hash(name: str, cache_dir: str) -> tuple[str, Seen]:
    """Return the SHA-256 of a file's bytes, and what it was taken of.

    It is remembered in `cache_dir`/HASHES under the path and what `stat`
    tells, so that big files are not read again at every start.
    """
    path = name if "://" in name else os.path.abspath(name)
    try:
        seen = Seen(socket.gethostname(), stat(path))
        stamp = [*seen.stamp]
        entry = remembered(cache_dir).get(path)
        if isinstance(entry, dict) and entry.get("stamp") == stamp:
            return entry["sha256"], seen
        digest = hashlib.sha256()
        with open_file(path) as raw:
            while chunk := raw.read(CHUNK):
                digest.update(chunk)
    except OSError as err:
        raise unreadable(name, err) from None
    refuse_changed(name, seen)
    remember(cache_dir, {path: {"stamp": stamp, "sha256": digest.hexdigest()}})
    return digest.hexdigest(), seen


def remember(cache_dir: str, more: dict[str, Any]) -> None:
    """Add hashes to those that are remembered."""
    memory = Path(cache_dir) / HASHES
    known = {**remembered(cache_dir), **more}
    # Processes of several hosts may write here.
    part = memory.with_name(f"{memory.name}.{uuid.uuid4().hex}.part")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1, sort_keys=True))
        os.replace(part, memory)
    except OSError as err:
        reason = err.strerror or err
        raise UserError(f"data.cache={cache_dir}: cannot write ({reason})") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def remembered(cache_dir: str) -> dict[str, Any]:
    """Read the remembered hashes; a damaged file only means hashing again."""
    try:
        known = json.loads((Path(cache_dir) / HASHES).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}

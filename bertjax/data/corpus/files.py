# SPDX-License-Identifier: Apache-2.0
"""Open, decompress, hash and check files of text and of JSON lines."""

import contextlib
import errno
import glob
import gzip
import hashlib
import io
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from stat import S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFMT, S_IFSOCK
from typing import IO, Any, NamedTuple

from bertjax import UserError, registry
from bertjax.storage.atomic import write_file

CHUNK = 1 << 20  # bytes per read
# Suffixes of compressed files, and the first bytes of such files.
PACKS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
HASHES = "fingerprints.json"  # in the cache
SAVED = 10.0  # seconds between savings of the hashes of many files
PIPE = "a pipe"
_IRREGULAR = {
    S_IFIFO: PIPE,
    S_IFSOCK: "a socket",
    S_IFCHR: "a device",
    S_IFBLK: "a device",
    S_IFDIR: "a directory",
}


def remote(path: str) -> Any:
    """Return the etils.epath object of a URL."""
    from etils import epath

    return epath.Path(path)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turn any error of opening a URL into an OSError: cloud libraries raise many."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as err:
        reason = getattr(err, "strerror", None) or str(err) or type(err).__name__
        if isinstance(err, KeyError):  # raised by epath for "foo://"
            reason = f"no such kind of URL: {err.args[0]}"
        raise OSError(errno.EIO, reason.strip().splitlines()[0][:200]) from None


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn any error of opening or reading a file or URL into a UserError naming it."""
    try:
        with os_errors() if "://" in path else contextlib.nullcontext():
            yield
    except OSError as err:
        reason = err.strerror or err
        raise UserError(f"{path}: cannot be read ({reason})") from None


class Seen(NamedTuple):
    """The result of `stat` for a file, and the machine: another may have a copy."""

    host: str
    stamp: tuple[int, ...]


class _RemoteFile(io.RawIOBase):
    """A remote file with everything that io.BufferedReader needs."""

    def __init__(self, path: str) -> None:
        self.inner = remote(path).open("rb")

    def readable(self) -> bool:
        return True

    seekable = readable

    def readinto(self, buffer: Any) -> int:
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.inner.seek(offset, whence)
        return self.inner.tell()

    def close(self) -> None:
        if not self.closed and hasattr(self, "inner"):
            self.inner.close()
        super().close()


def stat(path: str) -> tuple[int, ...]:
    """Return the bytes of a file and times that show changes of it; raises OSError.

    The time of modification in ns; for local files also the time of the last change of
    any kind, which nobody can set back. No inode: mounted buckets assign new ones.
    """
    if "://" in path:
        with os_errors():
            status = remote(path).stat()
            return status.length, int(status.mtime * 1e9)
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_file(path: str) -> IO[bytes]:
    """Open a file or URL for reading bytes. Raises OSError for anything but a file."""
    if "://" in path:
        return io.BufferedReader(_RemoteFile(path), CHUNK)
    if what := irregular(path):
        raise OSError(errno.EINVAL, f"{what}, not a regular file", path)
    return open(path, "rb")


def irregular(path: str) -> str:
    """Return what a path or URL is if it is not a file, such as "a pipe"; otherwise "".

    Opening a pipe would wait for its writer. Raises OSError.
    """
    if "://" in path:
        return _IRREGULAR[S_IFDIR] if is_dir(path) else ""
    return _IRREGULAR.get(S_IFMT(os.stat(path).st_mode), "")


def is_dir(path: str) -> bool:
    """Return whether a path or URL is a directory; raises OSError."""
    if "://" not in path:
        return os.path.isdir(path)
    with os_errors():
        return remote(path).is_dir()


def find(pattern: str) -> list[str]:
    """Return the paths that match a pattern, sorted; raises OSError.

    Directories are left out if the pattern matches them necessarily: those that **
    passes through, and all those of a bucket.
    """
    if "://" not in pattern:
        paths = sorted(glob.glob(pattern, recursive=True))
        return [p for p in paths if "**" not in pattern or not os.path.isdir(p)]
    head = pattern[: re.search(r"[*?\[]", pattern).start()].rpartition("/")[0]
    with os_errors():
        matches = remote(head).glob(pattern[len(head) + 1 :])
        return sorted(os.fspath(p) for p in matches if not p.is_dir())


def part_name(path: str) -> tuple[str, str]:
    """Return a file's name in lower case without its compression suffix, and that.

    >>> part_name("A.tsv.gz"), part_name("b.txt")
    (('a.tsv', '.gz'), ('b.txt', ''))
    """
    name = path.lower()
    pack = next(filter(name.endswith, PACKS), "")
    return name.removesuffix(pack), pack


def unpacked(path: str, size: int = 0) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed according to its name, in chunks of `size`.

    `size` 0 means CHUNK. Raises UserError if it cannot be read or is damaged.
    """
    _, pack = part_name(path)
    with reading(path), open_file(path) as raw:
        if pack == ".zst":
            yield from _zstd_chunks(path, raw)
            return
        try:
            with gzip.GzipFile(fileobj=raw) if pack == ".gz" else raw as file:
                while chunk := file.read(size or CHUNK):
                    yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as err:
            raise UserError(f"{path}: damaged or truncated .gz file ({err})") from None


def _zstd_chunks(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    zstandard: Any = registry.import_extra("zstandard", "zstd", path)
    # The largest window that `zstd --long=31` may have used.
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


# Patterns at the start of files that are not text, and their formats. Letters alone are
# not enough: PAR1 is also a protein.
BINARY_FORMATS = {
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "bzip2",
    rb"\xfd7zXZ": "xz",
    rb"PK\x03\x04": "a zip archive",
    rb"PAR1\x15": "Parquet, whose files are named *.parquet here",
    # The form of data sets: a length of 4 bytes, then the offset of the table.
    rb"(?s)ARROW1\0\0|\xff{4}.{4}[\x04-\x20]\0{3}": "Arrow, which datasets of "
    "Hugging Face are saved in; their to_parquet() writes what is read here",
    # The length of a record, 8 bytes, its checksum, and the record's first field.
    rb"(?s).{4}\0{4}.{4}\n": "TFRecord, which tfds:NAME:SPLIT reads",
    rb"%PDF-\d\.\d": "PDF",
    rb"7z\xbc\xaf": "7z",
    rb"\xff\xfe|\xfe\xff": "UTF-16, and text has to be UTF-8",
    rb"(?s:.{257})ustar(\0|  \0)": "a tar archive",
}
HEAD = 512  # bytes that are checked


def read_head(path: str, key: str) -> bytes:
    """Return the first bytes of a file, unpacked.

    Raises UserError for a file that is neither text nor compressed as its name says.
    """
    with reading(path), open_file(path) as raw:
        head = raw.read(HEAD)
    if suffix := next((p for p, b in PACKS.items() if head.startswith(b)), ""):
        if part_name(path)[1] != suffix:
            raise UserError(
                f"{key}={path}: compressed text has to be named *{suffix} here"
            )
        head = next(unpacked(path, HEAD), b"")
    for begins, what in BINARY_FORMATS.items():
        if re.match(begins, head):
            raise UserError(f"{key}={path}: the file is not text but {what}")
    return head


def refuse_changed(name: str, seen: Seen | None) -> None:
    """Raise UserError if a file is not what was seen on this machine."""
    if seen is None or ("://" not in name and seen.host != socket.gethostname()):
        return
    with reading(name):
        changed = stat(name)[:2] != seen.stamp[:2]  # new permissions are no change
    if changed:
        raise UserError(f"{name}: the file changed while it was read")


class _Hashes:
    """The hashes of texts in a cache while many files are hashed: they are read once
    and saved together."""

    def __init__(self, cache_dir: str) -> None:
        self.cache_dir, self.known = cache_dir, load_hashes(cache_dir)
        self.new: dict[str, Any] = {}
        self.saved = time.monotonic()

    def add(self, path: str, entry: dict[str, Any]) -> None:
        self.known[path] = self.new[path] = entry
        if time.monotonic() - self.saved >= SAVED:
            self.save()

    def save(self) -> None:
        if self.new:
            save_hashes(self.cache_dir, self.new)
        self.new, self.saved = {}, time.monotonic()


_open: dict[str, _Hashes] = {}  # by cache directory


@contextlib.contextmanager
def keeping_hashes(cache_dir: str) -> Iterator[None]:
    """Read the hashes of `cache_dir` once for all calls of `file_hash` within, and save
    new ones together: a corpus may have 100,000 files."""
    if cache_dir in _open:
        yield
        return
    hashes = _open[cache_dir] = _Hashes(cache_dir)
    try:
        yield
    finally:
        del _open[cache_dir]
        hashes.save()


def file_hash(name: str, cache_dir: str) -> tuple[str, Seen]:
    """Return the SHA-256 of a file's bytes, and the file's state when it was hashed.

    The hash is stored in `cache_dir`/HASHES with the path and the result of `stat`, so
    that big files are not read again at every start.
    """
    path = name if "://" in name else os.path.abspath(name)
    with keeping_hashes(cache_dir):
        hashes = _open[cache_dir]
        with reading(name):
            seen = Seen(socket.gethostname(), stat(path))
            entry = hashes.known.get(path)
            if isinstance(entry, dict) and entry.get("stamp") == [*seen.stamp]:
                return entry["sha256"], seen
            with open_file(path) as raw:
                sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        refuse_changed(name, seen)
        hashes.add(path, {"stamp": [*seen.stamp], "sha256": sha256})
    return sha256, seen


def save_hashes(cache_dir: str, more: dict[str, Any]) -> None:
    """Add hashes of texts to those in `cache_dir`."""
    known = {**load_hashes(cache_dir), **more}
    text = json.dumps(known, indent=1, sort_keys=True)
    write_file(Path(cache_dir) / HASHES, text, f"data.cache={cache_dir}")


def load_hashes(cache_dir: str) -> dict[str, Any]:
    """Read the hashes of texts; a damaged file only means hashing again."""
    try:
        known = json.loads((Path(cache_dir) / HASHES).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}

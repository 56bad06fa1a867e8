# SPDX-License-Identifier: Apache-2.0
"""Read documents from text sources that are written as strings.

- `a.txt`, `b/*.txt.gz`, `c.zst`: a paragraph or sentence a line, documents
  separated by a blank line
- `d.jsonl`, `e.json.gz`: a JSON object a line, its `text` is one document
- `tfds:name[/config][:version]:split`: TensorFlow Datasets on this machine, `text`
- `builtin:docs`, `builtin:docs:train`, `builtin:docs:valid`: the documentation that
  came with Python and the installed packages (bertjax/data/builtin.py)

Several are separated by commas. Files are read in chunks; no line, document or file
is ever held whole beyond a fixed size. Odd bytes are repaired and counted, damaged
files are refused.
"""

import glob
import hashlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from bertjax import UserError
from bertjax.data.lines import (
    Counts,
    clean,
    decode,
    group,
    json_texts,
    paragraphs,
    text_lines,
)

CHUNK = 1 << 20  # bytes a read


class Document(NamedTuple):
    """One document: cleaned lines, none of them empty."""

    paragraphs: list[str]


class Source:
    """A thing that documents are read from.

    `name` is for people. Call `fingerprint` before `documents`: it also puts sources
    that are made (`builtin:docs`) in place.
    """

    name: str

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return a string that is another whenever the documents may be others."""
        raise NotImplementedError

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents in order; count them and every repair in `counts`.

        Raises UserError naming the file (and line) where it cannot be read, is
        damaged, or holds no document.
        """
        raise NotImplementedError


def _checked(
    name: str, groups: Iterator[list[str]], counter: Counter[str]
) -> Iterator[Document]:
    """Count documents, skip empty ones, and refuse a source that has none."""
    found = False
    for lines in groups:
        if not lines:
            counter["empty_documents"] += 1
            continue
        found = True
        counter["documents"] += 1
        counter["paragraphs"] += len(lines)
        yield Document(lines)
    if not found:
        raise UserError(f"{name}: holds no document, only blanks")


# Files


def _remote(path: str) -> Any:
    from etils import epath

    return epath.Path(path)


def _stat(path: str) -> tuple[int, int]:
    """Return (bytes, modification time in ns)."""
    if "://" in path:
        found = _remote(path).stat()
        return found.length, int(found.mtime * 1e9)
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _open(path: str) -> IO[bytes]:
    return _remote(path).open("rb") if "://" in path else open(path, "rb")


def _chunks(path: str) -> Iterator[bytes]:
    """Yield the (decompressed) bytes of a file; raise UserError where it is damaged."""
    try:
        with _open(path) as raw:
            if path.endswith(".gz"):
                import gzip

                with gzip.GzipFile(fileobj=raw) as unpacked:
                    while chunk := unpacked.read(CHUNK):
                        yield chunk
            elif path.endswith(".zst"):
                yield from _zstd_chunks(path, raw)
            else:
                while chunk := raw.read(CHUNK):
                    yield chunk
    except (EOFError, zlib.error) as err:
        raise UserError(f"{path}: damaged or truncated .gz file ({err})") from None
    except OSError as err:  # gzip.BadGzipFile has no errno
        if err.errno is None and path.endswith(".gz"):
            raise UserError(f"{path}: damaged or truncated .gz file ({err})") from None
        raise UserError(f"{path}: cannot be read ({err.strerror or err})") from None


def _zstd_chunks(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{path}: reading .zst needs zstandard (pip install zstandard)"
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
    """A file, local or behind a URL that etils.epath opens."""

    name: str

    @property
    def format(self) -> str:
        """Name how the bytes are read, e.g. "text.gz"; part of the fingerprint."""
        base, pack = self.name, ""
        if base.endswith((".gz", ".zst")):
            base, pack = os.path.splitext(base)
        return ("json" if base.endswith((".jsonl", ".json")) else "text") + pack

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return format and SHA-256 of the bytes.

        The hash is remembered in `cache_dir`/fingerprints.json under path, size and
        time of modification, so that big files are not read again at every start.
        """
        path = self.name if "://" in self.name else os.path.abspath(self.name)
        memory = Path(cache_dir) / "fingerprints.json"
        try:
            stamp = [*_stat(path)]
            known = _read_memory(memory)
            entry = known.get(path)
            if isinstance(entry, dict) and entry.get("stamp") == stamp:
                return f"{self.format}:{entry['sha256']}"
            digest = hashlib.sha256()
            with _open(path) as raw:
                while chunk := raw.read(CHUNK):
                    digest.update(chunk)
            changed = [*_stat(path)] != stamp
        except OSError as err:
            reason = err.strerror or err
            raise UserError(f"{self.name}: cannot be read ({reason})") from None
        if changed:
            raise UserError(f"{self.name}: the file changed while it was read")
        known = _read_memory(memory)
        known[path] = {"stamp": stamp, "sha256": digest.hexdigest()}
        part = memory.with_name(f"{memory.name}.{os.getpid()}.part")
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(known, indent=1, sort_keys=True))
            os.replace(part, memory)
        except OSError as err:
            reason = err.strerror or err
            raise UserError(
                f"data.cache={cache_dir}: cannot write ({reason})"
            ) from None
        return f"{self.format}:{digest.hexdigest()}"

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents of the file."""
        counter = counts.of(self.name)
        chunks = _chunks(self.name)
        if self.format.startswith("json"):
            texts = json_texts(self.name, chunks, max_line_bytes, counter)
            groups = map(paragraphs, texts)
        else:
            groups = group(text_lines(chunks, max_line_bytes, counter), counter)
        return _checked(self.name, groups, counter)


def _read_memory(path: Path) -> dict[str, Any]:
    """Read the remembered hashes; a damaged file only means hashing again."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


# Sources that are not files


_TFDS = re.compile(r"tfds:([^:\[\]]+)(?::(\d+\.\d+\.\d+))?:([^:].*)")


@dataclass
class TfdsSource(Source):
    """A data set that TensorFlow Datasets has on this machine; nothing is loaded."""

    name: str
    _builder: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_builder": None}

    def _open(self) -> tuple[Any, str]:
        found = _TFDS.fullmatch(self.name)
        if not found:
            raise UserError(
                f"{self.name}: written as tfds:name[/config][:version]:split"
            )
        data_set, version, split = found.groups()
        if self._builder is None:
            try:
                import tensorflow_datasets as tfds
            except ImportError as err:
                raise UserError(
                    f"{self.name}: needs tensorflow and tensorflow_datasets ({err})"
                ) from None
            full = f"{data_set}:{version}" if version else data_set
            try:
                builder = tfds.builder(full, try_gcs=False)
                builder.info.splits[split]
            except Exception as err:  # tfds raises errors of many kinds
                reason = " ".join(str(err).split())[:200]
                raise UserError(
                    f"{self.name}: not on this machine ({reason})"
                ) from None
            if "text" not in (builder.info.features or {}):
                raise UserError(f"{self.name}: its features have no `text`")
            self._builder = builder
        return self._builder, split

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return name, version, split and number of examples and bytes."""
        builder, split = self._open()
        info = builder.info
        size = info.splits[split].num_examples
        return f"tfds:{info.full_name}:{split}:{size}:{int(info.dataset_size)}"

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield one document an example, in the order of the files."""
        import tensorflow as tf
        import tensorflow_datasets as tfds

        tf.config.set_visible_devices([], "GPU")  # the accelerator is jax's
        builder, split = self._open()
        counter = counts.of(self.name)
        decoders = tfds.decode.PartialDecoding({"text": True})
        data = builder.as_dataset(split=split, shuffle_files=False, decoders=decoders)
        texts = (
            clean(decode(e["text"], counter), counter) for e in tfds.as_numpy(data)
        )
        return _checked(self.name, map(paragraphs, texts), counter)


@dataclass
class BuiltinSource(Source):
    """One side ("train" or "valid") of the embedded corpus."""

    name: str
    side: str
    path: str = ""  # known once it has been put in place

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Put the corpus in `cache_dir` unless it is there; return its hash."""
        from bertjax.data import builtin

        made = builtin.materialise(cache_dir, say)
        self.path = made[self.side]
        return f"builtin:{self.side}:{made['hash']}"

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents of this side."""
        if not self.path:
            raise RuntimeError("fingerprint(cache_dir) has to come before documents()")
        return FileSource(self.path).documents(counts, max_line_bytes)


# Strings -> sources


def split_sources(text: str) -> list[str]:
    """Split a comma-separated list.

    >>> split_sources("a.txt, b/*.txt.gz,tfds:wiki40b/en:train[:1%]")
    ['a.txt', 'b/*.txt.gz', 'tfds:wiki40b/en:train[:1%]']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_sources(value: str, key: str, role: str) -> list[Source]:
    """Turn a config value into sources, patterns expanded in sorted order.

    `key` is the config key that messages name; `role` ("train" or "valid") is the side
    of `builtin:docs` where the string names none. Raises UserError for an empty
    value, a missing or empty file, a directory, a pattern that matches nothing.
    """
    sources: list[Source] = []
    for entry in split_sources(value):
        if entry.startswith("builtin:"):
            sides = {"builtin:docs": role, "builtin:docs:train": "train"}
            sides["builtin:docs:valid"] = "valid"
            if entry not in sides:
                raise UserError(f"{key}={entry}: known: {', '.join(sides)}")
            sources.append(BuiltinSource(entry, sides[entry]))
        elif entry.startswith("tfds:"):
            if not _TFDS.fullmatch(entry):
                raise UserError(
                    f"{key}={entry}: written as tfds:name[/config][:version]:split"
                )
            sources.append(TfdsSource(entry))
        else:
            sources += [FileSource(p) for p in _expand(os.path.expanduser(entry), key)]
    if not sources:
        raise UserError(f"{key}: names no text")
    return sources


def _expand(entry: str, key: str) -> list[str]:
    """Return the files that a path or pattern names, each looked at."""
    try:
        if "://" in entry:
            if glob.has_magic(entry):
                head = entry[: re.search(r"[*?\[]", entry).start()].rpartition("/")[0]
                found = _remote(head).glob(entry[len(head) + 1 :])
                paths = sorted(os.fspath(p) for p in found if not p.is_dir())
            else:
                paths = [entry]
        elif glob.has_magic(entry) and not os.path.exists(entry):
            found = glob.glob(entry, recursive=True)
            paths = sorted(p for p in found if not os.path.isdir(p))
        else:
            paths = [entry]
        if not paths:
            raise UserError(f"{key}={entry}: no file matches")
        for path in paths:
            is_dir = _remote(path).is_dir() if "://" in path else os.path.isdir(path)
            if is_dir:
                raise UserError(f"{key}={path}: a directory; write {path}/*.txt")
            if _stat(path)[0] == 0:
                raise UserError(f"{key}={path}: the file is empty")
            if "://" not in path and not os.access(path, os.R_OK):
                raise UserError(f"{key}={path}: no permission to read the file")
    except FileNotFoundError:
        raise UserError(f"{key}={entry}: there is no such file") from None
    except (OSError, ImportError) as err:
        reason = getattr(err, "strerror", None) or err
        raise UserError(f"{key}={entry}: cannot be read ({reason})") from None
    return paths


def named_sources(value: str, key: str = "data.valid") -> dict[str, str]:
    """Split a value that may give names to its parts; unnamed is `valid`.

    >>> named_sources("wiki=a.txt,b.txt,novels=c.txt")
    {'wiki': 'a.txt,b.txt', 'novels': 'c.txt'}
    >>> named_sources("a.txt,b.txt")
    {'valid': 'a.txt,b.txt'}
    """
    parts: dict[str, list[str]] = {}
    name = ""
    for entry in split_sources(value):
        found = re.match(r"([A-Za-z][\w.-]*)=", entry)
        if found:
            if parts and not name:
                raise UserError(f"{key}: {entry!r} has a name, the entries before not")
            name = found[1]
            if name in parts:
                raise UserError(f"{key}: the name {name!r} is given twice")
            entry = entry[found.end() :].strip()
            if not entry:
                raise UserError(f"{key}: {name!r} names no text")
        parts.setdefault(name or "valid", []).append(entry)
    return {name: ",".join(entries) for name, entries in parts.items()}

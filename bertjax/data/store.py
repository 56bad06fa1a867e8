# SPDX-License-Identifier: Apache-2.0
"""The token store: a corpus as flat arrays of ids, mapped into memory.

<cache>/store-<label>-<key>/
  tokens.bin     u16 (u32 for vocabularies over 65,536) [n], no special tokens
  sentences.bin  i64 [S+1], offsets into tokens, first 0, last n
  documents.bin  i64 [D+1], offsets into sentences, first 0, last S
  counts.bin     i64 [V], how often each id occurs
  meta.json      what it was made of, sizes, a sha256 a file
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data import directories, encoding, sentences
from bertjax.data.lines import CLEANING, Counts
from bertjax.data.progress import Progress
from bertjax.data.sources import Document, Source
from bertjax.data.tokenizers import Tokenizer

FORMAT = 1
# A smaller store is checked against its checksums at every start, in a moment.
VERIFIED = 1 << 28  # bytes
FILES = ("tokens.bin", "sentences.bin", "documents.bin", "counts.bin")


class Store:
    """A finished store; `open_store` and `build_store` make it."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.content_hash: str = meta["content_hash"]

    def _map(self, name: str, dtype: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype=dtype, mode="r")

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids, u16 or u32 [n]."""
        return self._map("tokens.bin", self.meta["dtype"])

    @cached_property
    def sentences(self) -> np.ndarray:
        """Token offsets of the sentences, i64 [S+1]."""
        return self._map("sentences.bin", "<i8")

    @cached_property
    def documents(self) -> np.ndarray:
        """Sentence offsets of the documents, i64 [D+1]."""
        return self._map("documents.bin", "<i8")

    @property
    def nbytes(self) -> int:
        """The size of its files together."""
        return sum(self.meta["files"][name]["bytes"] for name in FILES)

    @cached_property
    def counts(self) -> np.ndarray:
        """How often each id occurs, i64 [V]."""
        return self._map("counts.bin", "<i8")

    def lines(self) -> list[str]:
        """Say what is in the store and what was repaired on the way into it."""
        m = self.meta
        share = m["unknowns"] / m["tokens"]
        lines = [
            f"{m['label']}: {m['tokens']:,} tokens, {m['sentences']:,} sentences, "
            f"{m['documents']:,} documents, {share:.2%} unknown tokens ({self.path})"
        ]
        lines += Counts(m["repairs"]).lines()
        for key, what in (
            ("empty_sentences", "sentences gave no token and were left out"),
            ("empty_documents", "documents gave no token and were left out"),
        ):
            lines += [f"{m[key]} {what} ({m['label']})"] if m[key] else []
        return lines


def build_store(
    sources: list[Source],
    tokenizer: Tokenizer,
    cache: str | os.PathLike[str],
    *,
    max_line_bytes: int,
    workers: int | None = None,
    say: Callable[[str], None] = print,
    label: str = "train",
) -> Store:
    """Tokenise sources into a store under `cache`, or reuse the one that is there.

    The result does not depend on `workers` (None: all cores), bit for bit. Memory is
    bounded. What is found and repaired goes to `say`, also when a store is reused.

    Raises:
      UserError: unreadable or empty sources, a full disk, a damaged store.
    """
    root = directories.check_cache(cache)
    fingerprints = [s.fingerprint(os.fspath(root), say) for s in sources]
    settings = {
        "format": FORMAT,
        "fingerprints": fingerprints,
        "tokenizer": tokenizer.identity,
        "sentence_rule": sentences.RULE,
        "cleaning": CLEANING,
        "max_line_bytes": max_line_bytes,
    }
    told = json.dumps(settings, sort_keys=True)
    key = hashlib.sha256(told.encode()).hexdigest()
    target = root / f"store-{label}-{key[:16]}"
    if not target.exists():
        writer = _Writer(sources, tokenizer, max_line_bytes, label, workers)
        meta = {"label": label, "key": key, **settings}
        meta["sources"] = [s.name for s in sources]
        directories.make_whole(target, lambda path: writer.write(path, meta))
    store = open_store(target)
    if store.nbytes <= VERIFIED:
        verify(store)
    for line in store.lines():
        say(line)
    return store


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store; read nothing but meta.json.

    Raises:
      UserError: there is none, it is of a later format, or a file has another size
        than was written.
    """
    path = Path(path)
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        version, files = int(meta["format"]), dict(meta["files"])
    except FileNotFoundError:
        raise UserError(f"{path} is not a token store: no meta.json") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(path, "meta.json", "cannot be read") from None
    if version > FORMAT:
        raise UserError(f"{path} was written by a later version (format {version})")
    if not set(FILES) <= files.keys() or "content_hash" not in meta:
        raise _damaged(path, "meta.json", "cannot be read")
    for name in FILES:
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise _damaged(path, name, "is missing") from None
        if size != files[name]["bytes"]:
            why = f"holds {size} bytes, not {files[name]['bytes']}"
            raise _damaged(path, name, why)
    return Store(path, meta)


def verify(store: Store) -> None:
    """Read a whole store and compare its checksums; UserError names a damaged file."""
    for name in FILES:
        with open(store.path / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != store.meta["files"][name]["sha256"]:
            raise _damaged(store.path, name, "has another checksum than was written")


def _damaged(path: Path, name: str, why: str) -> UserError:
    return UserError(
        f"{path / name} {why}: the token store is damaged; "
        f"delete the directory {path} and it will be made again"
    )


class _Hashed:
    """A file being written, with its size and sha256."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.dtype = dtype
        self.digest = hashlib.sha256()

    def write(self, values: np.ndarray | list[int]) -> None:
        data = np.asarray(values, dtype=self.dtype).tobytes()
        self.digest.update(data)
        self.file.write(data)

    def finish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        return {"bytes": self.file.tell(), "sha256": self.digest.hexdigest()}

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


class _Writer:
    """Writes one store."""

    def __init__(
        self,
        sources: list[Source],
        tokenizer: Tokenizer,
        max_line_bytes: int,
        label: str,
        workers: int | None,
    ) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.max_line_bytes = max_line_bytes
        self.label = label
        self.workers = workers or available_cores()
        self.repairs = Counts()

    def write(self, path: Path, meta: dict[str, Any]) -> None:
        dtype = encoding.token_dtype(self.tokenizer.vocab_size)
        types = dict(zip(FILES, (dtype, "<i8", "<i8", "<i8"), strict=True))
        with contextlib.ExitStack() as stack:
            out = {
                n: stack.enter_context(_Hashed(path / n, t)) for n, t in types.items()
            }
            told = self.stream(out)
            files = {name: file.finish() for name, file in out.items()}
        content = {n: f["sha256"] for n, f in files.items()}
        content |= {"dtype": dtype, "tokenizer": self.tokenizer.identity}
        content_hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        meta = {
            **meta,
            **told,
            "dtype": dtype,
            "repairs": self.repairs.as_dict(),
            "files": files,
            "content_hash": content_hash.hexdigest(),
        }
        with open(path / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def stream(self, out: dict[str, "_Hashed"]) -> dict[str, int]:
        """Write tokens and offsets as they come; return what was counted."""
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        tokens = sentences_done = documents = empty_sentences = empty_documents = 0
        unfinished = -1  # sentences of the document at hand; -1: none has begun
        out["sentences.bin"].write([0])
        out["documents.bin"].write([0])
        total = text_bytes(self.sources)
        encoded = encoding.encode_documents(self.read(), self.tokenizer, self.workers)
        with (
            contextlib.closing(encoded),
            Progress(f"prepare {self.label}", total and total / 1e6, "MB") as progress,
        ):
            for block in encoded:
                counts += np.bincount(block.tokens, minlength=len(counts))
                out["tokens.bin"].write(block.tokens)
                out["sentences.bin"].write(tokens + np.cumsum(block.lengths))
                tokens += len(block.tokens)
                empty_sentences += block.empty
                ends = []
                for begins, more in zip(block.begins, block.sentences, strict=True):
                    if begins:
                        ends += [sentences_done] if unfinished > 0 else []
                        empty_documents += unfinished == 0
                        unfinished = 0
                    unfinished += more
                    sentences_done += more
                out["documents.bin"].write(ends)
                documents += len(ends)
                progress.add(block.characters / 1e6)
        if not tokens:
            names = ", ".join(s.name for s in self.sources)
            raise UserError(f"{names}: no document holds a token")
        if unfinished > 0:
            out["documents.bin"].write([sentences_done])
            documents += 1
        empty_documents += unfinished == 0
        out["counts.bin"].write(counts)
        return {
            "tokens": tokens,
            "sentences": sentences_done,
            "documents": documents,
            "unknowns": int(counts[self.tokenizer.unk_id]),
            "empty_sentences": empty_sentences,
            "empty_documents": empty_documents,
        }

    def read(self) -> Iterator[Document]:
        for source in self.sources:
            yield from source.documents(self.repairs, self.max_line_bytes)


def available_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def text_bytes(sources: list[Source]) -> int | None:
    """Estimate the bytes of text, or None; only the progress bar needs it."""
    total = 0
    for source in sources:
        path = getattr(source, "path", "") or source.name
        try:
            size = os.path.getsize(path)
            if path.endswith(".gz"):
                # A gzip file ends with the size of its text modulo 2**32.
                with open(path, "rb") as file:
                    file.seek(-4, os.SEEK_END)
                    text = int.from_bytes(file.read(4), "little")
                size = max(size, text)
        except OSError:
            return None
        if path.endswith(".zst"):
            return None
        total += size
    return total

# SPDX-License-Identifier: Apache-2.0
"""The token store: a corpus as flat arrays of ids, mapped into memory.

<cache>/store-<label>-<key>/
  tokens.bin     u16 (u32 for vocabularies over 65,536) [n], no special tokens
  sentences.bin  i64 [S+1], offsets into tokens, first 0, last n
  documents.bin  i64 [D+1], offsets into sentences, first 0, last S
  counts.bin     i64 [V], how often each id occurs
  marks.bin      u8 [n], only if a marker was used (format 2): words, entities, concepts
  streams.json, <name>.bin  only if there are streams (format 3): streams.py
  meta.json      inputs and settings of the store, sizes, one sha256 per file
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from bertjax import UserError, counted
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.token_store.encoding import Encoded, token_dtype
from bertjax.data.token_store.streams import Stream
from bertjax.data.tokenizers.tokenizer import STREAMS, Tokenizer

# A store without streams has format 2, and one without marks too has format 1, so that
# older versions can read it.
FORMAT = 3
# Checksums of smaller stores are verified at every start, which takes a moment.
VERIFIED = 1 << 28  # bytes
FILES = ("tokens.bin", "sentences.bin", "documents.bin", "counts.bin")
MARKS = "marks.bin"
SINGLE = 0.5  # a larger share of documents with a single sentence is reported
LOOKED_AT = 1 << 20  # documents that this share is computed on


class AlignedIds(NamedTuple):
    """A stream: its kind, "token" or "sentence", and ids, u16 or u32 [n] or [S]."""

    kind: str
    ids: np.ndarray


class Store:
    """A finished store; `open_store` creates it. Its arrays are memory maps.

    Attributes:
      tokens: all ids, u16 or u32 [n].
      sentences: token offsets of the sentences, i64 [S+1].
      documents: sentence offsets of the documents, i64 [D+1].
      counts: how often each id occurs, i64 [V].
      marks: bits of each token, u8 [n], or None. 1: begins a word, 2: part of an
        entity, 4: begins an entity, 16 and 32: part of a word of data.concept or of
        data.control (token_flags.py).
      nbytes: the size of all its files.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        def load(name: str, dtype: str) -> np.ndarray:
            return np.memmap(path / name, dtype=dtype, mode="r")

        self.path, self.meta = path, meta
        self.content_hash: str = meta["content_hash"]
        self.tokens = load("tokens.bin", meta["dtype"])
        self.sentences = load("sentences.bin", "<i8")
        self.documents = load("documents.bin", "<i8")
        self.counts = load("counts.bin", "<i8")
        self.marks = load(MARKS, "u1") if MARKS in meta["files"] else None
        self.nbytes = sum(file["bytes"] for file in meta["files"].values())

    @property
    def unknown_share(self) -> float:
        """The share of tokens that are the unknown token."""
        return self.meta["unknowns"] / self.meta["tokens"]

    @functools.cached_property
    def streams(self) -> dict[str, AlignedIds]:
        """Ids aligned with tokens or sentences, by name."""
        if STREAMS not in self.meta["files"]:
            return {}
        about = json.loads((self.path / STREAMS).read_text("utf-8"))
        return {
            name: AlignedIds(
                one["kind"], np.memmap(self.path / f"{name}.bin", one["dtype"], "r")
            )
            for name, one in about.items()
        }

    def lines(self, title: str) -> list[str]:
        """Return lines that report the contents of the store and the repairs made."""
        m = self.meta
        lines = [
            f"{title}: {counted(m['tokens'], 'token')}, "
            f"{counted(m['sentences'], 'sentence')}, "
            f"{counted(m['documents'], 'document')}, "
            f"{self.unknown_share:.2%} unknown tokens ({self.path})"
        ]
        lines += Counts(m["repairs"]).lines()
        plain = any(text.startswith("text") for text in m["fingerprints"])
        if plain and m["sentence_rule"]:
            single = np.mean(np.diff(self.documents[:LOOKED_AT]) == 1)
            if single > SINGLE:
                lines.append(
                    f"{title}: {single:.0%} of the documents are a single sentence, "
                    "of which data.plan=pairs makes no pair; a blank line ends a "
                    "document"
                )
        for what in ("sentence", "document"):
            if empty := m[f"empty_{what}s"]:
                line = f"{counted(empty, what)} without a token, left out ({title})"
                lines.append(line)
        return lines


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store; only meta.json is read.

    Raises UserError if there is none, if it has a later format, or if the size of a
    file is not the size that was written.
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
    for name, expected in files.items():
        if not (path / name).is_file():
            raise _damaged(path, name, "is missing")
        if (size := (path / name).stat().st_size) != expected["bytes"]:
            why = f"holds {size} bytes, not {expected['bytes']}"
            raise _damaged(path, name, why)
    return Store(path, meta)


def verify(store: Store) -> None:
    """Read a whole store and compare its checksums; UserError names a damaged file."""
    if name := differing(store.path, store.meta["files"]):
        raise _damaged(store.path, name, "has another checksum than was written")


def differing(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the first file whose sha256 differs from meta.json, or None."""
    for name, expected in files.items():
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return name
    return None


def _damaged(path: Path, name: str, why: str) -> UserError:
    return UserError(
        f"{path / name} {why}: the token store is damaged; "
        f"delete the directory {path} and it will be made again"
    )


class Hashed:
    """A file being written, with its size and sha256; see `hashed_files`."""

    def __init__(self, file: IO[bytes], dtype: str) -> None:
        self.file, self.dtype, self.digest = file, dtype, hashlib.sha256()

    def write(self, values: np.ndarray | list[int]) -> None:
        data = np.asarray(values, dtype=self.dtype).tobytes()
        self.digest.update(data)
        self.file.write(data)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.file.tell(), "sha256": self.digest.hexdigest()}


@contextlib.contextmanager
def hashed_files(path: Path, types: Mapping[str, str]) -> Iterator[dict[str, Hashed]]:
    """Open one file per name, with its dtype, for writing in a directory."""
    with contextlib.ExitStack() as stack:
        yield {
            name: Hashed(stack.enter_context(open(path / name, "wb")), dtype)
            for name, dtype in types.items()
        }


def hash_json(value: Any) -> str:
    """Return the sha256 of a value's JSON, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, the last file of a directory."""
    (path / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")


def write_store(
    path: Path,
    blocks: Iterable[Encoded],
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    streams: Mapping[str, Stream] = MappingProxyType({}),
) -> int:
    """Write the store of one component into a directory; return its number of tokens.

    Args:
      path: an empty directory.
      blocks: encoded blocks of one group, in order; with marks if meta has "marks".
      meta: the contents of meta.json besides sizes and checksums.
      streams: those of the blocks.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    types = dict(zip(FILES, (dtype, "<i8", "<i8", "<i8"), strict=True))
    if meta.get("marks"):
        types[MARKS] = "u1"
    types |= {f"{name}.bin": stream.dtype for name, stream in streams.items()}
    types |= {STREAMS: "u1"} if streams else {}
    with hashed_files(path, types) as out:
        if streams:
            about = {name: stream.facts for name, stream in streams.items()}
            out[STREAMS].write([*json.dumps(about, indent=1).encode()])
        sizes = _stream(blocks, out, tokenizer)
        files = {name: file.facts() for name, file in out.items()}
    content = {n: f["sha256"] for n, f in files.items()}
    content |= {"dtype": dtype, "tokenizer": tokenizer.identity}
    more = {"dtype": dtype, "files": files, "content_hash": hash_json(content)}
    write_meta(path, {**meta, **sizes, **more})
    return sizes["tokens"]


def _stream(
    blocks: Iterable[Encoded], out: dict[str, Hashed], tokenizer: Tokenizer
) -> dict[str, int]:
    """Write tokens and offsets as they come; return the counts."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    tokens = sentences = documents = empty_sentences = empty_documents = 0
    unfinished = -1  # sentences of the current document; -1: none has begun
    out["sentences.bin"].write([0])
    out["documents.bin"].write([0])
    for block in blocks:
        counts += np.bincount(block.tokens, minlength=len(counts))
        out["tokens.bin"].write(block.tokens)
        out["sentences.bin"].write(tokens + np.cumsum(block.lengths))
        if MARKS in out:
            out[MARKS].write(block.marks)
        for name, ids in block.streams.items():
            out[f"{name}.bin"].write(ids)
        tokens += len(block.tokens)
        empty_sentences += block.empty
        ends = []
        for begins, more in zip(block.begins, block.sentences, strict=True):
            if begins:
                ends += [sentences] if unfinished > 0 else []
                empty_documents += unfinished == 0
                unfinished = 0
            unfinished += more
            sentences += more
        out["documents.bin"].write(ends)
        documents += len(ends)
    if unfinished > 0:
        out["documents.bin"].write([sentences])
        documents += 1
    empty_documents += unfinished == 0
    out["counts.bin"].write(counts)
    return {
        "tokens": tokens,
        "sentences": sentences,
        "documents": documents,
        "unknowns": int(counts[tokenizer.unk_id]),
        "empty_sentences": empty_sentences,
        "empty_documents": empty_documents,
    }

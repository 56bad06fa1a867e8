# SPDX-License-Identifier: Apache-2.0
"""Text in independent pieces: any process, shard or machine can encode any of them.

<cache>/parts-<label>-<key>-<layout>/<number>/  one piece; kept until all are merged
  blocks.bin     i64 [B, 6]: group, tokens, sentences, parts, empty, characters
  tokens.bin     u16 or u32 [n]
  lengths.bin    u32 [S], tokens of each sentence
  documents.bin  i64 [P]: 2 x sentences of a part of a document + whether it begins one
  marks.bin      u8 [n], if a marker was used
  <name>.bin     ids of a stream, if there are streams (streams.py)
  meta.json      names of the groups, repairs, sizes, one sha256 per file

The arrays are encoded blocks in order, as encoding.py returns them. The documents of a
piece depend on the files and PIECE_BYTES alone; <layout> distinguishes other ways to
cut the same text.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, counted, join_names
from bertjax.data.corpus.documents import Source
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.progress import Progress
from bertjax.data.token_store.cache import Cache
from bertjax.data.token_store.encoding import (
    BLOCK,
    SMALL,
    Encoded,
    Encoder,
    broken_pool,
    report_to_parent,
)
from bertjax.data.token_store.store import (
    MARKS,
    differing,
    hashed_files,
    token_dtype,
    write_meta,
)
from bertjax.data.token_store.streams import StreamError, check_kinds
from bertjax.data.tokenizers.backends import TextError
from bertjax.data.tokenizers.stream_vocab import SENTENCE
from bertjax.storage import directories

PIECE_BYTES = 1 << 26
PARTS = "parts-"
STALE = 30 * 86_400.0  # seconds


class Piece(NamedTuple):
    """Sources that are encoded together; it can be sent to another machine.

    label, number, of: the component, the number of the piece in it and how many there
    are; bytes: approximate size, None: unknown; target: its directory in the cache;
    store: the directory whose existence makes the piece unnecessary.
    """

    label: str
    number: int
    of: int
    sources: list[Source]
    max_line_bytes: int
    bytes: int | None
    target: str
    store: str

    def __str__(self) -> str:
        names = join_names([source.name for source in self.sources], 1)
        return f"{self.label} piece {self.number} of {self.of} ({names})"


def cut(
    sources: Iterable[Source], piece_bytes: int = PIECE_BYTES
) -> list[tuple[list[Source], int | None]]:
    """Cut sources into pieces of about `piece_bytes`.

    Large sources are split, small ones are combined. Returns (sources, bytes) of each
    piece, in order.
    """
    pieces: list[tuple[list[Source], int | None]] = []
    for source in sources:
        for part in source.split(piece_bytes):
            size = text_bytes([part])
            before = pieces[-1][1] if pieces else None
            if size is None or before is None or before + size > piece_bytes:
                pieces.append(([part], size))
            else:
                pieces[-1] = ([*pieces[-1][0], part], before + size)
    return pieces


def text_bytes(sources: Iterable[Source]) -> int | None:
    """Estimate the bytes of text without reading it, or return None if unknown."""
    sizes = [source.text_bytes() for source in sources]
    return None if None in sizes else sum(filter(None, sizes))


def encode_piece(
    encoder: Encoder,
    piece: Piece,
    cache: Cache,
    report: Callable[[float], None] = report_to_parent,
) -> None:
    """Encode a piece into its directory in the cache, unless it is unnecessary.

    Raises UserError for unreadable sources and full disks; then nothing is left there.
    """
    if cache.has(piece.target) or cache.has(piece.store):
        return
    try:
        cache.make(
            piece.target, lambda path: _write(path, encoder, piece, report), keep=False
        )
    except Exception:
        with contextlib.suppress(OSError):  # the directory may hold other pieces
            (cache.root / piece.target).parent.rmdir()
        # Another process may have finished the store and removed the parts meanwhile.
        if not cache.has(piece.store):
            raise


def file_types(
    dtype: str, has_marks: bool, streams: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the dtypes of a piece's files except blocks.bin; streams: kind, dtype."""
    types = {"tokens.bin": dtype, "lengths.bin": "<u4", "documents.bin": "<i8"}
    types |= {MARKS: "u1"} if has_marks else {}
    return types | {f"{name}.bin": own for name, (_, own) in streams.items()}


def _write(
    path: Path, encoder: Encoder, piece: Piece, report: Callable[[float], None]
) -> None:
    repairs = Counts(read=report)
    documents = (
        document
        for source in piece.sources
        for document in source.documents(repairs, piece.max_line_bytes)
    )
    dtype = token_dtype(encoder.tokenizer.vocab_size)
    streams = {name: [s.kind, s.dtype] for name, s in encoder.streams.items()}
    types = file_types(dtype, encoder.marker is not None, streams)
    groups: dict[str, int] = {}
    with (
        hashed_files(path, {"blocks.bin": "<i8", **types}) as out,
        contextlib.closing(encoder.documents(documents)) as encoded,
    ):
        for block in _located(encoded, encoder, piece):
            group = groups.setdefault(block.group, len(groups))
            parts = np.array(block.sentences, np.int64) * 2 + np.array(block.begins)
            sizes = (len(block.tokens), len(block.lengths), len(parts))
            out["blocks.bin"].write([group, *sizes, block.empty, block.characters])
            out["tokens.bin"].write(block.tokens)
            out["lengths.bin"].write(block.lengths)
            out["documents.bin"].write(parts)
            if MARKS in out:
                out[MARKS].write(block.marks)
            for name, ids in block.streams.items():
                out[f"{name}.bin"].write(ids)
        files = {name: file.facts() for name, file in out.items()}
    for source in piece.sources:
        source.refuse_changed()
    meta = {"piece": str(piece), "groups": list(groups), "dtype": dtype}
    meta |= {"streams": streams} if streams else {}
    write_meta(path, {**meta, "files": files, "repairs": repairs.as_dict()})


def _located(
    encoded: Iterable[Encoded], encoder: Encoder, piece: Piece
) -> Iterator[Encoded]:
    """Pass blocks on; name the file and line if the tokenizer refuses a text, or if
    values are of another kind than their stream."""
    try:
        yield from encoded
    except StreamError as error:
        for source in piece.sources:
            for document in source.documents(Counts(), piece.max_line_bytes):
                try:
                    check_kinds(encoder.streams, document.values or ())
                except StreamError as refused:
                    first = document.paragraphs[0]
                    where = source.locate(first, piece.max_line_bytes)
                    raise UserError(f"{where}: {refused}") from None
        raise UserError(f"{piece}: {error}") from None
    except TextError as error:
        for source in piece.sources:
            for document in source.documents(Counts(), piece.max_line_bytes):
                for paragraph in document.paragraphs:
                    try:
                        encoder.tokenizer.encode(paragraph)
                    except TextError as refused:
                        where = source.locate(paragraph, piece.max_line_bytes)
                        raise UserError(f"{where}: {refused}") from None
        raise UserError(f"{piece}: {error}") from None


def read_meta(path: Path) -> dict[str, Any] | None:
    """Read the meta.json of an encoded piece and compare every checksum.

    Returns None if anything is missing or damaged.
    """
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        return None if differing(path, meta["files"]) else meta
    except (OSError, ValueError, KeyError, TypeError):
        return None


class EncodedPiece:
    """A finished encoded piece: its meta.json, and the places of the blocks of each of
    its groups, of which a text may have thousands."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path, self.meta = path, meta
        rows = np.fromfile(path / "blocks.bin", "<i8").reshape(-1, 6)
        # The numbers of tokens, sentences and parts of documents before each block.
        before = np.cumsum(rows[:, 1:4], axis=0) - rows[:, 1:4]
        self._places = np.concatenate([rows[:, 1:], before], axis=1)
        self._order = np.argsort(rows[:, 0], kind="stable")
        ends = np.cumsum(np.bincount(rows[:, 0], minlength=len(meta["groups"])))
        edges = zip([0, *ends.tolist()], ends.tolist(), strict=False)
        self._of = dict(zip(meta["groups"], edges, strict=True))

    def blocks(self, group: str) -> Iterator[Encoded]:
        """Yield the encoded blocks of a group, in order."""
        if group not in self._of:
            return
        first, last = self._of[group]
        meta = self.meta
        streams = meta.get("streams", {})
        types = file_types(meta["dtype"], MARKS in meta["files"], streams)
        counted_by = dict.fromkeys(types, 0) | {"lengths.bin": 1, "documents.bin": 2}
        for name, (kind, _) in streams.items():
            counted_by[f"{name}.bin"] = 1 if kind == SENTENCE else 0
        with contextlib.ExitStack() as stack:
            files = {n: stack.enter_context(open(self.path / n, "rb")) for n in types}
            for place in self._places[self._order[first:last]].tolist():
                sizes, before = place[:3], place[5:]
                empty, characters = place[3:5]
                read = {}
                for name, file in files.items():
                    unit = counted_by[name]
                    file.seek(before[unit] * np.dtype(types[name]).itemsize)
                    read[name] = np.fromfile(file, types[name], sizes[unit])
                starts = read["documents.bin"]
                yield Encoded(
                    read["tokens.bin"],
                    read["lengths.bin"],
                    sentences=(starts >> 1).tolist(),
                    begins=(starts & 1).astype(bool).tolist(),
                    empty=empty,
                    characters=characters,
                    group=group,
                    marks=read.get(MARKS),
                    streams={name: read[f"{name}.bin"] for name in streams},
                )


def remove_stale(cache: Cache, keep: set[str], say: Callable[[str], None]) -> None:
    """Remove the pieces of texts that have changed since.

    These are directories that no process touched for STALE seconds, except `keep`. Only
    this machine's disk is searched; a bucket has its own rules for old files.
    """
    number = 0
    for path in sorted(cache.root.glob(f"{PARTS}*")):
        try:
            touched = max(p.stat().st_mtime for p in (path, *path.iterdir()))
        except OSError:  # another process is removing it
            continue
        if path.name not in keep and time.time() - touched > STALE:
            directories.remove(path)
            number += 1
    if number:
        say(
            f"{cache.root}: removed the unfinished pieces of "
            f"{counted(number, 'text')} that nobody went on with for "
            f"{STALE / 86_400:.0f} days"
        )


def encode_pieces(encoder: Encoder, pieces: Iterable[Piece], cache: Cache) -> None:
    """Encode the pieces that the cache lacks, on all of the encoder's workers.

    A piece that would keep one worker busy after the others are done (one big .gz) is
    spread over all workers, block by block; each other piece is encoded by one worker.
    """
    todo = [p for p in pieces if not cache.has(p.target) and not cache.has(p.store)]
    todo.sort(key=lambda p: -math.inf if p.bytes is None else -p.bytes)
    sizes = [p.bytes for p in todo]
    left = sum(filter(None, sizes))
    total = None if None in sizes else left / 1e6
    title = "prepare " + ", ".join(dict.fromkeys(p.label for p in todo))
    alone = encoder.workers == 1 or (total is not None and left <= SMALL * BLOCK)
    with Progress(title[:40], total, "MB") as progress, broken_pool():
        pending: set[Future[None]] = set()
        for number, piece in enumerate(todo):
            size = piece.bytes
            if not alone and size is not None and 2 * encoder.workers * size <= left:
                pending = {
                    encoder.submit(encode_piece, p, cache) for p in todo[number:]
                }
                break
            before = progress.done
            progress.name(f"prepare {piece.label} {number + 1}/{len(todo)}")
            encode_piece(encoder, piece, cache, progress.add)
            if size is not None:
                left -= size
                progress.add(size / 1e6 - (progress.done - before))
        before = progress.done
        while pending:
            progress.name(f"prepare {len(todo) - len(pending)}/{len(todo)} pieces")
            for future in wait(pending, 1.0, FIRST_COMPLETED).done:
                future.result()
                pending.remove(future)
            progress.add(before + encoder.done() - progress.done)

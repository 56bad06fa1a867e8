# SPDX-License-Identifier: Apache-2.0
"""Components of a text: named sources that become one token store each.

With data.group_field a component is <cache>/groups-<label>-<key>/, a directory of
stores, one per value of the field, and a meta.json that names them.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from bertjax import UserError, join_names
from bertjax.data.corpus import sentences
from bertjax.data.corpus.documents import Source, refuse_empty
from bertjax.data.corpus.line_repair import CLEANING, Counts
from bertjax.data.progress import Progress
from bertjax.data.token_store import pieces
from bertjax.data.token_store.cache import Cache
from bertjax.data.token_store.encoding import Encoded, Encoder
from bertjax.data.token_store.pieces import EncodedPiece, Piece, encode_pieces
from bertjax.data.token_store.store import (
    FORMAT,
    VERIFIED,
    Store,
    hash_json,
    open_store,
    verify,
    write_meta,
    write_store,
)
from bertjax.data.tokenizers.backends import SPACE_FIRST

ATTEMPTS = 3  # retries for a component whose pieces turn out to be damaged


def title(role: str, name: str) -> str:
    """Name a store for people; training and validation text may share names.

    >>> title("train", "en"), title("valid", "valid")
    ('train en', 'valid')
    """
    return name if role in ("", name) else f"{role} {name}"


def full_name(role: str, label: str, group: str) -> str:
    """Name a store by its component, its group, or both; without these, by its role.

    >>> full_name("train", "web", "en"), full_name("train", "train", "en")
    ('web.en', 'en')
    """
    if label == role:
        return group or role
    return f"{label}.{group}" if group else label


class Component:
    """Sources with one name, and the places of their stores and pieces in the cache.

    Args:
      label: its name.
      sources: its text; the constructor computes their fingerprints.
      encoder: holds the tokenizer and marker that encode it.
      data: holds the config values data.max_line_bytes and data.group_field.
      role: "train" or "valid", for people.
    """

    def __init__(
        self,
        label: str,
        sources: list[Source],
        encoder: Encoder,
        cache: Cache,
        data: Any,
        role: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self.label = label
        self.role = role
        self.sources = sources
        self.grouped = bool(data.group_field)
        self.max_line_bytes = data.max_line_bytes
        root = os.fspath(cache.root)
        tokenizer, marker = encoder.tokenizer, encoder.marker
        settings = {
            "format": FORMAT if encoder.streams else 1 if marker is None else 2,
            "fingerprints": [s.fingerprint(root, say) for s in sources],
            "tokenizer": tokenizer.identity,
            "sentence_rule": sentences.RULE if tokenizer.has_sentences else "",
            "cleaning": CLEANING,
            "max_line_bytes": data.max_line_bytes,
        }
        where_needed = {
            "joins": int(tokenizer.kind in SPACE_FIRST),
            "marks": marker and marker.identity,
            "streams": {n: s.identity for n, s in encoder.streams.items()},
            "group_field": data.group_field,
            "cuts": sorted({s.cut_rule() for s in sources} - {""}),
        }
        settings |= {name: value for name, value in where_needed.items() if value}
        key = hash_json(settings)
        names = [s.name for s in sources]
        self.meta = {"label": label, "key": key, **settings, "sources": names}
        self._name = re.sub(r"[^\w.-]", "_", label) + f"-{key[:16]}"
        self.target = ("groups-" if self.grouped else "store-") + self._name

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces that it is cut into; other cuts have other directories."""
        cut = pieces.cut(self.sources)
        spans = [[(source.start, source.end) for source in own] for own, _ in cut]
        parts = f"{pieces.PARTS}{self._name}-{hash_json(spans)[:8]}"
        label, of, most = self.label, len(cut), self.max_line_bytes
        return [
            Piece(label, i, of, own, most, size, f"{parts}/{i:06d}", self.target)
            for i, (own, size) in enumerate(cut)
        ]

    @property
    def parts(self) -> str:
        """The directory of its encoded pieces."""
        return os.path.dirname(self.pieces[0].target)

    def open(self, cache: Cache, say: Callable[[str], None]) -> dict[str, Store]:
        """Open its finished stores: {"": store}, or one per group; verify small ones.

        Their contents and the repairs made on the way are reported to `say`.
        """
        path = cache.get(self.target, self._open)
        stores = self._open(path, VERIFIED)
        for group, store in stores.items():
            name = full_name(self.role, self.label, group)
            for line in store.lines(title(self.role, name)):
                say(line)
        if self.grouped:
            meta = _read_groups(path)
            for line in Counts(meta["repairs"]).lines():
                say(line)
            for group in meta["empty"]:
                name = title(self.role, self.label)
                say(f"{group!r} ({name}): no document holds a token; left out")
        return stores

    def _open(self, path: Path, verified: float = math.inf) -> dict[str, Store]:
        """Open its stores in a directory; verify those of at most `verified` bytes."""
        names = _read_groups(path)["stores"] if self.grouped else {"": ""}
        stores = {group: open_store(path / name) for group, name in names.items()}
        for store in stores.values():
            if store.nbytes <= verified:
                verify(store)
        return stores

    def paragraphs(self) -> Iterator[str]:
        """Yield the paragraphs of its text as they are read."""
        for source in self.sources:
            for document in source.documents(Counts(), self.max_line_bytes):
                yield from document.paragraphs

    def merge(
        self, encoder: Encoder, cache: Cache, parts: Cache, say: Callable[[str], None]
    ) -> None:
        """Create the stores in `cache` from the pieces in `parts`, and remove those.

        If a piece is missing, only damaged pieces are removed. Raises UserError if
        there is no document at all, and for a full disk.
        """
        paths = [parts.get(p.target) for p in self.pieces if parts.has(p.target)]
        metas = [(path, pieces.read_meta(path)) for path in paths]
        damaged = [path for path, meta in metas if meta is None]
        # Another process may have finished, and removed the pieces, at any moment.
        if not cache.has(self.target):
            for path in damaged:
                say(f"{path}: damaged, it is made again")
                parts.remove(f"{self.parts}/{path.name}")
            if damaged or len(paths) < len(self.pieces):
                return
            try:
                repairs = self._repairs(metas)
            except UserError:  # the pieces hold no text
                parts.remove(self.parts)
                raise
            try:
                cache.make(
                    self.target, lambda path: self._write(path, encoder, metas, repairs)
                )
            except UserError:
                if not cache.has(self.target):
                    raise
        parts.remove(self.parts)

    def _repairs(self, metas: list[tuple[Path, dict[str, Any]]]) -> Counts:
        """Add up the repairs; raise UserError if the sources hold no token."""
        repairs = Counts()
        for _, meta in metas:
            for name, kinds in meta["repairs"].items():
                repairs[name].update(kinds)
        refuse_empty(self.sources, repairs)
        if not any(m["files"]["tokens.bin"]["bytes"] for _, m in metas):
            names = join_names([s.name for s in self.sources])
            raise UserError(f"{names}: no document holds a token ({self.label})")
        for source in self.sources:
            counter = repairs[source.name]
            counter["empty_files"] = 0 if counter["documents"] else 1
        return repairs

    def _write(
        self,
        path: Path,
        encoder: Encoder,
        metas: list[tuple[Path, dict[str, Any]]],
        repairs: Counts,
    ) -> None:
        total = sum(m["files"]["tokens.bin"]["bytes"] for _, m in metas) / 1e6
        encoded = [EncodedPiece(*one) for one in metas]
        with Progress(f"merge {self.label}", total, "MB") as progress:

            def blocks(group: str) -> Iterator[Encoded]:
                for piece in encoded:
                    for block in piece.blocks(group):
                        yield block
                        progress.add(block.tokens.nbytes / 1e6)

            if not self.grouped:
                meta = {**self.meta, "repairs": repairs.as_dict()}
                write_store(path, blocks(""), encoder.tokenizer, meta, encoder.streams)
                return
            stores, empty = {}, []
            for group in sorted({g for _, m in metas for g in m["groups"]}):
                name = f"{len(stores):06d}"
                (path / name).mkdir()
                meta = {**self.meta, "label": group, "repairs": {}}
                found = blocks(group), encoder.tokenizer, meta, encoder.streams
                if write_store(path / name, *found):
                    stores[group] = name
                else:
                    empty.append(group)
                    shutil.rmtree(path / name)
        groups = {"stores": stores, "empty": empty, "repairs": repairs.as_dict()}
        write_meta(path, {**self.meta, **groups})


def _read_groups(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        if {"stores", "empty", "repairs"} <= meta.keys():
            return meta
    raise UserError(
        f"{path / 'meta.json'} cannot be read: the token stores are damaged; "
        f"delete the directory {path} and they will be made again"
    )


def build_components(
    components: list[Component],
    encoder: Encoder,
    cache: Cache,
    parts: Cache,
    say: Callable[[str], None],
) -> list[dict[str, Store]]:
    """Encode, merge and open components, or open those that exist: {group: store} each.

    Encoded pieces are kept in `parts`: `cache`, or its directory on this machine. The
    pieces of all components share one pool. Work that other processes finished, or this
    one before it died, is not done again.
    """
    for attempt in range(ATTEMPTS + 1):
        todo = [c for c in components if not cache.has(c.target)]
        if not todo:
            return [c.open(cache, say) for c in components]
        if not attempt:
            pieces.remove_stale(cache, {c.parts for c in todo}, say)
        encode_pieces(encoder, [p for c in todo for p in c.pieces], parts)
        for component in todo:
            component.merge(encoder, cache, parts, say)
    raise UserError(f"data.cache={cache.root}: what was written there is damaged")

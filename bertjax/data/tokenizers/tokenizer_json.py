# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer.json holds, looked at before a library acts on it."""

import json
from collections.abc import Iterator
from typing import Any

from bertjax.data.tokenizers import backends

ADDING = "Replace", "Prepend"  # steps that write what the file says
GROWTH = 100  # characters that steps may make of one; Unicode's own make at most 18
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ROOM = 1 << 16  # ids without a piece; more than ten times the pieces is a mistake


def read_pieces(data: dict[str, Any]) -> tuple[str, list[str], set[int]]:
    """Return kind, pieces and special ids of a tokenizer.json.

    Raises ValueError where its pieces and ids are not what they have to be.

    >>> model = {"type": "WordPiece", "vocab": {"a": 0, "b": 2}}
    >>> read_pieces({"model": model})
    ('wordpiece', ['a', '', 'b'], set())
    """
    vocab = _vocab(data["model"].get("vocab"))
    added = _added(data.get("added_tokens"))
    for piece, i in added.items():
        if vocab.get(piece, i) != i:
            raise ValueError(
                f"the added token {piece!r} has the id {i!r}, and in the vocabulary "
                f"the id {vocab[piece]!r}"
            )
    ids = vocab | added
    most = 10 * len(ids) + ROOM
    piece_of: dict[int, str] = {}
    for piece, i in ids.items():
        if type(i) is not int or i < 0:
            raise ValueError(f"the id of {piece!r} is {i!r}, not a whole number")
        if i > most:
            raise ValueError(f"the id of {piece!r} is {i}, of {len(ids)} pieces")
        if i in piece_of:
            raise ValueError(f"{piece_of[i]!r} and {piece!r} have the same id, {i}")
        piece_of[i] = piece
    pieces = [piece_of.get(i, "") for i in range(max(piece_of, default=-1) + 1)]
    kind = str(data["model"].get("type")).lower()
    if kind == "bpe" and '"ByteLevel"' in json.dumps(data.get("pre_tokenizer")):
        kind = "byte_bpe"
    special = (t["id"] for t in data.get("added_tokens") or [] if t.get("special"))
    return kind, pieces, set(special)


def _vocab(vocab: Any) -> dict[str, Any]:
    if isinstance(vocab, list):
        if not all(isinstance(p, list) and len(p) == 2 for p in vocab):
            raise ValueError("its `vocab` is not a list of pieces and scores")
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    if not isinstance(vocab, dict) or not all(isinstance(p, str) for p in vocab):
        raise ValueError("its `vocab` is neither pieces with ids nor with scores")
    return vocab


def _added(tokens: Any) -> dict[str, Any]:
    if tokens is None:
        return {}
    if not isinstance(tokens, list) or not all(isinstance(t, dict) for t in tokens):
        raise ValueError("its `added_tokens` is not a list of tokens")
    ids: dict[str, Any] = {}
    for token in tokens:
        piece = token.get("content")
        if not isinstance(piece, str) or not piece:
            raise ValueError(f"the added token of id {token.get('id')!r} has no text")
        if ids.setdefault(piece, token.get("id")) != token.get("id"):
            raise ValueError(f"the added token {piece!r} has two ids")
        for flag in FLAGS:
            if not isinstance(token.get(flag), bool):
                raise ValueError(
                    f"`{flag}` of the added token {piece!r} is {token.get(flag)!r}, "
                    "neither true nor false"
                )
    return ids


def refuse_growth(data: dict[str, Any]) -> None:
    """Raise ValueError where steps that add to a text make it GROWTH times as long.

    A few that multiply each other would take all memory at the first text. They are
    tried one after another on their own patterns, and on each character of these.
    """
    for name in ("normalizer", "decoder"):
        adding = [s for s in steps(data.get(name)) if s.get("type") in ADDING]
        patterns = [
            str(p)[:GROWTH] for s in adding for p in (s.get("pattern") or {}).values()
        ]
        characters = sorted({*"".join(patterns), *"a0 é中"})
        model = {"type": "BPE", "vocab": {}, "merges": []}
        normalizers = [
            backends.make_library(
                {"version": "1.0", "normalizer": step, "model": model}
            ).normalizer
            for step in adding
        ]
        for text in (*patterns, *characters):
            grown = text
            for normalizer in normalizers:
                grown = normalizer.normalize_str(grown)
                if len(grown) > GROWTH * max(len(text), 1):
                    raise ValueError(
                        f"its {name} makes {text[:40]!r} over {GROWTH} times as long"
                    )


def steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or decoder, those of sequences one by one.

    >>> inner = [{"type": "NFC"}, {"type": "Lowercase"}]
    >>> [s["type"] for s in steps({"type": "Sequence", "normalizers": inner})]
    ['NFC', 'Lowercase']
    """
    if not isinstance(step, dict):
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for name in ("normalizers", "decoders"):
        for inner in step.get(name) or ():
            yield from steps(inner)

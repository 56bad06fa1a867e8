# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model as a tokenizer.json of the `tokenizers` library."""

import base64
import re
from typing import Any

from bertjax import UserError
from bertjax.data.tokenizers import backends

# Types of a piece in sentencepiece_model.proto.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
NEVER = -1e6  # score of a piece that no text has


def from_sentencepiece(model: bytes, lower: bool) -> dict[str, Any]:
    """Return the tokenizer.json of a SentencePiece model, without special pieces.

    lower: lower-case the text before the model sees it. Its own normalisation is its
    compiled table.
    """
    # Only the text's beginning is a word's: "[MASK]." has no space before the stop.
    return _make(read_spec(model), [{"type": "Lowercase"}] if lower else [], "first")


def from_xlm_roberta(model: bytes) -> dict[str, Any]:
    """Return the tokenizer.json of a sentencepiece.bpe.model with fairseq's ids.

    <s> <pad> </s> <unk>, the model's pieces from the fourth on, <mask>: one more than
    the model's own number (fairseq's dictionary, transformers' XLMRobertaTokenizer).
    Raises ValueError when the model does not begin with <unk> <s> </s>.
    """
    spec = read_spec(model)
    if [piece for piece, _, _ in spec["pieces"][:3]] != ["<unk>", "<s>", "</s>"]:
        raise ValueError("it does not begin with <unk> <s> </s>")
    first = [(piece, 0.0, CONTROL) for piece in ("<s>", "<pad>", "</s>")]
    last = ("<mask>", 0.0, CONTROL)
    spec["pieces"] = [*first, ("<unk>", 0.0, UNKNOWN), *spec["pieces"][3:], last]
    return _make(spec, [])


def from_albert(model: bytes, lower: bool, accents: bool) -> dict[str, Any]:
    """Return the tokenizer.json of ALBERT's spiece.model.

    Quotes are made plain, accents stripped, capitals lowered before the model, and a
    number ends before its comma (google-research/albert, tokenization.py).
    """
    spec = read_spec(model)
    spec["pieces"] = [
        (piece, score - 100 * bool(re.search(r"\d,$", piece)), kind)
        for piece, score, kind in spec["pieces"]
    ]
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": quotes}, "content": '"'}
        for quotes in ("``", "''")
    ]
    if not accents:
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if lower:
        steps.append({"type": "Lowercase"})
    return _make(spec, steps)


def _make(
    spec: dict[str, Any], steps: list[dict[str, Any]], scheme: str = "always"
) -> dict[str, Any]:
    if spec["suffix"] or spec["kind"] not in ("unigram", "bpe"):
        raise UserError("a SentencePiece model of this kind has no tokenizer.json")
    steps = [*steps]
    if spec["charsmap"]:
        # The library applies the table to a letter and its accents at once, and forgets
        # what follows the longest match; composed letters are one match.
        steps.append({"type": "NFC"})
        table = base64.b64encode(spec["charsmap"]).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec["remove_extra"]:
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        pattern = {"Regex": " {2,}"}
        steps.append({"type": "Replace", "pattern": pattern, "content": "▁"})
    scheme = scheme if spec["prefix"] else "never"
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
    space["split"] = True
    make = _unigram if spec["kind"] == "unigram" else _bpe
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": make(spec),
    }


def _unigram(spec: dict[str, Any]) -> dict[str, Any]:
    best = max((s for _, s, kind in spec["pieces"] if kind == 1), default=0.0)
    vocab: list[list[Any]] = []
    for piece, score, kind in spec["pieces"]:
        if kind == USER_DEFINED:  # sentencepiece's unigram_model.cc, which prefers it
            score = len(piece) * best - 0.1
        elif kind in (CONTROL, UNUSED):
            score = NEVER
        vocab.append([piece, score])
    return {
        "type": "Unigram",
        "unk_id": next(i for i, p in enumerate(spec["pieces"]) if p[2] == UNKNOWN),
        "vocab": vocab,
        "byte_fallback": spec["byte_fallback"],
    }


def _bpe(spec: dict[str, Any]) -> dict[str, Any]:
    """List the merges that make each piece, the best-scored piece first."""
    ids = {piece: i for i, (piece, _, _) in enumerate(spec["pieces"])}
    ranked = []
    for piece, score, kind in spec["pieces"]:
        if kind != 1:
            continue
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids]
        ranked += [(-score, *pair) for pair in sorted(pairs)]
    ranked.sort(key=lambda r: r[0])
    unk = next(p for p, _, kind in spec["pieces"] if kind == UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": spec["byte_fallback"],
        "ignore_merges": False,
        "vocab": ids,
        "merges": [[a, b] for *_, a, b in ranked],
    }


def read_spec(model: bytes) -> dict[str, Any]:
    """Read a SentencePiece model: sentencepiece_model.proto, ModelProto.

    pieces: (piece, score, type); charsmap: the compiled normalisation.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    spec: dict[str, Any] = {
        "kind": backends.sentencepiece_kind(model),
        "charsmap": b"",
        "prefix": True,
        "remove_extra": True,
        "byte_fallback": False,
        "suffix": False,
    }
    types = []
    for field, _, start, end in backends.fields(model, 0, len(model)):
        if field == 1:
            inner = {f: v for f, v, _, _ in backends.fields(model, start, end)}
            types.append(inner.get(3, 1))
        for f, value, at, stop in (
            backends.fields(model, start, end) if field > 1 else ()
        ):
            if (field, f) == (3, 2):
                spec["charsmap"] = model[at:stop]
            for name, where in (
                ("prefix", (3, 3)),
                ("remove_extra", (3, 4)),
                ("byte_fallback", (2, 35)),
                ("suffix", (2, 24)),
            ):
                if (field, f) == where:
                    spec[name] = bool(value)
    spec["pieces"] = [
        (processor.id_to_piece(i), processor.get_score(i), types[i])
        for i in range(processor.vocab_size())
    ]
    return spec

# SPDX-License-Identifier: Apache-2.0
"""Convert a SentencePiece model to a tokenizer.json of the `tokenizers` library."""

import base64
import re
from typing import Any

from bertjax import UserError
from bertjax.data.tokenizers.backends import read_model
from bertjax.data.tokenizers.tokenizer_json import special_tokens

# Types of a piece in sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
UNUSED_SCORE = -1e6  # score of a piece that no text yields
# str.lower does this and the library's Lowercase does not: a capital sigma at the end
# of a word becomes another letter than one within it (Unicode, Final_Sigma).
CASED, IGNORED = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\p{Mn}\p{Me}\p{Cf}\p{Lm}\p{Sk}'’.·:]"
FINAL_SIGMA = rf"(?<={CASED}|{CASED}{IGNORED})Σ(?!{IGNORED}*{CASED})"
LOWER: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"Regex": FINAL_SIGMA}, "content": "ς"},
    {"type": "Lowercase"},
]


def from_sentencepiece(model: bytes, lower: bool) -> dict[str, Any]:
    """Return the tokenizer.json of a SentencePiece model, without special pieces.

    lower: lower-case the text before the model reads it. The model's own normalization
    is its compiled table.
    """
    # Only the beginning of a text gets a space: "[MASK]." has none before the stop.
    proto = read_model(model)
    return _make(proto, _pieces(proto), LOWER * lower, "first")


def from_xlm_roberta(model: bytes) -> dict[str, Any]:
    """Return the tokenizer.json of a sentencepiece.bpe.model with fairseq's ids.

    <s> <pad> </s> <unk>, the model's pieces from the fourth on, <mask>: ids are one
    more than the model's own (fairseq's dictionary, transformers' XLMRobertaTokenizer).
    Raises ValueError if the model does not begin with <unk> <s> </s>.
    """
    proto = read_model(model)
    pieces = _pieces(proto)
    if [piece for piece, _, _ in pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise ValueError("it does not begin with <unk> <s> </s>")
    first = [(piece, 0.0, CONTROL) for piece in ("<s>", "<pad>", "</s>")]
    last = ("<mask>", 0.0, CONTROL)
    return _make(proto, [*first, ("<unk>", 0.0, UNKNOWN), *pieces[3:], last], [])


def from_albert(model: bytes, lower: bool, accents: bool) -> dict[str, Any]:
    """Return the tokenizer.json of ALBERT's spiece.model.

    Before the model, quotes become plain, accents are stripped and capitals are
    lower-cased; a number ends before its comma (google-research/albert,
    tokenization.py).
    """
    proto = read_model(model)
    pieces = [
        (piece, score - 100 * bool(re.search(r"\d,$", piece)), kind)
        for piece, score, kind in _pieces(proto)
    ]
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": quotes}, "content": '"'}
        for quotes in ("``", "''")
    ]
    if not accents:
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if lower:
        steps.append({"type": "Lowercase"})
    return _make(proto, pieces, steps)


def from_t5(model: bytes, sentinels: int) -> dict[str, Any]:
    """Return the tokenizer.json of T5's spiece.model.

    The pieces are <pad> </s> <unk>, the model's pieces, and `sentinels` sentinels with
    <extra_id_0> last; </s> follows each text (transformers' T5Converter).

    Raises ValueError if the model does not begin with <pad> </s> <unk>.
    """
    proto = read_model(model)
    pieces = _pieces(proto)
    names = [piece for piece, _, _ in pieces[:3]]
    if names != ["<pad>", "</s>", "<unk>"]:
        raise ValueError("it does not begin with <pad> </s> <unk>")
    extra = [f"<extra_id_{i}>" for i in reversed(range(sentinels))]
    data = _make(proto, [*pieces, *((piece, 0.0, CONTROL) for piece in extra)], [])
    ids = [*enumerate(names), *enumerate(extra, len(pieces))]
    data["added_tokens"] = special_tokens({piece: i for i, piece in ids})
    text, end = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB"), names[1]
    mark = {"SpecialToken": {"id": end, "type_id": 0}}
    first, second = ([x, mark] for x in text)
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {end: {"id": end, "ids": [1], "tokens": [end]}},
    }
    return data


Piece = tuple[str, float, int]  # piece, score, type


def _pieces(proto: Any) -> list[Piece]:
    return [(p.piece, p.score, p.type) for p in proto.pieces]


def _make(
    proto: Any, pieces: list[Piece], steps: list[dict[str, Any]], scheme: str = "always"
) -> dict[str, Any]:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    make = {trainer.UNIGRAM: _unigram, trainer.BPE: _bpe}.get(trainer.model_type)
    if trainer.treat_whitespace_as_suffix or make is None:
        raise UserError("a SentencePiece model of this kind has no tokenizer.json")
    steps = [*steps]
    if normalizer.precompiled_charsmap:
        # The library applies the table to a letter with its accents at once, and drops
        # what follows the longest match; a composed letter is one match.
        steps.append({"type": "NFC"})
        table = base64.b64encode(normalizer.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        pattern = {"Regex": " {2,}"}
        steps.append({"type": "Replace", "pattern": pattern, "content": "▁"})
    scheme = scheme if normalizer.add_dummy_prefix else "never"
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
    space["split"] = True
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {**make(pieces), "byte_fallback": trainer.byte_fallback},
    }


def _unigram(pieces: list[Piece]) -> dict[str, Any]:
    best = max((s for _, s, kind in pieces if kind == NORMAL), default=0.0)
    vocab: list[list[Any]] = []
    for piece, score, kind in pieces:
        if kind == USER_DEFINED:  # sentencepiece's unigram_model.cc, which prefers it
            score = len(piece) * best - 0.1
        elif kind in (CONTROL, UNUSED):
            score = UNUSED_SCORE
        vocab.append([piece, score])
    return {
        "type": "Unigram",
        "unk_id": next(i for i, p in enumerate(pieces) if p[2] == UNKNOWN),
        "vocab": vocab,
    }


def _bpe(pieces: list[Piece]) -> dict[str, Any]:
    """Return the model with the merges of each piece, best-scored pieces first."""
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    ranked = []
    for piece, score, kind in pieces:
        if kind != NORMAL:
            continue
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids]
        ranked += [(-score, *pair) for pair in sorted(pairs)]
    ranked.sort(key=lambda r: r[0])
    unk = next(p for p, _, kind in pieces if kind == UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [[a, b] for *_, a, b in ranked],
    }

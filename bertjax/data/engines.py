# SPDX-License-Identifier: Apache-2.0
"""The two tokenizer libraries behind one face: texts to ids, pieces to text.

An engine is made of the bytes of a tokenizer's files, and never turns a special
token written in a text into its id: who wants that asks `Tokenizer.encode_with_masks`.
"""

import json
from collections.abc import Iterator
from typing import Any, Protocol

CONTROL, USER_DEFINED = 3, 4  # the types of a piece in sentencepiece_model.proto
# A NormalizerSpec (field 3) that says add_dummy_prefix (field 3) = false. Protocol
# buffers merge a message that comes twice, so appending it to a model overrides.
NO_PREFIX = b"\x1a\x02\x18\x00"
HIDDEN = (
    "\0"  # put before special pieces; texts are freed of it (only for tokenizer.json)
)


class Engine(Protocol):
    """What `Tokenizer` needs of a library."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that goes on where another piece just ended."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, none of them special."""


class TokenizersEngine:
    """The `tokenizers` library."""

    def __init__(self, tokenizer: Any, hides: bool = False) -> None:
        self.tokenizer = tokenizer
        self.hides = hides
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self.hides:
            texts = [t.replace(HIDDEN, "") for t in texts]
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [e.ids for e in encoded]

    def encode_after(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceEngine:
    """The `sentencepiece` library; `lower` lower-cases before it."""

    def __init__(self, model: bytes, special: set[int], lower: bool) -> None:
        import sentencepiece

        model = hide_user_defined(model, special)
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.model = model
        self.lower = lower
        self.inner: Any = None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self.lower:
            texts = [t.lower() for t in texts]
        return self.processor.encode(texts, out_type=int, num_threads=1)

    def encode_after(self, text: str) -> list[int]:
        if self.inner is None:
            import sentencepiece

            self.inner = sentencepiece.SentencePieceProcessor(
                model_proto=self.model + NO_PREFIX
            )
        processor = self.processor if text[:1].isspace() else self.inner
        return processor.encode(text.lower() if self.lower else text, out_type=int)

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


def wordpiece_engine(pieces: list[str], unk: str, lower: bool) -> TokenizersEngine:
    """Make BERT's tokenizer: BertNormalizer, BertPreTokenizer, WordPiece.

    No special piece can come out of a text: the pre-tokenizer splits at brackets.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(
        vocab={p: i for i, p in enumerate(pieces)},
        unk_token=unk,
        max_input_chars_per_word=100,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return TokenizersEngine(tokenizer)


def byte_bpe_engine(
    pieces: list[str], merges: list[tuple[str, str]], unk: str, lower: bool
) -> TokenizersEngine:
    """Make RoBERTa's tokenizer: GPT-2's split into words, bytes, merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {p: i for i, p in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk))
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizersEngine(tokenizer)


def json_engine(data: dict[str, Any], special: set[str]) -> TokenizersEngine:
    """Make the tokenizer of a tokenizer.json in which no text matches `special`.

    The special pieces are renamed to what no text can hold: a Unigram model would
    find "[MASK]" in a text even when no added token of that name looked for it.
    """
    from tokenizers import Tokenizer

    def hide(piece: str) -> str:
        return HIDDEN + piece if piece in special else piece

    model = dict(data["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hide(p): i for p, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hide(p), score] for p, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = hide(model["unk_token"])
    added = [
        {**t, "content": hide(t["content"]), "normalized": False}
        if t["content"] in special
        else t
        for t in data.get("added_tokens") or []
    ]
    data = {**data, "model": model, "added_tokens": added, "post_processor": None}
    return TokenizersEngine(Tokenizer.from_str(json.dumps(data)), hides=True)


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk a protocol buffer: (field, value if a varint, first byte, end) of each.

    >>> list(fields(bytes([0x18, 4, 0x0A, 1, 65]), 0, 5))
    [(3, 4, 1, 2), (1, 0, 4, 5)]
    """

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    while start < end:
        tag, at = varint(start)
        value = 0
        if tag & 7 == 0:
            value, start = varint(at)
        elif tag & 7 == 2:
            size, at = varint(at)
            start = at + size
        else:
            start = at + (8 if tag & 7 == 1 else 4)
        yield tag >> 3, value, at, start


def sentencepiece_kind(model: bytes) -> str:
    """Return "unigram" or "bpe" (or "word", "char"), as the model's trainer noted."""
    for field, _, start, end in fields(model, 0, len(model)):
        if field == 2:
            for inner, value, _, _ in fields(model, start, end):
                if inner == 3:
                    return {1: "unigram", 2: "bpe", 3: "word"}.get(value, "char")
    return "unigram"


def hide_user_defined(model: bytes, special: set[int]) -> bytes:
    """Make user-defined pieces with an id in `special` control pieces.

    SentencePiece matches a user-defined piece in a text, a control piece never.
    """
    changed = bytearray(model)
    index = 0
    for field, _, start, end in fields(model, 0, len(model)):
        if field != 1:
            continue
        for inner, value, at, _ in fields(model, start, end):
            if inner == 3 and value == USER_DEFINED and index in special:
                changed[at] = CONTROL
        index += 1
    return bytes(changed)

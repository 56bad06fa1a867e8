# SPDX-License-Identifier: Apache-2.0
"""The two tokenizer libraries behind one face: texts to ids, pieces to text.

An engine is made of the bytes of a tokenizer's files, and never turns a special
token written in a text into its id: who wants that asks `Tokenizer.encode_with_masks`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from bertjax import UserError

CONTROL, USER_DEFINED = 3, 4  # the types of a piece in sentencepiece_model.proto
# The kinds that put a space before a text, unless told that it goes on `after` another.
SPACE_FIRST = ("unigram", "bpe")
# A NormalizerSpec (field 3) that says add_dummy_prefix (field 3) = false. Protocol
# buffers merge a message that comes twice, so appending it to a model overrides.
NO_PREFIX = b"\x1a\x02\x18\x00"
HIDDEN = (
    "\0"  # put before special pieces; texts are freed of it (only for tokenizer.json)
)


Span = tuple[int, int]  # characters [begin, end) of a text
SHOWN = 60  # characters of a text in messages


class TextError(UserError):
    """A text that a tokenizer cannot take."""


def panicked(error: BaseException) -> bool:
    """Tell whether the `tokenizers` library gave up; its error is no Exception."""
    return type(error).__name__ == "PanicException"


def guarded(encode: Callable[[list[str]], list[Any]], texts: list[str]) -> list[Any]:
    """Return encode(texts). Raises TextError for the text at which it panics.

    A regular expression that would backtrack for ever is such a text's.
    """
    try:
        return encode(texts)
    except BaseException as error:
        if not panicked(error):
            raise
        reason = str(error)
    for text in texts if len(texts) > 1 else ():
        guarded(encode, [text])
    raise TextError(
        f"data.vocab: its tokenizer cannot split {texts[0][:SHOWN]!r} ({reason})"
    )


class Engine(Protocol):
    """What `Tokenizer` needs of a library."""

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        """Return the ids of each text; `after`: it goes on where another just ended."""

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        """Return ids, those of `encode_batch`, and which characters each stands for.

        The parts of a character share its span; a piece that stands for nothing in the
        text (a dummy space) has an empty span.
        """

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that goes on where another piece just ended."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, none of them special."""


def encode_sentences(
    encode: Callable[..., list[Any]], texts: list[str], joined: Sequence[bool]
) -> list[Any]:
    """Encode sentences with an engine's `encode_batch` or `encode_spans`.

    joined: which of them follow another without a space; those are encoded without the
    one that SentencePiece puts before a text, as a paragraph encoded whole has none.
    """
    if not any(joined):
        return encode(texts) if texts else []
    spaced = [text for text, j in zip(texts, joined, strict=True) if not j]
    inside = [text for text, j in zip(texts, joined, strict=True) if j]
    first = iter(encode(spaced) if spaced else [])
    after = iter(encode(inside, True))
    return [next(after if j else first) for j in joined]


class TokenizersEngine:
    """The `tokenizers` library; `inner` puts no space before a text."""

    def __init__(self, tokenizer: Any, hides: bool = False, inner: Any = None) -> None:
        self.tokenizer = tokenizer
        self.inner = inner or tokenizer
        self.hides = hides
        for made in (self.tokenizer, self.inner):
            made.no_truncation()
            made.no_padding()

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        if self.hides:
            texts = [t.replace(HIDDEN, "") for t in texts]
        tokenizer = self.inner if after else self.tokenizer

        def encode(texts: list[str]) -> list[list[int]]:
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [e.ids for e in found]

        return guarded(encode, texts)

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        if self.hides and any(HIDDEN in t for t in texts):
            return [self._spans_without_hidden(t, after) for t in texts]
        tokenizer = self.inner if after else self.tokenizer

        def encode(texts: list[str]) -> list[tuple[list[int], list[Span]]]:
            found = tokenizer.encode_batch(texts, add_special_tokens=False)
            return [(e.ids, e.offsets) for e in found]

        return guarded(encode, texts)

    def _spans_without_hidden(
        self, text: str, after: bool
    ) -> tuple[list[int], list[Span]]:
        kept = [at for at, c in enumerate(text) if c != HIDDEN] + [len(text)]
        ((ids, spans),) = self.encode_spans([text.replace(HIDDEN, "")], after)
        return ids, [(kept[a], kept[b]) for a, b in spans]

    def encode_after(self, text: str) -> list[int]:
        return self.encode_batch([text], after=not text[:1].isspace())[0]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceEngine:
    """The `sentencepiece` library; `lower` lower-cases before it."""

    def __init__(self, model: bytes, special: set[int], lower: bool) -> None:
        import sentencepiece

        model = hide_user_defined(model, special)
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.inner = sentencepiece.SentencePieceProcessor(model_proto=model + NO_PREFIX)
        self.lower = lower

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        if self.lower:
            texts = [t.lower() for t in texts]
        processor = self.inner if after else self.processor
        return processor.encode(texts, out_type=int, num_threads=1)

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        lowered = [t.lower() for t in texts] if self.lower else texts
        processor = self.inner if after else self.processor
        # The one form that every version of the library has.
        found = processor.encode(lowered, out_type="serialized_proto", num_threads=1)
        return [_spans(p, t, self.lower) for p, t in zip(found, texts, strict=True)]

    def encode_after(self, text: str) -> list[int]:
        return self.encode_batch([text], after=not text[:1].isspace())[0]

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


def _spans(proto: bytes, text: str, lower: bool) -> tuple[list[int], list[Span]]:
    """Read ids and spans of a SentencePieceText, whose offsets are bytes of the text as
    the library saw it."""
    ids, found = _read_pieces(proto)
    if text.isascii():
        return ids, found
    at: list[int] = []  # character of each byte
    for number, character in enumerate(text):
        seen = character.lower() if lower else character
        at += [number] * len(seen.encode("utf-8", "surrogatepass"))
    at.append(len(text))
    # A span within a character is the whole of it.
    return ids, [(at[a], at[b - 1] + 1 if b > a else at[a]) for a, b in found]


def _read_pieces(data: bytes) -> tuple[list[int], list[Span]]:
    """Read a SentencePieceText: pieces 2; of a piece id 2, begin 4, end 5.

    `fields` would do, but is three times slower. Inner and outer fields have different
    tags, but for texts, which are skipped: one loop reads both.

    >>> _read_pieces(bytes([0x0A, 1, 65, 0x12, 7, 0x0A, 1, 65, 0x10, 9, 0x28, 1]))
    ([9], [(0, 1)])
    """
    ids: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    at, size = 0, len(data)
    while at < size:
        tag, value = data[at], data[at + 1]
        at += 2
        if tag == 0x1D:  # the score of the text, four bytes
            at += 3
            continue
        if value > 127:
            value, shift = value & 127, 7
            while True:
                byte = data[at]
                value |= (byte & 127) << shift
                at, shift = at + 1, shift + 7
                if byte < 128:
                    break
        if tag == 0x12:
            ids.append(0)
            begins.append(0)
            ends.append(0)
        elif tag == 0x10:
            ids[-1] = value
        elif tag == 0x20:
            begins[-1] = value
        elif tag == 0x28:
            ends[-1] = value
        else:  # text
            at += value
    return ids, list(zip(begins, ends, strict=True))


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


def read_merges(text: str) -> list[tuple[str, str]]:
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    pairs = [tuple(line.split(" ")) for line in lines if line]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise ValueError(f"merge {number} of merges.txt is not two pieces")
    return pairs


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
    inner = {**data, **{k: _without_prefix(data.get(k)) for k in _STEPS}}
    made = [Tokenizer.from_str(json.dumps(d)) for d in (data, _with_spaces(inner))]
    return TokenizersEngine(made[0], hides=True, inner=made[1])


_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a step of tokenizer.json that puts no "▁" before a text.

    >>> _without_prefix({"type": "Metaspace", "prepend_scheme": "always"})
    {'type': 'Metaspace', 'prepend_scheme': 'never'}
    """
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for name in _STEPS.values():
        if name in step:
            inner = map(_without_prefix, step[name])
            step[name] = [found for found in inner if found]
    if step["type"] == "Metaspace":
        step.pop("add_prefix_space", None)
        step["prepend_scheme"] = "never"
    return step


def _with_spaces(data: dict[str, Any]) -> dict[str, Any]:
    """Let spaces, of which WhitespaceSplit leaves none, be the "▁" of later words.

    XLM-R splits at them and puts "▁" before each word, which without a prefix none has.
    """
    steps = (data.get("pre_tokenizer") or {}).get("pretokenizers", ())
    if {"WhitespaceSplit", "Metaspace"} - {s["type"] for s in steps}:
        return data
    kept = [s for s in steps if s["type"] != "WhitespaceSplit"]
    once = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    normalizers = [s for s in (data.get("normalizer"), once, strip) if s]
    return {
        **data,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": kept},
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
    }


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

# SPDX-License-Identifier: Apache-2.0
"""The two tokenizer libraries behind one interface: texts to ids, pieces to text.

An engine is created from the bytes of a tokenizer's files. It never turns a special
token written in a text into its id; `Tokenizer.encode_with_masks` does that.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bertjax import UserError

# The kinds that put a space before a text unless it continues another one.
SPACE_FIRST = ("unigram", "bpe")
# Begins the names of special pieces in a tokenizer.json, and is removed from texts.
HIDDEN = "\0"

Span = tuple[int, int]  # characters [begin, end) of a text
SHOWN = 60  # characters of a text in messages


class TextError(UserError):
    """A text that a tokenizer cannot encode."""


def is_panic(error: BaseException) -> bool:
    """Return whether the `tokenizers` library panicked; its error is no Exception."""
    return type(error).__name__ == "PanicException"


def encode_texts(encode: Callable[..., list[Any]], texts: list[str]) -> list[Any]:
    """Call a library's `encode_batch` on texts, without special tokens.

    Raises TextError for a text at which the library panics, because a regular
    expression of its tokenizer.json backtracks too often there.
    """
    try:
        return encode(texts, add_special_tokens=False)
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = str(error)
    for text in texts if len(texts) > 1 else ():
        encode_texts(encode, [text])
    raise TextError(
        f"data.vocab: its tokenizer cannot split {texts[0][:SHOWN]!r} ({reason})"
    )


class Engine(Protocol):
    """The interface that `Tokenizer` needs from a library."""

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        """Return the ids of each text; `after`: each continues another text."""

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        """Return ids, as `encode_batch` does, and the characters that each stands for.

        The parts of a character share its span; a piece that stands for nothing in the
        text (a dummy space) has an empty span.
        """

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, none of them special."""


def encode_sentences(
    encode: Callable[..., list[Any]], texts: list[str], joined: Sequence[bool]
) -> list[Any]:
    """Encode sentences with an engine's `encode_batch` or `encode_spans`.

    joined: which sentences follow another without a space; these are encoded without
    the space that SentencePiece puts before a text, since the whole paragraph has none.
    """
    groups: dict[bool, list[str]] = {False: [], True: []}
    for text, after in zip(texts, joined, strict=True):
        groups[after].append(text)
    encoded = {
        j: iter(encode(group, j) if group else ()) for j, group in groups.items()
    }
    return [next(encoded[after]) for after in joined]


class TokenizersEngine:
    """An engine of the `tokenizers` library; `inner` puts no space before a text.

    hides: whether special pieces begin with HIDDEN, which is then removed from texts.
    """

    def __init__(self, tokenizer: Any, hides: bool = False, inner: Any = None) -> None:
        self.tokenizer = tokenizer
        self.inner = inner or tokenizer
        self.hides = hides

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        library = self.inner if after else self.tokenizer
        encoded = encode_texts(library.encode_batch_fast, self._visible(texts))
        return [e.ids for e in encoded]

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        library = self.inner if after else self.tokenizer
        visible = self._visible(texts)
        result = []
        for e, short, text in zip(
            encode_texts(library.encode_batch, visible), visible, texts, strict=True
        ):
            spans = e.offsets
            if len(short) < len(text):
                at = [i for i, c in enumerate(text) if c != HIDDEN] + [len(text)]
                spans = [(at[begin], at[end]) for begin, end in spans]
            result.append((e.ids, spans))
        return result

    def _visible(self, texts: list[str]) -> list[str]:
        return [t.replace(HIDDEN, "") for t in texts] if self.hides else texts

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceEngine:
    """An engine of the `sentencepiece` library; `lower` lower-cases texts for it."""

    def __init__(self, model: bytes, special: set[int], lower: bool) -> None:
        from sentencepiece import SentencePieceProcessor

        proto = read_model(model)
        kinds = proto.SentencePiece
        for i, piece in enumerate(proto.pieces):
            # The library finds user-defined pieces in a text, but never control pieces.
            if i in special and piece.type == kinds.USER_DEFINED:
                piece.type = kinds.CONTROL
        self.processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
        proto.normalizer_spec.add_dummy_prefix = False
        self.inner = SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.lower = lower

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        if self.lower:
            texts = [t.lower() for t in texts]
        processor = self.inner if after else self.processor
        return processor.encode(texts, out_type=int, num_threads=1)

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        from sentencepiece.sentencepiece_pb2 import SentencePieceText

        lowered = [t.lower() for t in texts] if self.lower else texts
        processor = self.inner if after else self.processor
        # The only format that every version of the library has.
        encoded = processor.encode(lowered, out_type="serialized_proto", num_threads=1)
        result = []
        for proto, text in zip(encoded, texts, strict=True):
            pieces = SentencePieceText.FromString(proto).pieces
            spans = [(piece.begin, piece.end) for piece in pieces]
            if not text.isascii():
                spans = _character_spans(spans, text, self.lower)
            result.append(([piece.id for piece in pieces], spans))
        return result

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


def _character_spans(spans: list[Span], text: str, lower: bool) -> list[Span]:
    """Convert spans of bytes to spans of characters.

    lower: whether the bytes are those of the lower-cased text.

    >>> _character_spans([(0, 3), (3, 4)], "Été", lower=True)
    [(0, 2), (2, 3)]
    """
    at: list[int] = []  # character of each byte
    for number, character in enumerate(text):
        seen = character.lower() if lower else character
        at += [number] * len(seen.encode("utf-8", "surrogatepass"))
    at.append(len(text))
    # A span within a character becomes the span of the whole character.
    return [(at[a], at[b - 1] + 1 if b > a else at[a]) for a, b in spans]


def read_model(model: bytes) -> Any:
    """Parse the bytes of a SentencePiece .model: a ModelProto."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    return ModelProto.FromString(model)


def make_library(data: dict[str, Any]) -> Any:
    """Create the library's object of a tokenizer.json, without truncation, padding."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps({**data, "truncation": None, "padding": None}))


def wordpiece_engine(pieces: list[str], unk: str, lower: bool) -> TokenizersEngine:
    """Create BERT's tokenizer: BertNormalizer, BertPreTokenizer, WordPiece.

    No special piece can come out of a text: the pre-tokenizer splits at brackets.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {p: i for i, p in enumerate(pieces)}
    model = models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100)
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
    """Create RoBERTa's tokenizer: GPT-2's split into words, bytes, merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {p: i for i, p in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk))
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizersEngine(tokenizer)


def json_engine(data: dict[str, Any], special: set[str]) -> TokenizersEngine:
    """Create the tokenizer of a tokenizer.json so that no text matches `special`.

    Special pieces are renamed to strings that no text can hold: otherwise a Unigram
    model would find "[MASK]" in a text even without an added token of that name.
    """

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
    library, inner_library = make_library(data), make_library(_with_spaces(inner))
    return TokenizersEngine(library, hides=True, inner=inner_library)


_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a step of tokenizer.json that puts no "▁" before a text, or None.

    >>> _without_prefix({"type": "Metaspace", "prepend_scheme": "always"})
    {'type': 'Metaspace', 'prepend_scheme': 'never'}
    """
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for name in _STEPS.values():
        if name in step:
            inner = map(_without_prefix, step[name])
            step[name] = [one for one in inner if one]
    if step["type"] == "Metaspace":
        step.pop("add_prefix_space", None)
        step["prepend_scheme"] = "never"
    return step


def _with_spaces(data: dict[str, Any]) -> dict[str, Any]:
    """Turn spaces into the "▁" of later words.

    XLM-R splits at spaces and then puts "▁" before each word; without the prefix no
    word would have one."""
    steps = (data.get("pre_tokenizer") or {}).get("pretokenizers", ())
    if {"WhitespaceSplit", "Metaspace"} - {s["type"] for s in steps}:
        return data
    steps = [s for s in steps if s["type"] != "WhitespaceSplit"]
    once = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    normalizers = [s for s in (data.get("normalizer"), once, strip) if s]
    return {
        **data,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
    }

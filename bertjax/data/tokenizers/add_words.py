# SPDX-License-Identifier: Apache-2.0
"""Add words to a vocabulary; the ids of its old pieces stay.

Each kind has its own way to make a whole word one piece:
- WordPiece uses the longest piece that a word begins with (so a new word is also the
  beginning of longer words: "kernel" in "kernel ##s");
- byte BPE uses a word that is in its vocabulary, whatever its merges are
  (`ignore_merges` of tokenizers' BPE);
- Unigram uses the best-scored pieces: a word gets a slightly higher score than its old
  pieces together, so that it replaces them and nothing else.
SentencePiece's BPE has no such way, because a stop or comma belongs to its words.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError, counted
from bertjax.data.tokenizers import backends, export_tokenizer, tokenizer_files
from bertjax.data.tokenizers.sentencepiece_json import UNUSED_SCORE
from bertjax.data.tokenizers.tokenizer import Tokenizer, byte_text
from bertjax.data.tokenizers.tokenizer_json import json_files
from bertjax.data.tokenizers.vocab_files import read_lines

# The score of a new word exceeds that of its n old pieces by n * n times this. So it
# also exceeds the scores of new words within it, by more than a float32 loses.
MARGIN = 1e-4


class AddedWords(NamedTuple):
    """A larger tokenizer.

    origins: ids of the old pieces of each new one, in the order of the new ids.
    words: how many were added; skipped: reason -> how many were not.
    """

    tokenizer: Tokenizer
    origins: list[list[int]]
    words: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        pieces = f" as {n} pieces" if (n := len(self.origins)) != self.words else ""
        skipped = [f"; {count} {why}" for why, count in self.skipped.items() if count]
        return f"{counted(self.words, 'word')} added{pieces}{''.join(skipped)}"


class NewPiece(NamedTuple):
    """A piece to add: its text, whether it continues another text, and its old ids."""

    word: str
    form: str
    after: bool
    piece: str
    origin: list[int]


def read_words(path: str, flag: str) -> list[str]:
    """Read one word per line; blank lines become "". Raises UserError."""
    return [line.strip() for line in read_lines(Path(path), f"{flag}={path}")]


def add_words(tokenizer: Tokenizer, words: Iterable[str], flag: str) -> AddedWords:
    """Return a tokenizer in which each word that stands alone is one piece.

    In byte BPE and Unigram a word may get two pieces, with the space before it and
    without. Raises UserError for SentencePiece's BPE, if no word can be added, and if
    old texts would get other ids.
    """
    if tokenizer.kind == "ids":
        raise UserError(f"{flag}: this vocabulary is one of ids, not of text")
    if tokenizer.kind == "bpe":
        raise UserError(f"{flag}: words cannot be added to SentencePiece's BPE")
    special = [p for i in tokenizer.special_ids if (p := tokenizer.pieces[i])]
    skipped = Counter(dict.fromkeys(("empty", "twice", "known as one piece"), 0))
    chosen: dict[str, list[NewPiece]] = {}
    seen: set[str] = set()

    def lacks(new: NewPiece) -> bool:
        return tokenizer.unk_id in new.origin

    for word in words:
        forms = _forms(tokenizer, word)
        pieces = {new.piece for new in forms}
        added = [n for n in forms if len(n.origin) > 1 or lacks(n)]
        if not word:
            skipped["empty"] += 1
        elif len(word.split()) > 1 or not forms:
            skipped["not one word to this tokenizer"] += 1
        elif any(s in word for s in special):
            skipped["with a special token"] += 1
        elif seen & pieces:
            skipped["twice"] += 1
        elif forms[0] not in added:
            skipped["known as one piece"] += 1
        elif any(map(lacks, added)) and tokenizer.kind != "wordpiece":
            skipped["with a character that the vocabulary lacks"] += 1
        else:
            chosen[word] = added
        seen |= pieces
    while chosen:
        new = [n for forms in chosen.values() for n in forms]
        grown = _make(tokenizer, new, flag)
        wrong = {
            n.word
            for i, n in enumerate(new, tokenizer.vocab_size)
            if grown.engine.encode_batch([n.form], n.after) != [[i]]
        }
        if not wrong:
            break
        for word in wrong:
            del chosen[word]
        skipped["not one word to this tokenizer"] += len(wrong)
    if not chosen:
        why = ", ".join(f"{count} {why}" for why, count in skipped.items() if count)
        raise UserError(f"{flag}: no word to add ({why or 'the file is empty'})")
    _check_old(tokenizer, grown, flag)
    return AddedWords(grown, [n.origin for n in new], len(chosen), dict(skipped))


def _forms(tokenizer: Tokenizer, word: str) -> list[NewPiece]:
    """Return the pieces to add for a word, with their present ids."""
    forms = {
        "wordpiece": [(word, False)],
        "byte_bpe": [(f" {word}", False), (word, False)],
        "unigram": [(word, False), (word, True)],
    }
    new: list[NewPiece] = []
    for form, after in forms[tokenizer.kind]:
        (origin,) = tokenizer.engine.encode_batch([form], after)
        piece = "".join(tokenizer.pieces[i] for i in origin)
        if tokenizer.kind == "wordpiece":
            engine: Any = tokenizer.engine
            normalizer = engine.tokenizer.normalizer
            piece = (normalizer.normalize_str(word) if normalizer else word).strip()
        if piece and piece not in (n.piece for n in new):
            new.append(NewPiece(word, form, after, piece, origin))
    return new


def _check_old(old: Tokenizer, grown: Tokenizer, flag: str) -> None:
    """Refuse a tokenizer that encodes an old piece with other old ids than before."""
    new = set(grown.pieces[old.vocab_size :])
    texts, special = [], set(old.special_ids.tolist())
    for i, piece in enumerate(old.pieces):
        if i in special or piece in new:
            continue
        try:
            text = byte_text(piece) if old.kind == "byte_bpe" else piece
        except (KeyError, UnicodeDecodeError):  # part of a character
            continue
        if backends.HIDDEN not in text:  # a tokenizer.json never gets to see it
            texts.append(text.removeprefix("##").replace("▁", " "))
    for text, a, b in zip(
        texts, old.encode_batch(texts), grown.encode_batch(texts), strict=True
    ):
        if a != b and max(b, default=0) < old.vocab_size:
            raise UserError(f"{flag}: {text!r} would not keep its ids {a}, but get {b}")


def _make(tokenizer: Tokenizer, new: list[NewPiece], flag: str) -> Tokenizer:
    """Create the tokenizer with more pieces, in files of the same kind if possible."""
    files = tokenizer.files
    pieces = [n.piece for n in new]
    if set(files) == {"vocab.txt"}:
        lines = "".join(f"{p}\n" for p in pieces).encode()
        files = {"vocab.txt": files["vocab.txt"] + lines}
    elif set(files) == {"spiece.model"} and tokenizer.kind == "unigram":
        engine: Any = tokenizer.engine
        get_score = engine.processor.get_score
        more = backends.read_model(b"")
        for n in new:
            more.pieces.add(piece=n.piece, score=_score(map(get_score, n.origin)))
        # Repeated fields of a protocol buffer can be appended.
        files = {"spiece.model": files["spiece.model"] + more.SerializeToString()}
    else:
        files = json_files(_grow_json(tokenizer, new))
    reader = tokenizer_files.Reader(flag, None)
    grown = Tokenizer(**reader.make(files, tokenizer.config()))
    assert grown.pieces == [*tokenizer.pieces, *pieces]
    assert grown.roles == tokenizer.roles
    return grown


def _score(old: Iterable[float]) -> float:
    old = list(old)
    return sum(old) + MARGIN * len(old) ** 2


def _grow_json(tokenizer: Tokenizer, new: list[NewPiece]) -> dict[str, Any]:
    data = export_tokenizer.make_json(tokenizer, token_types=False)
    if "tokenizer.json" not in tokenizer.files:
        data["post_processor"] = None  # the export creates it
    model = data["model"]
    first = tokenizer.vocab_size
    if isinstance(model["vocab"], list):  # Unigram: the index is the id
        vocab = model["vocab"]
        vocab += [[p, UNUSED_SCORE] for p in tokenizer.pieces[len(vocab) :]]
        scores = [_score(vocab[i][1] for i in n.origin) for n in new]
        vocab += [[n.piece, s] for n, s in zip(new, scores, strict=True)]
    else:
        # The library numbers added tokens outside the vocabulary from its end on.
        vocab = {t["content"]: t["id"] for t in data["added_tokens"]} | model["vocab"]
        model["vocab"] = vocab | {n.piece: first + i for i, n in enumerate(new)}
        if tokenizer.kind == "byte_bpe":
            model["ignore_merges"] = True
    return data

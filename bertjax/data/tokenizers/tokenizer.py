# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of every kind behind one small interface, each with an identity.

The libraries do the work (backends.py). This module defines the files, the special
pieces, the table of word starts, and when two tokenizers are the same.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.tokenizers import backends, plain_ids, tokenizer_files

# Scripts written without spaces: each of their pieces may begin a word, except SIGNS:
# vowel signs, tones and the like (category M), which belong to the character before.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-"
    "\u3007\u3040-\u30ff\u3100-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff]"
)
SIGNS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u1056-"
    "\u1059\u105e-\u1060\u1062-\u1064\u1067-\u106d\u1071-\u1074\u1082-\u108d\u108f"
    "\u109a-\u109d\u17b4-\u17d3\u17dd\u302a-\u302f\u3099\u309a"
)
HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# The punctuation of these scripts, which is as wide as their characters.
WIDE = "\u3001-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_BEGINS_ALONE = re.compile(f"(?![{SIGNS}]){SPACELESS.pattern}")
_BESIDE_HAN = re.compile(f"(?<=[{HAN}{WIDE}]) | (?=[{HAN}{WIDE}])")
SENTINEL = "<extra_id_{}>"  # T5's names
STREAMS = "streams.json"  # the file with the vocabularies of streams (stream_vocab.py)
# The most frequent sentence ends (data/corpus/sentences.py has all of them).
STOPS = frozenset(".!?…‼⁇⁈⁉؟۔।॥。！？｡．")


@dataclass(eq=False, repr=False)
class Tokenizer:
    """Converts text to ids and back.

    Attributes:
      kind: "wordpiece", "byte_bpe", "unigram", "bpe" or "ids" (plain_ids.py).
      pieces: the piece of each id, as written in the vocabulary.
      lower_case: whether text is lower-cased before it is split.
      roles: ids of the tokens "pad", "unk", "cls", "sep" and "mask"; in GPT-2's
        vocabulary all are <|endoftext|>.
      special: ids of special tokens; those of roles may be missing.
      files: name -> content, from which `load_tokenizer` creates the same tokenizer.
      mask_lstrip: whether a mask in a text includes the space before it; a
        tokenizer.json that knows the special tokens states it itself.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      mask_token: what users write as a mask in a text, "[MASK]" or "<mask>".
      special_ids: ids of all special tokens, i32 [n], ascending.
    """

    kind: str
    pieces: list[str]
    lower_case: bool
    roles: dict[str, int]
    special: Iterable[int]
    files: dict[str, bytes]
    mask_lstrip: bool = True

    def __post_init__(self) -> None:
        ids = (self.roles[role] for role in tokenizer_files.ROLES)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
        self.mask_token = self.pieces[self.mask_id]
        special = {*self.special, *self.roles.values()}
        self.special_ids = np.array(sorted(special), dtype=np.int32)

    @property
    def vocab_size(self) -> int:
        """The number of ids; every id is below it."""
        return len(self.pieces)

    @property
    def has_mask(self) -> bool:
        """Whether the mask is a token of its own, which masked LMs need."""
        return [*self.roles.values()].count(self.mask_id) == 1

    @cached_property
    def replacement_ids(self) -> np.ndarray:
        """All ids that are not special, i32 [n], ascending."""
        every = np.arange(self.vocab_size, dtype=np.int32)
        return every[~np.isin(every, self.special_ids)]

    @cached_property
    def word_starts(self) -> np.ndarray:
        """Whether each piece begins a word, bool [V]; True for special pieces.

        In byte BPE the first word of a text has no mark: the first token of a sentence
        begins a word even if this table says otherwise.
        """
        starts = np.array([self._starts_word(p) for p in self.pieces], dtype=np.bool_)
        starts[self.special_ids] = True
        return starts

    def _starts_word(self, piece: str) -> bool:
        if self.kind == "ids":
            return True
        if self.kind == "wordpiece":
            return not piece.startswith("##")
        text = self.text_of(piece)
        if text is None:
            return piece.startswith("Ġ")
        if text[:1] == "▁" or text[:1].isspace() or _BEGINS_ALONE.match(text):
            return True
        return all(unicodedata.category(c)[0] == "P" for c in text)

    def text_of(self, piece: str) -> str | None:
        """Return the text of a piece; None for a part of a character (byte BPE)."""
        try:
            return byte_text(piece) if self.kind == "byte_bpe" else piece
        except (KeyError, UnicodeDecodeError):
            return None

    @cached_property
    def sentinel_ids(self) -> np.ndarray:
        """Ids of <extra_id_0>, <extra_id_1>, ..., i32 [n], up to the first missing."""
        ids = {self.pieces[i]: i for i in self.special_ids.tolist()}
        found = takewhile(ids.__contains__, map(SENTINEL.format, count()))
        return np.array([ids[name] for name in found], np.int32)

    @cached_property
    def sentence_ends(self) -> np.ndarray:
        """Whether each piece is or ends with a full stop or the like, bool [V].

        False for special pieces, and for all pieces of a vocabulary of ids.
        """
        if self.kind == "ids":
            return np.zeros(self.vocab_size, bool)
        texts = [self.text_of(piece) or "" for piece in self.pieces]
        ends = np.array([text[-1:] in STOPS for text in texts], np.bool_)
        ends[self.special_ids] = False
        return ends

    @cached_property
    def identity(self) -> str:
        """sha256 of everything that decides ids; the paths of files do not count."""
        facts = [self.kind, self.lower_case, self.roles, self.special_ids.tolist()]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for name in sorted(self.files):
            content = hashlib.sha256(self.files[name]).hexdigest()
            digest.update(f"{name} {content}\n".encode())
        return digest.hexdigest()

    @property
    def joins_with_space(self) -> bool:
        """Whether a text's leading space matters to its ids (byte BPE)."""
        return self.kind == "byte_bpe"

    @property
    def has_sentences(self) -> bool:
        """Whether a paragraph is split into sentences; False if it holds ids."""
        return self.kind != "ids"

    @cached_property
    def engine(self) -> backends.Engine:
        """The library's object, created at first use."""
        # The work is divided among processes, not threads (token_store/encoding.py).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        unk = self.pieces[self.unk_id]
        special = set(self.special_ids.tolist()) - {self.unk_id}
        if plain_ids.FILE in self.files:
            content = self.files[plain_ids.FILE]
            return plain_ids.IdsEngine(plain_ids.pieces(content), self.unk_id, content)
        if "spiece.model" in self.files:
            model = self.files["spiece.model"]
            return backends.SentencePieceEngine(model, special, self.lower_case)
        if "tokenizer.json" in self.files:
            data = json.loads(self.files["tokenizer.json"])
            return backends.json_engine(data, {self.pieces[i] for i in special} | {unk})
        if "merges.txt" in self.files:
            merges = backends.read_merges(self.files["merges.txt"].decode())
            return backends.byte_bpe_engine(self.pieces, merges, unk, self.lower_case)
        return backends.wordpiece_engine(self.pieces, unk, self.lower_case)

    def __getstate__(self) -> dict[str, Any]:
        libraries = ("engine", "_library")
        return {k: v for k, v in self.__dict__.items() if k not in libraries}

    def config(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json that every tokenizer has."""
        tokens = {f"{role}_token": self.pieces[i] for role, i in self.roles.items()}
        return {"do_lower_case": self.lower_case, **tokens}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around it.

        "[MASK]" in a text is plain text; `unk_id` is the only special id that occurs.

            text     una   ##ffa  ##ble      [   mask      ]      "Unaffable [MASK]"
            ids    14477   20961   3468   1031   7308   1033
        """
        return self.engine.encode_batch(texts) if texts else []

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, as `encode_batch` does."""
        return self.encode_batch([text])[0]

    def encode_with_offsets(
        self, texts: list[str]
    ) -> list[tuple[list[int], list[backends.Span]]]:
        """Return ids, as `encode_batch` does, and the characters [begin, end) of each.

        Places are counted in the text as given, before it is lower-cased or normalized.
        If a space belongs to a piece (byte BPE, SentencePiece), it is in the span.
        Pieces that share a character (its bytes, or several pieces from normalizing it)
        all have its whole span; a piece that stands for nothing has an empty span.

        Worked example: "Unaffable  Élan":

            pieces       una     ##ffa     ##ble        el      ##an
            ids        14477     20961      3468      3449      2319
            spans     (0, 3)    (3, 6)    (6, 9)  (11, 13)  (13, 15)
        """
        return self.engine.encode_spans(texts) if texts else []

    def encode_with_masks(self, text: str) -> list[int]:
        """Return the ids of a text in which `mask_token` is a mask.

        The other special tokens and the sentinels are special when written in the text,
        too, as in transformers: "a [MASK] [SEP] b", "a <extra_id_0> b".

        A mask stands for " word" and includes the space before it, unless the files say
        otherwise (`mask_lstrip`). If a tokenizer.json states the spaces itself, the
        library finds the tokens.

            text       a  [MASK]     .      "a [MASK]."
            ids     1037     103  1012
        """
        if self._library is not None:
            return backends.encode_texts(self._library.encode_batch, [text])[0].ids
        ids_of_marks = (*self.roles.values(), *self.sentinel_ids.tolist())
        marks = {self.pieces[i]: i for i in ids_of_marks}
        longest_first = sorted(map(re.escape, marks), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text)
        ids = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(marks[part])
                continue
            if self.mask_lstrip and parts[i + 1 : i + 2] == [self.mask_token]:
                part = part.rstrip()
            if part:
                after = i > 0 and not part[0].isspace()
                ids += self.engine.encode_batch([part], after)[0]
        return ids

    @cached_property
    def _library(self) -> Any:
        """The library's object, if a tokenizer.json knows all special tokens."""
        data = json.loads(self.files.get("tokenizer.json", b"{}"))
        known = {t["content"] for t in data.get("added_tokens") or []}
        if not known.issuperset(self.pieces[i] for i in self.roles.values()):
            return None
        return backends.make_library({**data, "post_processor": None})

    @cached_property
    def _parts_han(self) -> bool:
        """Whether ids do not show if there was a space next to a Chinese character."""
        if self.kind != "wordpiece":
            return False
        close, apart = self.encode_batch(["一一", "一 一"])
        return close == apart

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text; special tokens are written as they are.

        WordPiece separates Chinese characters, and with accents stripped splits Korean
        syllables; both are joined again, as people write: 巴黎2024年.
        """
        special = set(self.special_ids.tolist())
        texts: list[str] = []
        for is_special, run in groupby(map(int, ids), special.__contains__):
            if is_special:
                texts += [self.pieces[i] for i in run]
            else:
                texts.append(self.engine.decode(list(run)))
        text = " ".join(t.strip() for t in texts)
        if _BESIDE_HAN.search(text) and self._parts_han:
            text = _BESIDE_HAN.sub("", text)
        if self.kind == "wordpiece" and self.lower_case:
            text = unicodedata.normalize("NFC", text)
        return text

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write files with Hugging Face's names, for `load_tokenizer(directory)`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = self.config()
        if not self.mask_lstrip:
            config["mask_token"] = {"content": self.mask_token, "lstrip": False}
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        (directory / tokenizer_files.CONFIG).write_text(
            json.dumps(config, indent=2) + "\n", "utf-8"
        )


def load_tokenizer(
    path: str | os.PathLike[str],
    lower_case: bool | None = None,
    key: str = "data.vocab",
) -> Tokenizer:
    """Load a tokenizer from a file or a directory.

    Args:
      path: vocab.txt (the line number is the id; with a merges.txt beside it: byte
        BPE), vocab.json or merges.txt (each with the other beside it), a SentencePiece
        .model, tokenizer.json, a directory with one of these, or a vocabulary of ids:
        "ids:N", "ids:FILE" (bertjax/data/tokenizers/plain_ids.py).
      lower_case: None follows the files. If they do not state it, it is True only if no
        piece of a WordPiece vocabulary has a capital, except those in [...] and <...>
        (at most a tenth of the pieces, beside a TensorFlow checkpoint).
      key: the config key or flag to name in messages.

    Raises UserError for a file that is missing, empty, broken or lacks a special token.
    """
    reader = tokenizer_files.Reader(f"{key}={os.fspath(path)}", lower_case)
    if os.fspath(path).startswith("ids:"):
        files = {plain_ids.FILE: plain_ids.read(os.fspath(path), key)}
        return Tokenizer(**reader.make(files, {}))
    entry = reader.entry(Path(path))
    try:
        tokenizer = Tokenizer(**reader.read(entry))
        # Makes the library read the files now, so that a message can name them.
        tokenizer.encode("0")
    except BaseException as e:
        is_panic = backends.is_panic(e)
        is_clear = isinstance(e, UserError) and not isinstance(e, backends.TextError)
        is_of_file = isinstance(e, Exception) and not isinstance(e, MemoryError)
        if is_clear or not (is_panic or is_of_file):
            raise
        if entry.suffix == ".model":
            reader.refuse(f"{entry.name} is not a SentencePiece model")
        reason = "a part of it has the wrong type"
        # Quote the libraries' errors; others come from code that trusted the file.
        if str(e) and (type(e) in (Exception, ValueError) or is_panic):
            reason = str(e).splitlines()[0]
        reader.refuse(f"{entry.name} is not a tokenizer that can be read ({reason})")
    if (streams := Path(path) / STREAMS).is_file():
        tokenizer.files[STREAMS] = streams.read_bytes()
    return tokenizer


def train_tokenizer(
    texts: Iterable[str],
    kind: str,
    vocab_size: int,
    lower_case: bool | None = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """Train a tokenizer of `kind` on texts; the same texts give the same bytes.

    Args:
      texts: paragraphs or sentences; it is trained on a bounded, evenly spread sample.
      kind: "unigram", "bpe" (sentencepiece), "wordpiece", "byte_bpe" (tokenizers).
      vocab_size: pieces, special ones included; fewer if the text yields no more.
      lower_case: None means True except for byte_bpe.
      out_dir: where to save it, or None.

    Raises UserError for an unknown kind, no text, or a `vocab_size` too small for it.
    """
    from bertjax.data.tokenizers import train_vocab

    if lower_case is None:
        lower_case = kind != "byte_bpe"
    files = train_vocab.train(texts, kind, vocab_size, lower_case)
    reader = tokenizer_files.Reader(f"data.vocab_size={vocab_size}", lower_case)
    tokenizer = Tokenizer(**reader.make(files, {}))
    if out_dir is not None:
        tokenizer.save(out_dir)
    return tokenizer


# The printable character with which GPT-2 writes each byte -> the byte.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)}.difference(_PRINTABLE))
BYTES = {chr(b): b for b in _PRINTABLE}
BYTES |= {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def byte_text(piece: str) -> str:
    """Return the text of a byte-level piece.

    Raises UnicodeDecodeError for part of a character, KeyError for another kind of
    piece."""
    return bytes(BYTES[c] for c in piece).decode("utf-8")

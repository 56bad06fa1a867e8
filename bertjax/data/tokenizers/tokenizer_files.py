# SPDX-License-Identifier: Apache-2.0
"""Read the files of a tokenizer: its pieces, and which of them are special."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from bertjax import UserError
from bertjax.data.tokenizers import (
    backends,
    plain_ids,
    tokenizer_json,
    vocab_files,
)
from bertjax.data.tokenizers.tokenizer_json import json_files

ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
RESERVED = re.compile(
    r"\[unused\d+\]|<unused_?\d+>|unused\d+|madeupword\d+|<\|endoftext\|>"
    r"|<extra_id_\d+>|<special\d+>|\[BOS\]|\[EOS\]"
)
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
TOKEN_MAP = "special_tokens_map.json"
ENTRIES = (
    "tokenizer.json, vocab.txt, vocab.json or vocab.txt with merges.txt, or a .model"
)


class Reader:
    """Reads files into the arguments of `Tokenizer`; `where` begins every message."""

    def __init__(self, where: str, lower_case: bool | None) -> None:
        self.where = where
        self.lower_case = lower_case

    def refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.where}: {why}") from None

    def entry(self, path: Path) -> Path:
        """Return the file to read first."""
        folder = path
        if path.is_dir():
            names = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model")
            entries = [path / n for n in (*names, plain_ids.FILE)]
            entries = [p for p in entries if p.is_file()]
            entries = entries or sorted(path.glob("*.model"))
            if not entries:
                self.refuse(f"the directory holds no tokenizer (looked for {ENTRIES})")
            if entries[0].suffix == ".model" and len(entries) > 1:
                number = len(entries)
                self.refuse(f"the directory holds {number} .model files; name one")
            path = entries[0]
        if not path.is_file():
            name = f"{path.name} is " if path != folder else ""
            missing = not path.exists()
            self.refuse("no such file" if missing else f"{name}not a regular file")
        if path.name == "merges.txt":
            near = [path.with_name(n) for n in ("vocab.json", "vocab.txt")]
            path = next((p for p in near if p.is_file()), None)
            if path is None:
                self.refuse("there is no vocab.json or vocab.txt beside it")
        if path.suffix not in (".txt", ".json", ".model"):
            self.refuse(f"not a known kind of vocabulary; known: {ENTRIES}")
        return path

    def bytes(self, path: Path) -> bytes:
        return vocab_files.read_bytes(path, f"{self.where}: {path.name}")

    def text(self, path: Path) -> str:
        return vocab_files.read_text(path, f"{self.where}: {path.name}")

    def json(self, path: Path) -> dict[str, Any]:
        try:
            data = json.loads(self.text(path))
        except (ValueError, RecursionError) as e:
            self.refuse(f"{path.name} is not valid JSON ({e})")
        if not isinstance(data, dict):
            self.refuse(f"{path.name} holds no JSON object")
        return data

    def beside(self, path: Path, name: str) -> dict[str, Any]:
        """Read the JSON file of that name beside a file; {} if there is none."""
        other = path.with_name(name)
        return self.json(other) if other.is_file() else {}

    def read(self, path: Path) -> dict[str, Any]:
        config = self.options(path)
        merges = path.with_name("merges.txt")
        if path.name == plain_ids.FILE:
            return self.make(
                {plain_ids.FILE: self.bytes(path), **self.added(path)}, config
            )
        if path.suffix == ".model":
            return self.make(self.sentencepiece(path, config), config)
        if path.suffix == ".json":
            data = self.json(path)
            if isinstance(data.get("model"), dict):
                return self.make(json_files(data), config)
            if path.name == "tokenizer.json":
                self.refuse("tokenizer.json holds no `model`")
            if not merges.is_file():
                self.refuse("there is no merges.txt beside it")
            if sorted(data.values(), key=str) != sorted(range(len(data)), key=str):
                self.refuse(f"the ids are not the numbers 0 to {len(data) - 1}")
            pieces = sorted(data, key=data.__getitem__)
        else:
            pieces = self.lines(path)
            if "do_lower_case" not in config and any(path.parent.glob("*.index")):
                # Nothing beside a TensorFlow checkpoint states it; check_tokenizer in
                # interop/hf_read.py uses the same share.
                capitals = sum(p != p.lower() and p[:1] != "[" for p in pieces)
                config["do_lower_case"] = capitals <= len(pieces) / 10
        if merges.is_file():
            files = byte_bpe_files(pieces, backends.read_merges(self.text(merges)))
        else:
            files = {"vocab.txt": ("\n".join(pieces) + "\n").encode()}
        return self.make({**files, **self.added(path)}, config)

    def options(self, path: Path) -> dict[str, Any]:
        """Read the options that change ids from tokenizer_config.json beside a file."""
        config, tokens = self.beside(path, CONFIG), self.beside(path, TOKEN_MAP)
        family = self.beside(path, "config.json").get("model_type")
        try:
            ours = {
                tokenizer_json.LSTRIP: tokenizer_json.mask_lstrip(
                    config, tokens, family
                ),
                tokenizer_json.END: tokenizer_json.end_piece(config, family),
            }
            return tokenizer_json.read_options(config, family) | ours
        except ValueError as e:
            self.refuse(f"{CONFIG}: {e}")

    def sentencepiece(self, path: Path, config: dict[str, Any]) -> dict[str, bytes]:
        """Read a .model; some families do more than it states, and a tokenizer.json can
        express that."""
        from bertjax.data.tokenizers import sentencepiece_json

        model = self.bytes(path)
        family = self.beside(path, "config.json").get("model_type", "")
        if path.with_name("albert_config.json").is_file():
            family = "albert"  # a checkpoint as Google released it
        named = f"{config.get('tokenizer_class', '')} {family}".lower()
        if "mbart" in named:
            self.refuse(
                "mBART's pieces are more than its .model has; a tokenizer.json beside "
                "it, which transformers writes, has them all"
            )
        if path.name == "sentencepiece.bpe.model" and "camembert" not in named:
            data = sentencepiece_json.from_xlm_roberta(model)
        elif "albert" in named:
            lower = config.get("do_lower_case", True)
            accents = config.get("keep_accents", False)
            data = sentencepiece_json.from_albert(model, lower, accents)
        elif tokenizer_json.class_of(config, family) == "t5":
            extra = config.get("extra_ids", 100)
            if type(extra) is not int or not 0 <= extra <= 10_000:
                self.refuse(
                    f"{CONFIG}: extra_ids={extra!r} is not a number of sentinels"
                )
            data = sentencepiece_json.from_t5(model, extra)
        else:
            return {"spiece.model": model, **self.added(path)}
        return json_files(data)

    def added(self, path: Path) -> dict[str, bytes]:
        """Read the added_tokens.json beside a vocabulary, whose pieces come last."""
        if not path.with_name(ADDED).is_file():
            return {}
        return {ADDED: json.dumps(self.beside(path, ADDED)).encode()}

    def lines(self, path: Path) -> list[str]:
        """Read one piece per line."""
        pieces = vocab_files.read_lines(path, f"{self.where}: {path.name}")
        seen: dict[str, int] = {}
        for number, piece in enumerate(pieces, 1):
            if not piece:
                self.refuse(f"line {number} is empty")
            if piece in seen:
                first = seen[piece]
                self.refuse(f"piece {piece!r} stands on lines {first} and {number}")
            seen[piece] = number
        return pieces

    def make(self, files: dict[str, bytes], config: dict[str, Any]) -> dict[str, Any]:
        """Convert canonical files and a tokenizer_config.json to arguments."""
        lower = self.lower_case
        if lower is None and isinstance(config.get("do_lower_case"), bool):
            lower = config["do_lower_case"]
        special: set[int] = set()
        if plain_ids.FILE in files:
            if self.lower_case:
                self.refuse("data.lower_case=True, but ids are not text")
            kind, pieces, lower = "ids", plain_ids.pieces(files[plain_ids.FILE]), False
        elif "spiece.model" in files:
            kind, pieces, special, folds = _sentencepiece(files["spiece.model"])
            if folds and self.lower_case is False:
                self.refuse("data.lower_case=False, but the model itself folds case")
            lower = folds or bool(lower)
        elif "tokenizer.json" in files:
            data = json.loads(files["tokenizer.json"])
            kind, pieces, special = self.check_json(data)
            normalizer = data.get("normalizer")
            own = tokenizer_json.lowers(normalizer)
            if lower is None or (self.lower_case is None and own is None):
                lower = bool(own)
            data["normalizer"] = tokenizer_json.set_lower(normalizer, lower)
            files = json_files(tokenizer_json.set_options(data, config))
        elif "merges.txt" in files:
            vocab = json.loads(files["vocab.json"])
            kind, pieces, lower = "byte_bpe", list(vocab), bool(lower)
        else:
            kind, pieces = "wordpiece", files["vocab.txt"].decode().split("\n")[:-1]
            if lower is None:
                words = (p for p in pieces if not re.fullmatch(r"\[.+\]|<.+>", p))
                lower = all(p == p.lower() for p in words)
        special |= self.append_added(pieces, json.loads(files.get(ADDED, b"{}")))
        numbers = {p: i for i, p in enumerate(pieces)}
        roles = {role: self.role(role, numbers, config) for role in ("mask", *ROLES)}
        if kind in ("unigram", "bpe") and config.get("add_prefix_space") is False:
            self.refuse(f"{CONFIG}: add_prefix_space=false is not supported for {kind}")
        if "vocab.txt" in files or "vocab.json" in files:
            unk = pieces[roles["unk"]]
            files = tokenizer_json.with_options(
                files, pieces, unk, lower, special, config
            )
        if kind != "ids":
            reserved = RESERVED.fullmatch
            special |= {i for i, p in enumerate(pieces) if not p or reserved(p)}
        lstrip = kind != "byte_bpe" or config.get(tokenizer_json.LSTRIP, True)
        return dict(
            kind=kind,
            pieces=pieces,
            lower_case=lower,
            roles=roles,
            special=special,
            files=files,
            mask_lstrip=lstrip,
        )

    def check_json(self, data: dict[str, Any]) -> tuple[str, list[str], set[int]]:
        """Return kind, pieces and special ids of a tokenizer.json, or refuse it."""
        try:
            kind, pieces, special = tokenizer_json.read_pieces(data)
            tokenizer_json.refuse_growth(data)
        except ValueError as e:
            self.refuse(f"tokenizer.json: {e}")
        if kind not in ("wordpiece", "byte_bpe", "unigram", "bpe"):
            name = data["model"].get("type")
            self.refuse(
                f"models of type {name} are not supported, but WordPiece, BPE and "
                "Unigram are"
            )
        return kind, pieces, special

    def append_added(self, pieces: list[str], added: dict[str, Any]) -> set[int]:
        """Append the pieces of added_tokens.json to `pieces`; return their ids."""
        for piece, i in added.items():
            if type(i) is not int or not piece:
                self.refuse(f"{ADDED}: {piece!r} cannot have id {i!r}")
        for piece, i in sorted(added.items(), key=lambda item: item[1]):
            if i == len(pieces) and piece not in pieces:
                pieces.append(piece)
            if pieces[i : i + 1] != [piece]:
                self.refuse(f"{ADDED}: {piece!r} cannot have id {i}")
        return set(added.values())

    def role(self, role: str, numbers: dict[str, int], config: dict[str, Any]) -> int:
        """Return the id of a role's token; in GPT-2's and T5's files, a role without a
        token has the token that ends a text."""
        keys, more = [role], []
        if end := config.get(tokenizer_json.END):
            keys += {"cls": ["bos"], "sep": ["eos"]}.get(role, [])
            more = [end, *tokenizer_json.ENDS.values()]
        named = [name for key in keys for name in _named(config, key)]
        names = dict.fromkeys([*named, *ROLES[role], *more])
        for name in names:
            if name in numbers:
                return numbers[name]
        why = f"the vocabulary has no {role} token ({' or '.join(names)})"
        if tokenizer_json.ENDS["gpt2"] in numbers:
            why += f'; of GPT-2\'s, {CONFIG} says "tokenizer_class": "GPT2Tokenizer"'
        self.refuse(why)


def _named(config: dict[str, Any], role: str) -> list[str]:
    """Return the token of a role in tokenizer_config.json: a list of one, or none."""
    token = config.get(f"{role}_token")
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def byte_bpe_files(
    pieces: list[str], merges: list[tuple[str, str]]
) -> dict[str, bytes]:
    """Return vocab.json (ids 0, 1, ... in the order of `pieces`) and merges.txt."""
    vocab = {p: i for i, p in enumerate(pieces)}
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False).encode(),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
    }


def _sentencepiece(model: bytes) -> tuple[str, list[str], set[int], bool]:
    """Return kind, pieces, special ids, and whether the model itself folds case."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=model)
    proto = backends.read_model(model)
    kinds = proto.SentencePiece
    plain = (kinds.NORMAL, kinds.USER_DEFINED, kinds.BYTE)
    special = {i for i, piece in enumerate(proto.pieces) if piece.type not in plain}
    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower()
    folds = processor.normalize("A").endswith("a")
    return kind, [piece.piece for piece in proto.pieces], special, folds

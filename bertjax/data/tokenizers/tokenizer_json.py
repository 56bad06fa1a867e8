# SPDX-License-Identifier: Apache-2.0
"""The contents of a tokenizer.json: its pieces, harmful steps, and explicit options.

Options in tokenizer_config.json change ids. Which of them count follows transformers 5
(models/bert/tokenization_bert.py, .../roberta/tokenization_roberta.py): in the classes
of BERT's and RoBERTa's families, options override tokenizer.json; for the class without
a family, only tokenizer.json counts.
"""

import json
from collections.abc import Iterator
from typing import Any

from bertjax.data.tokenizers import backends

ADDING = "Replace", "Prepend"  # steps that insert text given in the file
GROWTH = 100  # characters that steps may make of one; Unicode's own make at most 18
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ROOM = 1 << 16  # ids without a piece that are allowed besides ten times the pieces
# Options of BERT's classes -> options of the library's BertNormalizer.
NORMALIZING = {
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
PREFIX = "add_prefix_space"
LSTRIP = "mask_lstrip"  # our key: whether the mask includes the space before it
END = "end_piece"  # our key: the piece with the roles for which there is no other piece
# Families whose vocabularies lack some of BERT's special pieces -> their end of a text.
ENDS = {"gpt2": "<|endoftext|>", "t5": "</s>"}


def read_pieces(data: dict[str, Any]) -> tuple[str, list[str], set[int]]:
    """Return kind, pieces and special ids of a tokenizer.json.

    Raises ValueError for pieces and ids that are invalid.

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
    """Raise ValueError if the steps that add to a text make it GROWTH times as long.

    A few steps that multiply each other would fill the memory at the first text. They
    are applied in sequence to their own patterns, and to each character of these.
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
    """Yield the steps of a normalizer or decoder, with sequences flattened.

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


def read_options(config: dict[str, Any], family: str | None) -> dict[str, Any]:
    """Return a tokenizer_config.json without options its class ignores, with defaults.

    family: config.json's model_type, which is used if no class is named. Raises
    ValueError for unsupported values.

    >>> read_options({"do_lower_case": True}, "roberta")
    {'add_prefix_space': False}
    """
    named = class_of(config, family)
    ignored: list[str] = []
    if named in ("pretrained", "tokenizersbackend"):
        ignored = ["do_lower_case", *NORMALIZING, PREFIX]
    elif named in ("roberta", "xlmroberta", "gpt2", "bart", "t5"):
        ignored = ["do_lower_case", *NORMALIZING]
    config = {key: value for key, value in config.items() if key not in ignored}
    if named in ("bert", "distilbert", "electra"):
        config = {"strip_accents": None, "tokenize_chinese_chars": True, **config}
    elif named in ("roberta", "gpt2", "bart"):
        config = {PREFIX: False, **config}
    if (words := config.get("word_tokenizer_type")) not in (None, "basic"):
        raise ValueError(f"word_tokenizer_type={words!r} is not supported")
    for key in (*NORMALIZING, PREFIX):
        if not isinstance(config.get(key), bool | None):
            raise ValueError(f"{key}={config[key]!r} is neither true nor false")
    return config


def class_of(config: dict[str, Any], family: str | None) -> str:
    """Return the family of the tokenizer, in the form of `_class_name`."""
    return _class_name(config.get("tokenizer_class") or family)


def _class_name(name: Any) -> str:
    """Return the common form of a class name and a model_type: "xlmroberta"."""
    name = str(name).lower().replace("-", "")
    return name.removesuffix("fast").removesuffix("tokenizer")


def end_piece(config: dict[str, Any], family: str | None) -> str:
    """Return the piece that ends a text, in families with few special pieces.

    tokenizer_config.json, or config.json's model_type, names the family; "" for others.

    >>> end_piece({"tokenizer_class": "GPT2TokenizerFast"}, "t5"), end_piece({}, "bert")
    ('<|endoftext|>', '')
    """
    named = map(_class_name, (config.get("tokenizer_class"), family))
    found = next((ENDS[name] for name in named if name in ENDS), "")
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return eos if found and isinstance(eos, str) else found


def mask_lstrip(
    config: dict[str, Any], token_map: dict[str, Any], family: str | None
) -> bool:
    """Return whether the mask includes the space before it, without a tokenizer.json.

    In transformers 5 it does if its files say so, and RoBERTa's released files do not.
    For a vocabulary without a class, which is not one of theirs, it does.

    token_map: special_tokens_map.json.

    >>> mask_lstrip({}, {}, "roberta"), mask_lstrip({}, {}, None)
    (False, True)
    """
    mask = token_map.get("mask_token", config.get("mask_token"))
    name = mask.get("content") if isinstance(mask, dict) else mask
    decoder = config.get("added_tokens_decoder")
    for token in decoder.values() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("content") in (name, "<mask>"):
            mask = token
    if isinstance(mask, dict) and "lstrip" in mask:
        return bool(mask["lstrip"])
    return not (config.get("tokenizer_class") or family)


def json_files(data: dict[str, Any]) -> dict[str, bytes]:
    text = json.dumps(data, ensure_ascii=False, sort_keys=True)
    return {"tokenizer.json": text.encode()}


def special_tokens(ids: dict[str, int]) -> list[dict[str, Any]]:
    """Return the `added_tokens` entries of special pieces, {piece: id}, in order."""
    flags = dict.fromkeys(FLAGS, False) | {"special": True}
    return [{"id": i, "content": piece, **flags} for piece, i in ids.items()]


def set_options(data: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that follows the options of tokenizer_config.json."""
    normalizer, words = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    if normalizer.get("type") == "BertNormalizer":
        options = {to: config[key] for key, to in NORMALIZING.items() if key in config}
        data = {**data, "normalizer": {**normalizer, **options}}
    if words.get("type") == "ByteLevel" and "add_prefix_space" in config:
        prefix = bool(config["add_prefix_space"])
        data = {**data, "pre_tokenizer": {**words, "add_prefix_space": prefix}}
    return data


def with_options(
    files: dict[str, bytes],
    pieces: list[str],
    unk: str,
    lower: bool,
    added: set[int],
    config: dict[str, Any],
) -> dict[str, bytes]:
    """Return a vocabulary's files, as one tokenizer.json if options change its ids.

    added: ids of the special pieces of added_tokens.json.
    """
    if "merges.txt" in files:
        if not config.get("add_prefix_space"):
            return files
        merges = backends.read_merges(files["merges.txt"].decode())
        engine = backends.byte_bpe_engine(pieces, merges, unk, lower)
    else:
        accents = config.get("strip_accents")
        chinese = config.get("tokenize_chinese_chars", True)
        if accents in (None, lower) and chinese:
            return files
        engine = backends.wordpiece_engine(pieces, unk, lower)
    data = json.loads(engine.tokenizer.to_str())
    data["added_tokens"] = special_tokens({pieces[i]: i for i in sorted(added)})
    return json_files(set_options(data, config))


def lowers(normalizer: dict[str, Any] | None) -> bool | None:
    """Return whether a normalizer lower-cases; None if no step of it is about case."""
    for step in steps(normalizer):
        if step["type"] == "BertNormalizer":
            return bool(step["lowercase"])
        if step["type"] == "Lowercase":
            return True
    return None


def set_lower(normalizer: dict[str, Any] | None, lower: bool) -> dict[str, Any] | None:
    """Return a normalizer that lower-cases or does not, as `lower` says.

    >>> set_lower({"type": "Lowercase"}, False) is None
    True
    """
    if bool(lowers(normalizer)) == lower:
        return normalizer
    if normalizer is None:
        return {"type": "Lowercase"}
    kind = normalizer["type"]
    if kind == "BertNormalizer":
        return {**normalizer, "lowercase": lower}
    if kind == "Lowercase":
        return None
    inner = normalizer["normalizers"] if kind == "Sequence" else [normalizer]
    if lowers(normalizer) is None:
        inner = [{"type": "Lowercase"}, *inner]
    else:
        inner = [set_lower(n, lower) if lowers(n) is not None else n for n in inner]
    return {"type": "Sequence", "normalizers": [n for n in inner if n]}

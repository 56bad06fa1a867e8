# SPDX-License-Identifier: Apache-2.0
"""Write a tokenizer for Hugging Face: tokenizer.json and tokenizer_config.json.

Whatever library created the tokenizer, the file is one of the `tokenizers` library,
which AutoTokenizer of transformers 4 and 5 opens without any code of ours.
"""

import json
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.data.tokenizers.backends import make_library
from bertjax.data.tokenizers.sentencepiece_json import from_sentencepiece
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.tokenizer_files import ADDED


def write_tokenizer(
    tokenizer: Tokenizer,
    directory: Path,
    token_types: bool,
    max_length: int,
    separators: int | None = None,
    causal: str = "",
    seq2seq: str = "",
    has_bare_texts: bool | None = None,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and, for WordPiece, vocab.txt.

    token_types: whether the model has a second type, for the second text of a pair.
    separators: how many separators a finetuned model has seen between two texts.
    causal: the model_type of a causal language model, whose texts are prompts: they
    begin with [CLS] if the vocabulary has one, and nothing follows them. seq2seq: the
    model_type of an encoder-decoder, whose texts end with [SEP]. has_bare_texts:
    whether these begin without [CLS]; None: only those of "t5" do.

    Raises UserError for a tokenizer that is not one of text.
    """
    inputs = ["input_ids", *["token_type_ids"] * token_types, "attention_mask"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        **tokenizer.config(),
    }
    if causal or seq2seq:
        config |= {"bos_token": config["cls_token"], "eos_token": config["sep_token"]}
    own = {"gpt2": ("cls", "sep", "mask"), "t5": ("cls", "sep", "mask", "bos")}
    if not tokenizer.has_mask:  # config.json states these roles
        for role in own.get(causal or seq2seq, ()):
            del config[f"{role}_token"]
    is_bare = seq2seq == "t5" if has_bare_texts is None else has_bare_texts
    data = make_json(tokenizer, token_types, separators, bool(causal), is_bare)
    if "add_prefix_space" in (words := data.get("pre_tokenizer") or {}):
        # Otherwise transformers 4 would use its default.
        config["add_prefix_space"] = words["add_prefix_space"]
    text = json.dumps(data, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, "utf-8")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", "utf-8"
    )
    if "vocab.txt" in tokenizer.files:
        (directory / "vocab.txt").write_bytes(tokenizer.files["vocab.txt"])


def separators_of(tokenizer: Tokenizer) -> int | None:
    """Return how many separators its tokenizer.json puts between two texts, or None."""
    data = json.loads(tokenizer.files.get("tokenizer.json", b"{}"))
    if not data.get("post_processor"):
        return None
    ids = make_library(data).encode("a", "b").ids
    return max(ids.count(tokenizer.sep_id) - 1, 0) or None


def special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that its tokenizer.json puts before and after a text.

    None if the files of the tokenizer do not state them.
    """
    data = json.loads(tokenizer.files.get("tokenizer.json", b"{}"))
    if not data.get("post_processor"):
        return None
    library = make_library(data)
    ids = library.encode("a").ids
    inner = library.encode("a", add_special_tokens=False).ids
    at = next(i for i in range(len(ids)) if ids[i : i + len(inner)] == inner)
    return ids[:at], ids[at + len(inner) :]


def make_json(
    tokenizer: Tokenizer,
    token_types: bool,
    separators: int | None = None,
    is_causal: bool = False,
    is_bare: bool = False,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the same ids for every text.

    Its special pieces are special when written in a text, because users of transformers
    expect that of "[MASK]". is_causal, is_bare: as in `write_tokenizer`.
    """
    from tokenizers import AddedToken

    if tokenizer.kind == "ids":
        raise UserError("--format=hf: this vocabulary is one of ids, not of text")
    if "tokenizer.json" in tokenizer.files:
        data = json.loads(tokenizer.files["tokenizer.json"])
    elif "spiece.model" in tokenizer.files:
        data = from_sentencepiece(tokenizer.files["spiece.model"], tokenizer.lower_case)
    else:
        data = json.loads(tokenizer.engine.tokenizer.to_str())
    library = make_library(data)
    known = {t["content"] for t in data["added_tokens"] if t["special"]}
    ours = {tokenizer.pieces[i] for i in tokenizer.roles.values()}
    ours |= json.loads(tokenizer.files.get(ADDED, b"{}")).keys()
    # The mask stands for " word", including the space.
    spaces = tokenizer.kind != "wordpiece" and tokenizer.mask_lstrip
    for i in tokenizer.special_ids.tolist():
        piece = tokenizer.pieces[i]
        if piece in known or not piece:
            continue
        if piece in ours or library.token_to_id(piece) is None:
            blank = spaces and i == tokenizer.mask_id
            token = AddedToken(piece, lstrip=blank, normalized=False, special=True)
            library.add_special_tokens([token])
    for i, piece in enumerate(tokenizer.pieces):
        if piece and library.token_to_id(piece) != i:
            raise UserError(f"--format=hf: {piece!r} would not have its id {i}")
    data = json.loads(library.to_str())
    own = data.get("post_processor")
    if is_causal:
        ends = own and make_library(data).encode("a").ids[-1:] == [tokenizer.sep_id]
        if ends or not own:
            data["post_processor"] = _open_template(tokenizer)
    elif is_bare:
        if not own:
            data["post_processor"] = _closed_template(tokenizer)
    elif separators not in (None, separators_of(tokenizer)) or not own:
        data["post_processor"] = _template(tokenizer, token_types, separators or 1)
    return data


def _template(
    tokenizer: Tokenizer, token_types: bool, separators: int
) -> dict[str, Any]:
    """Return the post-processor that puts [CLS] and [SEP] around one or two texts."""
    cls, sep = (tokenizer.pieces[i] for i in (tokenizer.cls_id, tokenizer.sep_id))
    two = int(token_types)
    separator = _special(sep)
    single = [_special(cls), _text("A"), separator]
    second = [_text("B", two), _special(sep, two)]
    pair = [*single, *[separator] * (separators - 1), *second]
    return _processor(single, pair, tokenizer)


def _open_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the post-processor that puts [CLS] before a text, unless it is [SEP]."""
    first = [_special(tokenizer.pieces[tokenizer.cls_id])]
    single = [*first * (tokenizer.cls_id != tokenizer.sep_id), _text("A")]
    return _processor(single, [*single, _text("B")], tokenizer)


def _closed_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the post-processor that puts [SEP] after each of one or two texts."""
    end = _special(tokenizer.pieces[tokenizer.sep_id])
    single = [_text("A"), end]
    return _processor(single, [*single, _text("B"), end], tokenizer)


def _special(piece: str, kind: int = 0) -> dict[str, Any]:
    return {"SpecialToken": {"id": piece, "type_id": kind}}


def _text(name: str, kind: int = 0) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}


def _processor(
    single: list[dict[str, Any]], pair: list[dict[str, Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    ids = {tokenizer.pieces[i]: i for i in (tokenizer.cls_id, tokenizer.sep_id)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            piece: {"id": piece, "ids": [i], "tokens": [piece]}
            for piece, i in ids.items()
        },
    }

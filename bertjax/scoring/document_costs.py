# SPDX-License-Identifier: Apache-2.0
"""Documents that language models are scored on, and the totals of what they cost.

Which text is scored depends on the text and the flags alone: models of any objective,
plan, length and tokenizer are compared on the same documents, by bits a character.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.assembly import prepared_text
from bertjax.assembly.models import row_length
from bertjax.config import cli
from bertjax.data import counter_rng
from bertjax.data.corpus.documents import Document, refuse_empty
from bertjax.data.corpus.files import keeping_hashes
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import named_sources, parse_sources
from bertjax.data.token_store.cache import open_cache
from bertjax.data.token_store.encoding import Block, encode_block, pieces
from bertjax.data.tokenizers.stream_vocab import read_streams
from bertjax.scoring.confidence import half_width
from bertjax.scoring.scorer import (
    Scores,
    heading,
    identify,
    join_sets,
    text_to_score,
    value_lines,
)
from bertjax.scoring.sequence_scorers import LanguageModel
from bertjax.scoring.token_rows import Window, cut_windows

# What decides which text is scored, whatever the run has. Spelt out, so that no change
# of a default changes what models are compared on. characters, examples: 0 is all.
COMMON_LM = dict(unit="document", characters=0, examples=0)
FLAGS = ("length", "stride", "characters", "examples")


class Layout(NamedTuple):
    """How documents are cut: `room` tokens of text a window of `length` tokens, begun
    `stride` after the last; of each document the first `characters`, 0: all; documents
    at most `examples`, 0: all."""

    unit: str
    characters: int
    examples: int
    length: int
    stride: int
    room: int


class Text(NamedTuple):
    """A document: its ids i32 [n], without special ones; its characters and bytes."""

    ids: np.ndarray
    characters: int
    bytes: int


class Cost(NamedTuple):
    """What a document costs in nats, and the tokens that it is the cost of."""

    nats: float
    tokens: int


def read_layout(
    args: Any, lm: LanguageModel, specials: int, unscored: int = 0
) -> Layout:
    """Read the flags.

    specials: tokens of a window that are no text; unscored: those of the text that it
    gives no probability to. Raises UserError.
    """
    length = row_length(lm.cfg, args.length, lm.longest)
    room = length - specials
    widest = room - unscored
    if widest < 1:
        raise UserError(f"--length={length} is too short for a token of text")
    stride = args.stride or max(1, length // 2)
    if stride > widest:
        raise UserError(
            f"--stride={stride} is too large: with --length={length} it is {widest} at "
            "most, for no token to be left out"
        )
    given = {k: getattr(args, k) or v for k, v in COMMON_LM.items() if k != "unit"}
    return Layout(COMMON_LM["unit"], **given, length=length, stride=stride, room=room)


def read_sets(
    args: Any, lm: LanguageModel, layout: Layout
) -> Iterator[tuple[str, list[Text]]]:
    """Yield (name, documents) of --text, or of the run's data.valid. UserError."""
    data = lm.config.data
    value, key = text_to_score(args, lm.config)
    prepared_text.settle_cache(lm.config, cli.say)
    cache = os.fspath(open_cache(data.cache).root)
    fields = {"text_field": data.text_field}
    if not args.text:  # of --text the text alone says what is read
        streams = ",".join(read_streams(data.streams))
        fields |= {"code_field": data.code_field, "streams": streams}
    for name, part in named_sources(value, key).items():
        sources = parse_sources(part, key, "valid", **fields)
        documents, counts = [], Counts()
        with keeping_hashes(cache):
            for source in sources:
                source.fingerprint(cache, cli.say)  # puts in place what is made
                documents += source.documents(counts, data.max_line_bytes)
        refuse_empty(sources, counts)
        for line in counts.lines():
            cli.say(line)
        if 0 < layout.examples < len(documents):
            order = np.arange(len(documents))
            order = counter_rng.permute(order, len(order), counter_rng.fold(0, "few"))
            documents = [documents[i] for i in np.sort(order[: layout.examples])]
        texts = [read_text(lm.tokenizer, one, layout.characters) for one in documents]
        if not any(len(text.ids) for text in texts):
            raise UserError(f"{key}: the tokenizer leaves no token of {part}")
        yield name, texts


def read_text(tokenizer: Any, document: Document, characters: int = 0) -> Text:
    """Encode a document as training does; of it at most the first `characters`.

    White space within a line counts as one character, line breaks as none: tokenizers
    see them so.
    """
    lines = [" ".join(line.split()) for line in document.paragraphs]
    if characters:
        lines = first_characters(lines, characters)
    whole = [*chain.from_iterable(map(pieces, lines))]
    tokens = encode_block(tokenizer, Block(parts=[whole], begins=[True])).tokens
    if tokenizer.kind == "ids":  # which stand for no text
        return Text(tokens.astype(np.int32), 0, 0)
    size = sum(map(len, lines)), sum(len(line.encode()) for line in lines)
    return Text(tokens.astype(np.int32), *size)


def first_characters(lines: Sequence[str], most: int) -> list[str]:
    """Take the first characters, whole words where there are spaces.

    >>> first_characters(["One two.", "Three four five."], 18)
    ['One two.', 'Three four']
    """
    kept = []
    for line in lines:
        if len(line) > most:
            cut = line.rfind(" ", 0, most + 1)
            line = line[: cut if cut > 0 else most]
            most = 0
        if line:
            kept.append(line)
        most -= len(line)
        if most <= 0:
            break
    return kept


def cut_texts(texts: Sequence[Text], layout: Layout) -> list[tuple[int, Window]]:
    """Return the windows of texts: (which text, window)."""
    return [
        (i, window)
        for i, text in enumerate(texts)
        if len(text.ids)
        for window in cut_windows(len(text.ids), layout.room, layout.stride)
    ]


def add_up(
    name: str, texts: Sequence[Text], costs: Sequence[Cost], unknown: int
) -> dict[str, Any]:
    """Return `<name>_loss`, bits a character and a byte, and how much was scored.

    `*_ci95` are half-widths of 95% intervals over documents. unknown: the id of the
    unknown token. Raises UserError where no token is scored.
    """
    nats = np.array([cost.nats for cost in costs])
    scored = np.array([cost.tokens for cost in costs], np.float64)
    if not scored.sum():
        raise UserError("--text: no token can be scored: each document has only one")
    bits, documents = nats / math.log(2), np.arange(len(texts))
    weights = {
        f"{name}_loss": (nats, scored),
        "bits_per_character": (bits, np.array([float(t.characters) for t in texts])),
        "bits_per_byte": (bits, np.array([float(text.bytes) for text in texts])),
    }
    out: dict[str, Any] = {}
    for key, (value, weight) in weights.items():
        if not weight.sum():
            continue
        out[key] = float(value.sum() / weight.sum())
        width = half_width(value, weight, documents)
        if width is not None:
            out[f"{key}_ci95"] = width
    return out | {
        "tokens": int(scored.sum()),
        "unknown": int(sum((text.ids == unknown).sum() for text in texts)),
        "characters": sum(text.characters for text in texts),
        "bytes": sum(text.bytes for text in texts),
        "documents": len(texts),
        "no_tokens": sum(not len(text.ids) for text in texts),
    }


def make_scores(
    args: Any,
    lm: LanguageModel,
    layout: Mapping[str, Any],
    sets: Mapping[str, Mapping[str, Any]],
) -> Scores:
    """Return the scores of sets of documents, and how they were laid out."""
    lines = ["layout common: " + "; ".join(f"{k} {v}" for k, v in layout.items())]
    for name, values in sets.items():
        lines += [f"{heading(name, lm.meta)}:", *value_lines(values)]
    about = identify(args, lm.meta) | {"layout": {"name": "common", **layout}}
    return Scores([join_sets(about, sets)], lines)

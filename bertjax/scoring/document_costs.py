# SPDX-License-Identifier: Apache-2.0
"""Read the documents that language models are scored on, and add up their costs.

The scored text depends only on the files, data.text_field and the flags: models of any
objective, plan, length and tokenizer are compared on the same documents, by bits per
character.
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
from bertjax.scoring.confidence import half_width, interval
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

# Settings that decide which text is scored, whatever the run has. They are spelled out,
# so that a changed default does not change comparisons. characters, examples: 0 is all.
COMMON_LM = dict(unit="document", characters=0, examples=0)
FLAGS = ("length", "stride", "characters", "examples")


class Layout(NamedTuple):
    """How documents are cut into windows.

    A window has `length` tokens, `room` of them text, and begins `stride` tokens after
    the previous one. Only the first `characters` of each document and at most
    `examples` documents are scored; 0 means all.
    """

    unit: str
    characters: int
    examples: int
    length: int
    stride: int
    room: int


class Text(NamedTuple):
    """A document: ids i32 [n], no special ones; its characters and bytes."""

    ids: np.ndarray
    characters: int
    bytes: int


class Cost(NamedTuple):
    """The cost of a document in nats, and the number of tokens it covers."""

    nats: float
    tokens: int


def read_layout(
    args: Any, lm: LanguageModel, specials: int, unscored: int = 0
) -> Layout:
    """Read the layout from the flags.

    specials: tokens of a window that are not text; unscored: tokens of text without a
    probability. Raises UserError.
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
    """Yield (name, documents) of each set of --text or data.valid. Raises UserError."""
    data = lm.config.data
    value, key = text_to_score(args, lm.config)
    prepared_text.settle_cache(lm.config, cli.say)
    cache = os.fspath(open_cache(data.cache).root)
    fields = {"text_field": data.text_field}
    if not args.text:  # the run's code and streams do not apply to --text
        streams = ",".join(read_streams(data.streams))
        fields |= {"code_field": data.code_field, "streams": streams}
    for name, part in named_sources(value, key).items():
        sources = parse_sources(part, key, "valid", **fields)
        documents, counts = [], Counts()
        with keeping_hashes(cache):
            for source in sources:
                # writes the files of made-up sources
                source.fingerprint(cache, cli.say)
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
    """Encode a document as training does, or only its first `characters`.

    White space within a line counts as one character and line breaks as none, because
    that is how tokenizers see them.
    """
    lines = [" ".join(line.split()) for line in document.paragraphs]
    if characters:
        lines = first_characters(lines, characters)
    whole = [*chain.from_iterable(map(pieces, lines))]
    tokens = encode_block(tokenizer, Block(parts=[whole], begins=[True])).tokens
    if tokenizer.kind == "ids":  # ids do not represent text
        return Text(tokens.astype(np.int32), 0, 0)
    size = sum(map(len, lines)), sum(len(line.encode()) for line in lines)
    return Text(tokens.astype(np.int32), *size)


def first_characters(lines: Sequence[str], most: int) -> list[str]:
    """Keep the first characters, cutting at a space if there is one.

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
    """Return the windows of texts as (index of the text, window)."""
    return [
        (i, window)
        for i, text in enumerate(texts)
        if len(text.ids)
        for window in cut_windows(len(text.ids), layout.room, layout.stride)
    ]


def add_up(
    name: str, texts: Sequence[Text], costs: Sequence[Cost], unknown: int
) -> dict[str, Any]:
    """Return `<name>_loss`, bits per character and byte, and how much was scored.

    `*_ci95` are half-widths of 95% intervals over documents. unknown: the id of the
    unknown token. Raises UserError if no token is scored.
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
        out |= interval(key, half_width(value, weight, documents))
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
    """Return the scores of sets of documents, with the layout that was used."""
    lines = ["layout common: " + "; ".join(f"{k} {v}" for k, v in layout.items())]
    for name, values in sets.items():
        lines += [f"{heading(name, lm.meta)}:", *value_lines(values)]
    about = identify(args, lm.meta) | {"layout": {"name": "common", **layout}}
    return Scores([join_sets(about, sets)], lines)

# SPDX-License-Identifier: Apache-2.0
"""Encode sentences into ids and aligned arrays: marks and streams of tokens."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.token_store.streams import Stream
from bertjax.data.tokenizers.backends import encode_sentences
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.word_starts import Marker


class EncodedRows(NamedTuple):
    """The ids of each sentence, its marks u8 [n] (None without a marker), and its ids
    [n] in each stream of tokens."""

    ids: list[Any]
    marks: list[np.ndarray] | None
    streams: dict[str, list[np.ndarray]]


def encode_rows(
    tokenizer: Tokenizer,
    rows: Iterable[tuple[Any, ...]],
    entities: tuple[str, ...],
    marker: Marker | None,
    streams: Mapping[str, Stream],
) -> EncodedRows:
    """Encode sentences.

    rows: the text of each sentence, whether it follows another without a space, and its
    ranges in each of the streams, in their order. entities: those of the document.
    """
    texts, joined, *ranges = map(list, zip(*rows, strict=True))
    spanned, aligned = None, {}
    if streams:
        spanned = encode_sentences(tokenizer.engine.encode_spans, texts, joined)
        for (name, stream), own in zip(streams.items(), ranges, strict=True):
            aligned[name] = [
                stream.of_tokens(name, one, spans)
                for one, (_, spans) in zip(own, spanned, strict=True)
            ]
    if marker is not None:
        known = [] if spanned is None else [spanned]
        both = marker.encode(texts, joined, entities, *known)
        return EncodedRows([i for i, _ in both], [m for _, m in both], aligned)
    if spanned is not None:
        return EncodedRows([i for i, _ in spanned], None, aligned)
    ids = encode_sentences(tokenizer.engine.encode_batch, texts, joined)
    return EncodedRows(ids, None, aligned)

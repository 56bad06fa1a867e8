# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of streams, created once from the training text, kept in the cache."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, counted, join_names
from bertjax.data.corpus.documents import Source
from bertjax.data.corpus.line_repair import CLEANING, Counts
from bertjax.data.token_store.cache import Cache
from bertjax.data.token_store.store import hash_json
from bertjax.data.tokenizers.stream_vocab import (
    KINDS,
    TOKEN,
    StreamVocab,
    count_values,
    from_json,
    make_vocab,
    read_streams,
    streams_of,
    to_json,
    with_streams,
)
from bertjax.data.tokenizers.tokenizer import STREAMS, Tokenizer


def add_vocabs(
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    cache: Cache,
    data: Any,
    say: Callable[[str], None],
) -> Tokenizer:
    """Return the tokenizer with the vocabularies of data.streams.

    Vocabularies that the tokenizer already has stay as they are; the others are created
    once from the values in `sources` and kept in `cache`.

    Raises UserError if a stream has values of both kinds, or if a vocabulary of the
    tokenizer has more values than data.streams states.
    """
    caps, known = read_streams(data.streams), streams_of(tokenizer)
    for name in caps.keys() & known.keys():
        if (count := len(known[name].values or ())) > caps[name]:
            raise UserError(
                f"data.streams={data.streams}: the vocabulary that came with the "
                f"tokenizer has {count} values of {name}: give {name}:{count}"
            )
    lacking = {name: cap for name, cap in caps.items() if name not in known}
    if not lacking:
        return tokenizer
    settings = {
        "fingerprints": [s.fingerprint(os.fspath(cache.root), say) for s in sources],
        "cleaning": CLEANING,
        "max_line_bytes": data.max_line_bytes,
        "streams": lacking,
    }
    target = f"streams-{hash_json(settings)[:16]}"

    def write(path: Path) -> None:
        vocabs = _count(sources, lacking, data.max_line_bytes)
        content = to_json(vocabs)
        (path / STREAMS).write_bytes(content)
        (path / "identity").write_text(hash_json(content.decode()))

    if not cache.has(target):
        cache.make(target, write)
    path = cache.get(target)
    try:
        content = (path / STREAMS).read_bytes()
        if (path / "identity").read_text() != hash_json(content.decode()):
            raise ValueError
    except (OSError, ValueError):
        raise UserError(
            f"{path}: the vocabularies of streams are damaged; delete the directory "
            "and they will be made again"
        ) from None
    found = from_json(content)
    for name, vocab in found.items():
        number = counted(len(vocab.values or ()), "value")
        say(f"stream {name}: {number}; each {vocab.kind} has one or none")
    return with_streams(tokenizer, known | found)


def _count(
    sources: Sequence[Source], caps: Mapping[str, int], max_line_bytes: int
) -> dict[str, StreamVocab]:
    counts: dict[str, dict[str, Counter[str]]] = {
        name: defaultdict(Counter) for name in caps
    }
    for source in sources:
        for document in source.documents(Counts(), max_line_bytes):
            count_values(document.values or (), caps, counts)
            for name, kinds in counts.items():
                if len([kind for kind in kinds.values() if kind]) > 1:
                    where = source.locate(document.paragraphs[0], max_line_bytes)
                    raise UserError(
                        f"{where}: `{name}` has ranges in some records, and a value a "
                        "sentence in others"
                    )
    empty = next((name for name in caps if not any(counts[name].values())), "")
    if empty and all(source.is_code for source in sources):
        where = join_names([source.name for source in sources])
        raise UserError(f"{where}: this code has no names, and so no `{empty}`")
    return {
        name: make_vocab(kind, counts[name][kind], cap)
        for name, cap in caps.items()
        for kind in [next((k for k in KINDS if counts[name][k]), TOKEN)]
    }

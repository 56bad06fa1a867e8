# SPDX-License-Identifier: Apache-2.0
"""Small texts in many pieces, for the tests of shards and of stores' contents."""

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.data.corpus.documents import Source
from bertjax.data.token_store import pieces
from bertjax.data.token_store import prepare_data as text
from bertjax.data.token_store.cache import Cache, open_cache
from bertjax.data.token_store.components import Component, build_components
from bertjax.data.token_store.encoding import Encoder
from bertjax.data.token_store.store import Store, verify
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.word_starts import Marker

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "off"]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", *WORDS]


def paragraph(rng: np.random.Generator) -> str:
    return " ".join([*rng.choice(WORDS, rng.integers(1, 9)), "."])


def write_texts(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, documents in (("a", 300), ("b", 200), ("c", 5)):
        found = [
            "\n".join(paragraph(rng) for _ in range(rng.integers(1, 6)))
            for _ in range(documents)
        ]
        (folder / f"{name}.txt").write_text("\n\n".join(found) + "\n")
    lines = [
        {"text": paragraph(rng), "lang": str(rng.choice(["en", "zh-x", "w.o"]))}
        for _ in range(400)
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    with gzip.open(folder / "v.txt.gz", "wt") as file:
        file.write("\n\n".join(paragraph(rng) for _ in range(50)))
    (folder / "vocab.txt").write_text("\n".join(VOCAB))


def small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Return config values, and make pieces so small that there are many."""
    write_texts(tmp_path)
    monkeypatch.setattr(pieces.cut, "__defaults__", (4000,))
    return {
        "train": f"one={tmp_path}/a.txt,two={tmp_path}/b.txt,{tmp_path}/c.txt",
        "valid": f"{tmp_path}/v.txt.gz",
        "vocab": f"{tmp_path}/vocab.txt",
        "tokenizer_kind": "unigram",
        "vocab_size": 60,
        "lower_case": None,
        "cache": f"{tmp_path}/cache",
    }


def quiet(line: str) -> None:
    pass


def hashes(prepared: text.Prepared) -> dict[str, str]:
    stores = [*prepared.parts.items(), *prepared.valid.items()]
    for _, store in stores:
        verify(store)
    return {name: store.content_hash for name, store in stores}


def documents(store: Store) -> list[list[list[int]]]:
    """Return documents as lists of sentences, from the flat arrays."""
    tokens, ends, outer = store.tokens, store.sentences, store.documents
    return [
        [tokens[ends[s] : ends[s + 1]].tolist() for s in range(a, b)]
        for a, b in itertools.pairwise(outer)
    ]


def left(cache: str | Path) -> set[str]:
    return {name.split("-")[0] for name in os.listdir(cache)}


def reference(path: Path) -> list[list[list[int]]]:
    """Read and encode a file of paragraphs of words in a slow and obvious way."""
    ids = {word: i for i, word in enumerate(VOCAB)}
    return [
        [[ids[w] for w in line.split()] for line in document.split("\n")]
        for document in path.read_text().rstrip("\n").split("\n\n")
    ]


def build_store(
    sources: list[Source],
    tokenizer: Tokenizer,
    cache: str | os.PathLike[str],
    *,
    max_line_bytes: int,
    workers: int | None = None,
    say: Callable[[str], None] = print,
    label: str = "train",
    marker: Marker | None = None,
) -> Store:
    """Encode sources into a store under `cache`, or reuse the existing store.

    The result does not depend on `workers` (None: all cores), bit for bit. Memory is
    bounded. Contents and repairs are reported to `say`, also if a store is reused.

    Raises:
      UserError: unreadable or empty sources, a full disk, a damaged store.
    """
    place = open_cache(cache)
    with Encoder(tokenizer, marker, workers) as encoder:
        data = SimpleNamespace(max_line_bytes=max_line_bytes, group_field="")
        component = Component(label, sources, encoder, place, data, say=say)
        (stores,) = build_components(
            [component], encoder, place, Cache(place.root), say
        )
    return stores[""]

# SPDX-License-Identifier: Apache-2.0
"""From config values to a tokenizer and token stores; what train and prepare share."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bertjax import UserError, registry
from bertjax.data import directories, vocabularies
from bertjax.data.lines import CLEANING, Counts
from bertjax.data.progress import Progress
from bertjax.data.sources import Source, named_sources, parse_sources
from bertjax.data.store import Store, build_store, text_bytes
from bertjax.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer

TRAINING = 1  # a tokenizer trained by other rules lies elsewhere


class Inputs(NamedTuple):
    """What the config names, looked at; `tokenizer` is None where one is trained."""

    train: list[Source]
    valid: dict[str, list[Source]]
    tokenizer: Tokenizer | None
    cache: Path


class Prepared(NamedTuple):
    """What training needs of its data."""

    tokenizer: Tokenizer
    train: Store
    valid: dict[str, Store]


def check_inputs(
    *,
    train: str,
    valid: str,
    vocab: str,
    tokenizer_kind: str,
    vocab_size: int,
    lower_case: bool | None,
    cache: str,
) -> Inputs:
    """Look at every path and at the vocabulary, and build nothing.

    Raises:
      UserError: naming the config key and what is wrong with it.
    """
    sources = parse_sources(train, "data.train", "train")
    held_out = {
        name: parse_sources(value, "data.valid", "valid")
        for name, value in named_sources(valid).items()
    }
    if vocab:
        tokenizer = load_tokenizer(vocab, lower_case)
    else:
        tokenizer = None
        registry.pick("data.tokenizer", tokenizer_kind, vocabularies.MAKERS)
        if vocab_size < vocabularies.LEAST:
            raise UserError(
                f"data.vocab_size={vocab_size} is too small; "
                f"the least is {vocabularies.LEAST}"
            )
    return Inputs(sources, held_out, tokenizer, directories.check_cache(cache))


def prepare_data(
    *,
    train: str,
    valid: str,
    vocab: str,
    tokenizer_kind: str,
    vocab_size: int,
    lower_case: bool | None,
    cache: str,
    max_line_bytes: int,
    workers: int | None = None,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Load or train the tokenizer, build the stores, or reuse what lies in `cache`.

    Args:
      train, valid: the sources' strings; `valid` may be empty or named.
      vocab: the tokenizer's path; empty: `tokenizer_kind` with `vocab_size` pieces is
        trained on `train`.
      workers: processes (None: all cores); the result does not depend on it.
      say: is called with each line that people should read.

    Raises:
      UserError: the user's input is at fault; nothing unfinished is left behind.
    """
    inputs = check_inputs(
        train=train,
        valid=valid,
        vocab=vocab,
        tokenizer_kind=tokenizer_kind,
        vocab_size=vocab_size,
        lower_case=lower_case,
        cache=cache,
    )
    tokenizer = inputs.tokenizer or trained_tokenizer(
        inputs.train,
        inputs.cache,
        kind=tokenizer_kind,
        vocab_size=vocab_size,
        lower_case=lower_case,
        max_line_bytes=max_line_bytes,
        say=say,
    )

    def build(sources: list[Source], label: str) -> Store:
        return build_store(
            sources,
            tokenizer,
            inputs.cache,
            max_line_bytes=max_line_bytes,
            workers=workers,
            say=say,
            label=label,
        )

    return Prepared(
        tokenizer,
        build(inputs.train, "train"),
        {name: build(sources, name) for name, sources in inputs.valid.items()},
    )


def trained_tokenizer(
    sources: list[Source],
    cache: str | os.PathLike[str],
    *,
    kind: str,
    vocab_size: int,
    lower_case: bool | None,
    max_line_bytes: int,
    say: Callable[[str], None] = print,
) -> Tokenizer:
    """Train a tokenizer on sources into `cache`, or load the one that is there."""
    root = directories.check_cache(cache)
    settings = {
        "training": TRAINING,
        "fingerprints": [s.fingerprint(os.fspath(root), say) for s in sources],
        "cleaning": CLEANING,
        "max_line_bytes": max_line_bytes,
        "kind": kind,
        "vocab_size": vocab_size,
        "lower_case": lower_case,
    }
    told = json.dumps(settings, sort_keys=True)
    key = hashlib.sha256(told.encode()).hexdigest()
    target = root / f"tokenizer-{key[:16]}"

    def write(path: Path) -> None:
        texts = _paragraphs(sources, max_line_bytes)
        made = train_tokenizer(texts, kind, vocab_size, lower_case, path)
        (path / "identity").write_text(made.identity)
        for file in path.iterdir():
            directories.sync(file)

    if not target.exists():
        say(f"training a {kind} tokenizer of {vocab_size:,} pieces")
        directories.make_whole(target, write)
    try:
        tokenizer = load_tokenizer(target)
        intact = (target / "identity").read_text() == tokenizer.identity
    except (OSError, UserError):
        intact = False
    if not intact:
        raise UserError(
            f"{target}: the tokenizer is damaged; "
            "delete the directory and it will be trained again"
        )
    say(f"tokenizer: {kind}, {tokenizer.vocab_size:,} pieces ({target})")
    return tokenizer


def _paragraphs(sources: list[Source], max_line_bytes: int) -> Iterator[str]:
    total = text_bytes(sources)
    counts = Counts()  # the stores report the repairs
    with Progress("read", total and total / 1e6, "MB") as progress:
        for source in sources:
            for document in source.documents(counts, max_line_bytes):
                yield from document.paragraphs
                progress.add(sum(map(len, document.paragraphs)) / 1e6)

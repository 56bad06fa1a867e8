# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that is trained once on the training text and kept in the cache."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.data.corpus.documents import Document, Source, refuse_empty
from bertjax.data.corpus.line_repair import CLEANING, Counts
from bertjax.data.mixture import mixture_shares
from bertjax.data.progress import Progress
from bertjax.data.token_store.cache import Cache
from bertjax.data.token_store.components import full_name
from bertjax.data.token_store.pieces import text_bytes
from bertjax.data.token_store.store import hash_json
from bertjax.data.tokenizers.fertility import report_tokenizer
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bertjax.data.tokenizers.train_vocab import SAMPLE_CHARACTERS, Sample

TRAINING = {"wordpiece": 2}  # versions of the training rules; part of the cache key
REPORTED = 100_000  # characters per component that coverage is measured on
HELD = 4  # sizes of a sample, in characters, that are kept in memory while reading
FILL = 0.98  # share of SAMPLE_CHARACTERS to fill; a larger sample is thinned again


def trained_tokenizer(
    sources: Mapping[str, list[Source]],
    cache: Cache,
    data: Any,
    say: Callable[[str], None] = print,
) -> Tokenizer:
    """Train a tokenizer on sources into `cache`, or load the one that is there.

    `data` holds the config values data.*. With vocab_alpha or vocab_weights each
    component of `sources`, and each group of documents, gets its share of the sample
    (`sample_mixture`); without them, its share of the text. The fit of a new tokenizer
    to each of them is reported to `say`.
    """
    kind, max_line_bytes = data.tokenizer_kind, data.max_line_bytes
    root = os.fspath(cache.root)
    every = [source for own in sources.values() for source in own]
    settings = {
        "training": TRAINING.get(kind, 1),
        "fingerprints": [s.fingerprint(root, say) for s in every],
        "cleaning": CLEANING,
        "max_line_bytes": max_line_bytes,
        "kind": kind,
        "vocab_size": data.vocab_size,
        "lower_case": data.lower_case,
    }
    mixed = {} if data.vocab_alpha is None else {"alpha": data.vocab_alpha}
    mixed |= {"weights": dict(data.vocab_weights)} if data.vocab_weights else {}
    if mixed:
        numbers = {name: len(own) for name, own in sources.items()}
        settings |= {**mixed, "components": numbers}
    name = f"tokenizer-{hash_json(settings)[:16]}"

    def write(path: Path) -> None:
        samples: dict[str, Sample] = {}
        documents = read_documents("train", sources, max_line_bytes, samples)
        texts = ((of, text) for of, _, each in documents for text in each.paragraphs)
        chosen = (
            sample_mixture(texts, **mixed) if mixed else (text for _, text in texts)
        )
        how = kind, data.vocab_size, data.lower_case
        tokenizer = train_tokenizer(chosen, *how, path)
        for source in every:
            source.refuse_changed()
        say("how it fits a sample of the text that it was trained on:")
        sampled = {name: sample.texts for name, sample in samples.items()}
        for line in report_tokenizer(tokenizer, sampled):
            say(f"  {line}")
        (path / "identity").write_text(tokenizer.identity)

    if not cache.has(name):
        say(f"training a {kind} tokenizer of {data.vocab_size:,} pieces")
        cache.make(name, write)
    target = cache.get(name)
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


def read_documents(
    role: str,
    sources: Mapping[str, list[Source]],
    max_line_bytes: int,
    samples: dict[str, Sample],
) -> Iterator[tuple[str, str, Document]]:
    """Yield (name of the store, name of the source, document).

    `samples` receives some of the paragraphs of each store, under the store's name.
    """
    total = text_bytes(source for own in sources.values() for source in own)
    with Progress("read", total and total / 1e6, "MB") as progress:
        counts = Counts(read=progress.add)  # the stores report the repairs
        for label, own in sources.items():
            for source in own:
                for document in source.documents(counts, max_line_bytes):
                    of = full_name(role, label, document.group)
                    sample = samples.setdefault(of, Sample(REPORTED))
                    for paragraph in document.paragraphs:
                        sample.add(paragraph)
                    yield of, source.name, document
    refuse_empty([s for own in sources.values() for s in own], counts)


def sample_mixture(
    texts: Iterable[tuple[str, str]],
    alpha: float | None = None,
    characters: int = SAMPLE_CHARACTERS,
    weights: Mapping[str, float] | None = None,
) -> list[str]:
    """Draw a sample in which components have shares ~ size^alpha of the characters.

    Conneau et al. 2020, section 3.1 (alpha 0.3 for XLM-R); with `weights`, shares are
    proportional to them. Texts of a large component are thinned evenly, texts of a
    small one are repeated. It needs one pass, bounded memory and no random numbers.

    `texts` are (component, text), in any order. Raises UserError if `weights` lack a
    component, or name one that has no text.

    >>> texts = [("en", "aaaa")] * 75 + [("sw", "bbbb")] * 25
    >>> Counter(sample_mixture(texts, alpha=0.0, characters=100))
    Counter({'aaaa': 12, 'bbbb': 12})
    """
    sizes: Counter[str] = Counter()  # characters of each component
    samples: dict[str, Sample] = {}

    def plenty(name: str) -> float:
        """Return how much of a component is sampled relative to its share."""
        if weights:
            return samples[name].size / weights.get(name, 1.0)
        return samples[name].size / sizes[name] ** (1.0 if alpha is None else alpha)

    for name, text in texts:
        sizes[name] += len(text)
        if not samples.setdefault(name, Sample(math.inf)).add(text):
            continue
        while sum(sample.size for sample in samples.values()) > HELD * characters:
            many = [n for n, sample in samples.items() if len(sample.texts) > 1]
            if not many:
                break
            samples[max(many, key=plenty)].thin()
    if not sizes:
        return []
    budget = FILL * min(characters, sizes.total())
    shares = mixture_shares(sizes, weights, alpha)
    return [
        text
        for name, sample in samples.items()
        for text in _spread(sample.texts, shares[name] * budget / sample.size)
    ]


def _spread(texts: list[str], times: float) -> list[str]:
    """Repeat texts `times` times; the fraction is spread evenly over the texts.

    >>> _spread(["a", "b", "c", "d"], 1.5)
    ['a', 'b', 'c', 'd', 'a', 'c']
    """
    whole, rest = divmod(round(times * len(texts)), len(texts))
    return texts * whole + [texts[i * len(texts) // rest] for i in range(rest)]

# SPDX-License-Identifier: Apache-2.0
"""Measure how well a vocabulary fits texts: unknown words, and tokens per word."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from bertjax.data.tokenizers.tokenizer import SPACELESS, Tokenizer

CAPITALS = 0.005  # share of tokens; more unknown tokens due to capitals are reported
MARKS = 0.005  # share of characters; more dropped marks are reported
BATCH = 1000  # texts per call of the tokenizer
SPACELESS_SHARE = 0.5  # share of characters above which words are not counted by spaces


@dataclass
class Fit:
    """Counts over some texts; white space does not count as characters."""

    characters: int = 0
    known: int = 0  # characters that are not in an unknown token
    spaceless: int = 0  # characters of scripts without spaces
    words: int = 0  # between spaces
    tokens: int = 0
    capitals: int = 0  # unknown tokens that are known in lower case
    marks: int = 0  # accents, vowel signs and tones that the tokenizer drops


def measure_tokenizer(tokenizer: Tokenizer, texts: Iterable[str]) -> Fit:
    """Count tokens, words and characters, and the unknown ones among them.

    >>> measure_tokenizer(tokenizer, ["unaffable 龘"])  # una ##ffa ##ble [UNK]
    Fit(characters=10, known=9, spaceless=1, words=2, tokens=4, capitals=0, marks=0)
    """
    fit, unk = Fit(), tokenizer.unk_id
    library = getattr(tokenizer.engine, "tokenizer", None)
    normalizer = library and library.normalizer
    rest = iter(texts)
    while batch := list(islice(rest, BATCH)):
        encoded = tokenizer.engine.encode_spans(batch)
        for text, (ids, spans) in zip(batch, encoded, strict=True):
            unknown = [span for i, span in zip(ids, spans, strict=True) if i == unk]
            inside = {at for span in unknown for at in range(*span)}
            characters = len("".join(text.split()))
            fit.characters += characters
            fit.known += characters - sum(not text[at].isspace() for at in inside)
            fit.spaceless += len(SPACELESS.findall(text))
            fit.words += len(text.split())
            fit.tokens += len(ids)
            if normalizer and not text.isascii():
                left = _count_marks(normalizer.normalize_str(text))
                fit.marks += max(_count_marks(text) - left, 0)
            if not tokenizer.lower_case:
                words = (text[slice(*span)] for span in unknown)
                lowered = [word.lower() for word in words if word != word.lower()]
                again = tokenizer.encode_batch(lowered)
                fit.capitals += sum(unk not in known for known in again)
    return fit


def _count_marks(text: str) -> int:
    """Count the marks on letters, including those composed into one character."""
    decomposed = unicodedata.normalize("NFD", text)
    return sum(unicodedata.category(c) == "Mn" for c in decomposed)


def report_capitals(name: str, fit: Fit) -> list[str]:
    """Return a line if many unknown tokens are words with capitals."""
    share = fit.capitals / max(fit.tokens, 1)
    if share < CAPITALS:
        return []
    return [
        f"{name}: {share:.2%} of a sample's tokens are unknown words with capitals, "
        "which the vocabulary knows in lower case: try data.lower_case=true"
    ]


def report_tokenizer(
    tokenizer: Tokenizer, texts: Mapping[str, Iterable[str]]
) -> list[str]:
    """Report for each component how well the vocabulary fits its (held-out) texts.

    >>> report_tokenizer(tokenizer, {"en": ["The cats sat."], "zh": ["我来到北京"]})
    ['en: 100.000% of 11 characters known, 1.67 tokens a word (3)',
     'zh: 100.000% of 5 characters known, 0.80 tokens a character (5)']
    """
    lines = []
    for name, sample in texts.items():
        fit = measure_tokenizer(tokenizer, sample)
        known = fit.known / max(fit.characters, 1)
        spaced = fit.spaceless <= SPACELESS_SHARE * fit.characters
        unit, n = ("word", fit.words) if spaced else ("character", fit.characters)
        lines.append(
            f"{name}: {known:.3%} of {fit.characters:,} characters known, "
            f"{fit.tokens / max(n, 1):.2f} tokens a {unit} ({n:,})"
        )
        lines += report_capitals(name, fit)
        if fit.marks >= MARKS * max(fit.characters, 1):
            lines.append(
                f"{name}: {fit.marks:,} accents, vowel signs and tones of these are "
                "dropped, as BERT does where it lower-cases: a wordpiece vocabulary "
                "trained with data.lower_case=False keeps them, as other kinds do"
            )
    return lines

# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated texts, each with one or several references.

All range from 0 to 1. bleu is sacrebleu's (Post 2018) with its default tokenization,
over the whole set; rouge1, rouge2 and rougeL are the mean F1 of rouge-score (Lin 2004),
with the best reference. Both libraries are in the extra `text`. Except for ROUGE, a
character of a script without spaces is a word.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence

from bertjax import UserError
from bertjax.data.tokenizers.word_starts import ALONE

ROUGE = "rouge1", "rouge2", "rougeL"
PACKAGES = {"bleu": "sacrebleu", **dict.fromkeys(ROUGE, "rouge_score")}
References = Sequence[Sequence[str]]  # at least one per text


def check_packages(names: Iterable[str], key: str) -> None:
    """Raise UserError, naming `key`, for metrics whose library is not installed."""
    for name in names:
        package = PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            library = package.replace("_", "-")
            raise UserError(
                f"{key}={name} needs {library}: pip install 'bertjax[text]'"
            )


def bleu(texts: Sequence[str], references: References, lower: bool = False) -> float:
    """Return BLEU-4 of the set; lower: ignore case."""
    import sacrebleu

    texts = [*map(spaced, texts)]
    references = [[*map(spaced, right)] for right in references]
    most = max(map(len, references))
    # The k-th reference of each text, None if it has fewer.
    streams = [[r[k] if k < len(r) else None for r in references] for k in range(most)]
    found = sacrebleu.corpus_bleu(texts, streams, lowercase=lower)
    return found.score / 100


def rouge(
    texts: Sequence[str], references: References, names: Sequence[str] = ROUGE
) -> dict[str, float]:
    """Return the mean F1s: {name: F1}; texts are lower-cased, but not stemmed."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([*names])
    pairs = zip(texts, references, strict=True)
    scores = [scorer.score_multi([*right], text) for text, right in pairs]
    return {k: sum(s[k].fmeasure for s in scores) / len(scores) for k in names}


def spaced(text: str) -> str:
    """Put spaces around each character (with its vowel signs) and punctuation mark of
    scripts without spaces."""
    return ALONE.sub(r" \g<0> ", text)


def words_of(text: str) -> list[str]:
    """Split a text at spaces, including those that `spaced` adds.

    >>> words_of("in 巴黎。")
    ['in', '巴', '黎', '。']
    """
    return spaced(text).split()


def has_rouge(text: str) -> bool:
    """Return whether rouge-score finds a word; it knows only a to z and digits."""
    return re.search("[a-z0-9]", text.lower()) is not None


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the share of distinct n-grams among all n-grams of words (Li et al. 2016).

    >>> distinct(["who is it", "who was it"], 1)
    0.6666666666666666
    """
    grams = [
        tuple(words[i : i + n])
        for words in map(words_of, texts)
        for i in range(len(words) - n + 1)
    ]
    return len({*grams}) / len(grams) if grams else 0.0


SHARES: dict[str, Callable[[Sequence[str]], float]] = {
    "distinct1": lambda texts: distinct(texts, 1),
    "distinct2": lambda texts: distinct(texts, 2),
}
METRICS = ("bleu", *ROUGE, *SHARES)


def text_scores(
    names: Iterable[str], texts: Sequence[str], references: References, lower: bool
) -> dict[str, float]:
    """Compute the `names` that are in METRICS: {name: score}; lower: see `bleu`."""
    found = {}
    asked = [name for name in names if name in METRICS]
    if "bleu" in asked:
        found["bleu"] = bleu(texts, references, lower)
    if wanted := [name for name in ROUGE if name in asked]:
        found |= rouge(texts, references, wanted)
    found |= {name: score(texts) for name, score in SHARES.items() if name in asked}
    return {name: found[name] for name in asked}

# SPDX-License-Identifier: Apache-2.0
"""Metrics of predictions on whole data sets: of labels, numbers and entities.

All are in plain numpy, and range from 0 to 1 (correlations from -1). An undefined
metric (no examples, constant predictions) is 0.0, never NaN, so that a model that
predicts nothing scores 0. Metrics of answers are in squad_metrics.py, of rankings in
search_measures.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax import UserError


# ------------------------------------------------------------------ classes
def accuracy(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the share of right classes; both arrays i64 [n].

    >>> accuracy(np.array([0, 1, 2, 1]), np.array([0, 1, 1, 1]))
    0.75
    """
    _check(predicted, gold)
    return float(np.mean(predicted == gold)) if len(gold) else 0.0


def f1(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the F1 of class 1, GLUE's metric for MRPC and QQP; both arrays i64 [n].

    It is 0.0 if class 1 is neither predicted nor present.

    >>> f1(np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0]))
    0.5
    """
    _check(predicted, gold)
    return _f1_of(predicted == 1, gold == 1)


def macro_f1(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the unweighted mean of the F1s of all classes in either array; i64 [n].

    >>> macro_f1(np.array([0, 0, 2]), np.array([0, 2, 2]))
    0.6666666666666666
    """
    _check(predicted, gold)
    classes = np.union1d(predicted, gold)
    scores = [_f1_of(predicted == c, gold == c) for c in classes]
    return float(np.mean(scores)) if scores else 0.0


def matthews(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return Matthews' correlation (phi), or R_K for more than two classes; i64 [n].

    Matthews 1975; Gorodkin 2004, eq. 8. It is 0.0 if either array is constant, since
    there is nothing to correlate.

    >>> matthews(np.array([1, 1, 0, 0, 0]), np.array([1, 1, 1, 0, 0]))
    0.6666666666666666
    """
    _check(predicted, gold)
    both = np.concatenate([predicted, gold])
    classes, number = np.unique(both, return_inverse=True)
    k = len(classes)
    flat = number[len(gold) :] * k + number[: len(gold)]
    table = np.bincount(flat, minlength=k * k).reshape(k, k).astype(np.float64)
    n, guessed, true = table.sum(), table.sum(0), table.sum(1)
    spread = (n * n - guessed @ guessed) * (n * n - true @ true)
    return float((np.trace(table) * n - guessed @ true) / np.sqrt(spread or 1.0))


def _f1_of(guessed: np.ndarray, true: np.ndarray) -> float:
    hits = int(np.sum(guessed & true))
    return _rates(hits, int(guessed.sum()), int(true.sum()))["f1"]


def _rates(hits: int, guessed: int, true: int) -> dict[str, float]:
    """Return precision, recall and F1 from counts; 0 / 0 is 0.0."""
    return {
        "precision": hits / guessed if guessed else 0.0,
        "recall": hits / true if true else 0.0,
        "f1": 2 * hits / (guessed + true) if guessed + true else 0.0,
    }


# ------------------------------------------------------------------ numbers
def pearson(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the correlation of two arrays, f64 [n].

    It is 0.0 if either is constant or has a value that is not finite.

    >>> pearson(np.array([1.0, 2, 3]), np.array([3.0, 2, 1]))
    -1.0
    """
    _check(predicted, gold)
    both = np.stack([predicted, gold]).astype(np.float64)
    if not both.size or not np.isfinite(both).all() or not np.ptp(both, axis=1).all():
        return 0.0
    both -= both.mean(axis=1, keepdims=True)
    # Rescale, because the squares of tiny numbers underflow.
    both /= np.abs(both).max(axis=1, keepdims=True)
    a, b = both
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def spearman(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Return the correlation of the ranks of two arrays, f64 [n].

    Ties share a mean rank. It is 0.0 in the same cases as `pearson`.

    >>> spearman(np.array([1.0, 2, 3]), np.array([1.0, 2, 400]))
    1.0
    """
    _check(predicted, gold)
    if not np.isfinite(predicted).all() or not np.isfinite(gold).all():
        return 0.0
    from scipy.stats import rankdata  # slow to import

    return pearson(rankdata(predicted), rankdata(gold))


def _check(predicted: np.ndarray, gold: np.ndarray) -> None:
    if predicted.ndim != 1 or predicted.shape != gold.shape:
        raise ValueError(f"shapes {predicted.shape} and {gold.shape} differ")


Metric = Callable[[np.ndarray, np.ndarray], float]
OF_CLASSES: dict[str, Metric] = {
    metric.__name__: metric for metric in (accuracy, f1, macro_f1, matthews)
}
OF_NUMBERS: dict[str, Metric] = {"pearson": pearson, "spearman": spearman}
METRICS = OF_CLASSES | OF_NUMBERS


# ------------------------------------------------------------------ entities
_TAG = re.compile(r"([BI])(?:-(.+))?")


def entity_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Score the entities of BIO-tagged sentences; span and type have to be equal.

    Tags are read as by conlleval, and by seqeval's default: an I-X that does not
    continue an X begins a new one. Returns scores over all entities (micro-averaged),
    and by type, with `support`, the number of gold entities.

    >>> scores = entity_scores([["B-PER", "O"]], [["B-PER", "I-LOC"]])
    >>> scores["precision"], scores["recall"]
    (1.0, 0.5)

    Raises UserError for a tag that is not BIO; ValueError for unequal lengths.
    """
    if list(map(len, predicted)) != list(map(len, gold)):
        raise ValueError("predicted and gold sentences differ in length")
    guessed, true = set(_entities(predicted)), set(_entities(gold))
    sets = guessed & true, guessed, true
    hits, n_guessed, support = (Counter(entity[-1] for entity in s) for s in sets)
    types = {
        kind: _rates(hits[kind], n_guessed[kind], support[kind])
        | {"support": support[kind]}
        for kind in sorted(n_guessed | support)
    }
    return {**_rates(*map(len, sets)), "types": types}


def bio_violations(sentences: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return (sentence, token) of each I-X that follows neither B-X nor I-X.

    >>> bio_violations([["O", "I-PER", "I-PER", "I-LOC"], ["B-LOC", "I-LOC"]])
    [(0, 1), (0, 3)]
    """
    return [
        (n, at)
        for n, tags in enumerate(sentences)
        for at, (mark, kind) in enumerate(map(_parse, tags))
        if mark == "I" and (at == 0 or _parse(tags[at - 1])[1] != kind)
    ]


def _parse(tag: str) -> tuple[str, str | None]:
    """Split a tag: ("B", "PER"); ("O", None); a bare "B" has the type "_"."""
    if tag == "O":
        return "O", None
    if not (found := _TAG.fullmatch(tag)):
        raise UserError(f"the tag {tag!r} is none of O, B-TYPE, I-TYPE")
    return found[1], found[2] or "_"


def _entities(
    sentences: Sequence[Sequence[str]],
) -> Iterator[tuple[int, int, int, str]]:
    """Yield (sentence, first token, end, type) of each entity."""
    for n, tags in enumerate(sentences):
        begin, open_kind = 0, None
        for at, tag in enumerate([*tags, "O"]):
            mark, kind = _parse(tag)
            if mark != "I" or kind != open_kind:
                if open_kind is not None:
                    yield n, begin, at, open_kind
                begin, open_kind = at, kind

# SPDX-License-Identifier: Apache-2.0
"""Metrics of answers to questions, in percent, by the rules of SQuAD and CMRC 2018.

The score of a question is the best over its gold answers; the score of a data set is
the mean over its questions. A question without a prediction scores 0.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

import numpy as np

from bertjax.tasks.text_metrics import spaced

Golds = Mapping[str, Sequence[str]]  # question -> gold answers; (): unanswerable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The punctuation in CMRC's rule; all other characters count.
_CMRC_MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"
_NO_MARKS = str.maketrans("", "", _CMRC_MARKS)
# Runs of characters that are not Chinese are split at spaces and at these. A period
# belongs to its word except at the end of the run. The official script uses nltk, which
# does the same except for contractions.
_CUT = r"[;@#$%&?!\[\](){}<>\"–—]|,(?!\d)|\.(?=\s*(?:[\u4e00-\u9fa5]|$))"
_UNIT = re.compile(rf"[\u4e00-\u9fa5]|{_CUT}|(?:(?!{_CUT})[^\s\u4e00-\u9fa5])+")


# ------------------------------------------------------------------ SQuAD
def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles, collapse spaces.

    >>> normalize_answer("  The U.S.  Army—an army")
    'us army— army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def squad_scores(
    predictions: Mapping[str, str],
    golds: Golds,
    no_answer: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return `exact` and `f1` by SQuAD's official rules, in percent.

    f1 compares the normalized words as multisets. If some question has no gold answer,
    the rules of version 2.0 apply: the right answer to such a question is ""; if either
    side is empty, f1 is 1 if both are, otherwise 0; gold answers that normalize to ""
    do not count; and the parts `HasAns_*` and `NoAns_*` are returned too. Under version
    1.1 an answer that normalizes to "" has f1 0.

    no_answer: for each question a number that grows with the model's belief that there
    is no answer, on any scale. Adds `best_exact`, `best_f1` and `best_*_thresh`, the
    threshold above which predictions count as "". Unlike with the official script,
    these thresholds reproduce the best scores: questions of equal no_answer change
    together, and if it is best to answer none, the threshold is just below the smallest
    no_answer.

    >>> squad_scores({"a": "the cat"}, {"a": ["Cat", "A black cat"]})
    {'exact': 100.0, 'f1': 100.0}
    """
    if not golds:
        return {"exact": 0.0, "f1": 0.0}
    answerable = np.array([bool(g) for g in golds.values()])
    v2 = not answerable.all()
    scores = {"exact": np.zeros(len(golds)), "f1": np.zeros(len(golds))}
    empty = np.zeros(len(golds), bool)  # whether "" is a right answer
    for n, (name, answers) in enumerate(golds.items()):
        forms = [normalize_answer(a) for a in answers]
        if v2:
            forms = [f for f in forms if f] or [""]
        empty[n] = v2 and "" in forms
        if name in predictions:
            answer = normalize_answer(predictions[name])
            scores["exact"][n] = answer in forms
            scores["f1"][n] = max(
                _overlap(answer.split(), f.split(), v2) for f in forms
            )
    parts = {"": np.ones(len(golds), bool)}
    if v2:
        parts |= {"HasAns_": answerable, "NoAns_": ~answerable}
    found = {
        part + kind: 100 * float(score[chosen].mean())
        for part, chosen in parts.items()
        for kind, score in scores.items()
        if chosen.any()
    }
    if no_answer is not None:
        doubt = np.array([no_answer[name] for name in golds])
        for kind, score in scores.items():
            best, threshold = _best_threshold(score, empty, doubt)
            found |= {f"best_{kind}": best, f"best_{kind}_thresh": threshold}
    return found


def open_scores(answers: Mapping[str, str], golds: Golds) -> dict[str, float]:
    """Return `squad_scores` from 0 to 1, for answers that need not be spans.

    A character of a script without spaces is a word.

    >>> open_scores({"a": "巴 黎"}, {"a": ["巴黎"]})
    {'exact': 1.0, 'f1': 1.0}
    """
    guesses = {name: spaced(answer) for name, answer in answers.items()}
    right = {name: [*map(spaced, gold)] for name, gold in golds.items()}
    return {name: v / 100 for name, v in squad_scores(guesses, right).items()}


def _overlap(guessed: list[str], true: list[str], v2: bool) -> float:
    if v2 and not (guessed and true):
        return float(guessed == true)
    shared = (Counter(guessed) & Counter(true)).total()
    return 2 * shared / (len(guessed) + len(true)) if shared else 0.0


def _best_threshold(
    score: np.ndarray, empty: np.ndarray, doubt: np.ndarray
) -> tuple[float, float]:
    """Return the best score, in percent, and the largest doubt that is answered.

    score f64 [n]: of the predictions; empty bool [n]: whether "" would score 1.
    """
    order = np.argsort(doubt, kind="stable")
    gain = np.cumsum((score - empty)[order])  # gain[n]: of answering the first n + 1
    doubt = doubt[order]
    last = np.append(doubt[1:] != doubt[:-1], True)  # the last of equal doubts
    totals = np.append(0.0, gain[last])
    at = int(np.argmax(totals))
    best = 100 * float(empty.sum() + totals[at]) / len(score)
    return best, float(np.append(np.nextafter(doubt[0], -np.inf), doubt[last])[at])


# ------------------------------------------------------------------ CMRC 2018
def cmrc_units(text: str) -> list[str]:
    """Split into Chinese characters and runs of other ones, without punctuation.

    >>> cmrc_units("《跑跑》由Nexon 开发-3.5。")
    ['跑', '跑', '由', 'nexon', '开', '发', '3.5']
    """
    return _UNIT.findall(text.lower().translate(_NO_MARKS))


def cmrc_scores(predictions: Mapping[str, str], golds: Golds) -> dict[str, float]:
    """Return `exact` and `f1` by the rule of CMRC 2018, in percent.

    f1 is that of the longest common run of units (`cmrc_units`); exact compares the
    texts without punctuation.

    >>> cmrc_scores({"a": "韩国Nexon。"}, {"a": ["由韩国Nexon"]})
    {'exact': 0.0, 'f1': 85.71428571428571}
    """
    exact = overlap = 0.0
    for name, answers in golds.items():
        answer = predictions.get(name)
        if answer is not None and answers:
            exact += _without_marks(answer) in map(_without_marks, answers)
            units = cmrc_units(answer)
            overlap += max(_common_run(units, cmrc_units(a)) for a in answers)
    n = max(len(golds), 1)
    return {"exact": 100 * exact / n, "f1": 100 * overlap / n}


def _without_marks(text: str) -> str:
    return text.lower().strip().translate(_NO_MARKS)


def _common_run(guessed: list[str], true: list[str]) -> float:
    match = SequenceMatcher(None, guessed, true, autojunk=False).find_longest_match()
    return 2 * match.size / (len(guessed) + len(true)) if match.size else 0.0

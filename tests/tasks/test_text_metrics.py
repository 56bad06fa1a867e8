# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated texts, against known values."""

import importlib.util
import math

import pytest

from bertjax import UserError
from bertjax.scoring.answers import diversity
from bertjax.tasks import text_metrics

TEXTS = ["the cat sat on the mat", "a dog runs"]
RIGHT = [["the cat sat on the mat", "a cat sat"], ["a dog ran home"]]


def test_bleu_of_known_strings():
    pytest.importorskip("sacrebleu")
    assert text_metrics.bleu(TEXTS[:1], RIGHT[:1]) == pytest.approx(1)
    # By hand: 8 of 9, 6 of 7, 4 of 5 and 3 of 3 of the 1- to 4-grams are right; the
    # texts have 9 words, and the references nearest in length have 6 + 4.
    precisions = 8 / 9, 6 / 7, 4 / 5, 3 / 3
    hand = math.exp(1 - 10 / 9) * math.prod(precisions) ** 0.25
    assert text_metrics.bleu(TEXTS, RIGHT) == pytest.approx(hand, rel=1e-6)
    upper = [["THE CAT SAT ON THE MAT"]]
    assert text_metrics.bleu(TEXTS[:1], upper) == 0
    assert text_metrics.bleu(TEXTS[:1], upper, lower=True) == pytest.approx(1)


def test_rouge_of_known_strings():
    pytest.importorskip("rouge_score")
    found = text_metrics.rouge(TEXTS, RIGHT)
    # For "a dog", 2 words are common, of 3 and of 4; and 1 bigram, of 2 and of 3.
    of_dog = 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    of_pair = 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)
    hand = [(1 + x) / 2 for x in (of_dog, of_pair, of_dog)]
    assert [found[name] for name in text_metrics.ROUGE] == pytest.approx(hand)


def test_scripts_without_spaces():
    """Text with spaces, as WordPiece decodes it, scores the same as without."""
    assert text_metrics.distinct(["巴 黎", "巴黎"], 1) == 2 / 4
    assert text_metrics.distinct(["巴 黎", "巴黎"], 2) == 1 / 2
    said = diversity(["巴 黎 。"], ("巴黎。",))
    assert said["words"] == said["people_words"] == 3
    # Full-width letters and digits form words like others; full-width signs are
    # separate.
    assert text_metrics.words_of("ＡＢ３！") == ["ＡＢ３", "！"]
    pytest.importorskip("sacrebleu")
    right = [["巴黎是首都。」"]]
    assert text_metrics.bleu(["巴 黎 是 首 都 。 」"], right) == pytest.approx(1)


def test_distinct():
    assert text_metrics.distinct(TEXTS, 1) == 8 / 9
    assert text_metrics.distinct(["a b a b"], 2) == 2 / 3
    assert text_metrics.distinct(["", "a"], 2) == 0


def test_what_is_asked_for_in_its_order():
    names = "distinct2", "perplexity", "distinct1"
    found = text_metrics.text_scores(names, TEXTS, RIGHT, False)
    assert [*found] == ["distinct2", "distinct1"]


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text_metrics.check_packages(["perplexity", "exact"], "task.metrics")
    for name, library in (("bleu", "sacrebleu"), ("rougeL", "rouge-score")):
        with pytest.raises(UserError) as e:
            text_metrics.check_packages([name], "task.metrics")
        told = f"task.metrics={name} needs {library}: pip install 'bertjax[text]'"
        assert str(e.value) == told

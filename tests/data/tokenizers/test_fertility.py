# SPDX-License-Identifier: Apache-2.0
"""Coverage and fertility, and how the exponent of a mixture changes them."""

import numpy as np
import pytest

from bertjax.data.tokenizers.fertility import Fit, measure_tokenizer, report_tokenizer
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += ["una", "##ffa", "##ble", ".", *"我来到北京"]


def test_what_is_counted(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    texts = ["Unaffable 龘 .", "", "xyz"] * 700
    fit = measure_tokenizer(tokenizer, texts)
    assert fit == Fit(14 * 700, 10 * 700, 700, 4 * 700, 6 * 700)
    assert measure_tokenizer(tokenizer, []) == Fit()
    components = {"a": ["una xy"], "b": ["我来"], "c": []}
    components |= {"d": texts, "e": ["我来到北京. a"]}
    assert report_tokenizer(tokenizer, components) == [
        "a: 60.000% of 5 characters known, 1.00 tokens a word (2)",
        "b: 100.000% of 2 characters known, 1.00 tokens a character (2)",
        "c: 0.000% of 0 characters known, 0.00 tokens a word (0)",
        "d: 71.429% of 9,800 characters known, 1.50 tokens a word (2,800)",
        "e: 85.714% of 7 characters known, 1.00 tokens a character (7)",
    ]


def test_unknown_words_with_capitals_are_told_of(tmp_path):
    """This happens with bert-base-chinese if nothing states that it lower-cases."""
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), "utf-8")
    cased = load_tokenizer(tmp_path, lower_case=False)
    texts = ["我来到北京 Una XY xy", "una Unaffable"]
    assert measure_tokenizer(cased, texts).capitals == 2
    assert report_tokenizer(cased, {"zh": texts})[1:] == [
        "zh: 20.00% of a sample's tokens are unknown words with capitals, which the "
        "vocabulary knows in lower case: try data.lower_case=true"
    ]
    assert len(report_tokenizer(cased, {"zh": ["我来到北京 xy"]})) == 1
    lower = load_tokenizer(tmp_path, lower_case=True)
    assert measure_tokenizer(lower, texts).capitals == 0


def test_marks_that_lower_casing_drops_are_told_of():
    """Hindi without its vowel signs still counts as known."""
    texts = ["पैंथर्स की डिफ़ेन्स ने लीग में", "Été à Sète"]
    lower, cased, byte_bpe = (
        train_tokenizer(texts * 5, kind, 300, lower_case=lower)
        for kind, lower in (
            ("wordpiece", True),
            ("wordpiece", False),
            ("byte_bpe", True),
        )
    )
    _, line = report_tokenizer(lower, {"hi": texts[:1]})
    assert line.startswith("hi: 9 accents, vowel signs and tones of these are dropped")
    assert measure_tokenizer(lower, texts[1:]).marks == 4
    assert lower.decode(lower.encode(texts[1])) == "ete a sete"
    for kept in (cased, byte_bpe):
        assert measure_tokenizer(kept, texts).marks == 0
        assert len(report_tokenizer(kept, {"hi": texts})) == 1
    assert len(report_tokenizer(lower, {"en": ["naïve " + "word " * 100]})) == 1


def language(letters: str, n: int, seed: int) -> list[str]:
    """Return sentences of 300 made-up words that follow Zipf's law."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list(letters), 6)) for _ in range(300)]
    law = 1 / np.arange(1, 301)
    return [" ".join(rng.choice(words, 12, p=law / law.sum())) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece", "byte_bpe"])
def test_a_small_exponent_helps_the_small_language(kind):
    from bertjax.data.token_store.trained_tokenizer import sample_mixture

    alphabets = {"big": "abcdefghij", "small": "абвгдежзий"}
    train = {"big": language(alphabets["big"], 6000, 1)}
    train["small"] = language(alphabets["small"], 60, 2)
    held = {"big": train["big"][-300:], "small": language(alphabets["small"], 300, 2)}
    found = {}
    for alpha in (1.0, 0.3):
        texts = [(name, text) for name in train for text in train[name]]
        sample = sample_mixture(texts, alpha, 200_000)
        tokenizer = train_tokenizer(sample, kind, 500)
        found[alpha] = {n: measure_tokenizer(tokenizer, held[n]) for n in held}
        assert all(fit.known == fit.characters for fit in found[alpha].values())
    tokens = {
        (alpha, name): fit.tokens / fit.words
        for alpha, fits in found.items()
        for name, fit in fits.items()
    }
    assert tokens[0.3, "small"] < 0.9 * tokens[1.0, "small"]
    assert tokens[0.3, "big"] > tokens[1.0, "big"]

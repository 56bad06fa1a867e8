# SPDX-License-Identifier: Apache-2.0
"""Pseudo-log-likelihoods against loops with one mask per forward pass."""

import itertools

import jax
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.objectives import electra
from bertjax.scoring import pseudo_likelihoods as pll

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
    initializer_range=0.5,
)


class Letters:
    """A tokenizer with one token per letter; lower-case letters continue a word."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)
    vocab_size = 33  # the table has more rows, which are padding
    pieces = ("pad", "unk", "cls", "sep", "mask", *"ABCDEFGHIJKLMNabcdefghijklmn")
    word_starts = np.array([not p.islower() or i < 5 for i, p in enumerate(pieces)])

    def encode_batch(self, texts):
        return [
            [self.pieces.index(x) if x in self.pieces else self.unk_id for x in text]
            for text in texts
        ]


TOKENIZER = Letters()
TEXTS = ["AbcBa", "A", "CdEfgHABB", "aBcDDDeEfFaBcAbAbbbAbAb", "AbcBz", "", "Aa" * 32]


def model(name):
    cfg = EncoderConfig(**SIZES, **ENCODERS[name])
    a, b = jax.random.split(jax.random.key(3))
    return cfg, {"encoder": encoder.init(a, cfg), "mlm": heads.init_mlm(b, cfg)}


def naive(cfg, params, ids, variant):
    """Mask one token per row, without padding, and compute all logits."""
    row = np.array([[TOKENIZER.cls_id, *ids, TOKENIZER.sep_id]], np.int32)

    masked = np.repeat(row, len(ids), axis=0)
    for i in range(1, len(ids) + 1):
        masked[i - 1, i] = TOKENIZER.mask_id
        if variant == "within_word":
            for j in range(i + 1, len(ids) + 1):
                if TOKENIZER.word_starts[ids[j - 1]]:
                    break
                masked[i - 1, j] = TOKENIZER.mask_id
    word = params["encoder"]["embeddings"]["word"]

    @jax.jit
    def logits(masked):
        batch = {"input_ids": masked, "attention_mask": masked * 0 + 1}
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        found = heads.mlm_logits(params["mlm"], word, cfg, hidden)
        return jax.nn.log_softmax(found)

    found = np.asarray(logits(masked), np.float64)
    return sum(found[i, i + 1, true] for i, true in enumerate(ids))


def score_texts(cfg, params, texts, variant="original"):
    score = pll.make_scorer(cfg, params, TOKENIZER, variant)
    return pll.score_texts(cfg, TOKENIZER, texts, score)


@pytest.mark.parametrize(
    "name, variant",
    [
        ("local", "original"),
        ("shared", "within_word"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bert", "original"),
                ("shared", "original"),
                ("bert", "within_word"),
                ("local", "within_word"),
            )
        ),
    ],
)
def test_equals_one_mask_a_forward(name, variant):
    cfg, params = model(name)
    texts = TEXTS[:1] if name != "bert" else TEXTS[:3]
    scores = score_texts(cfg, params, texts, variant)
    for text, score in zip(texts, scores, strict=True):
        [ids] = TOKENIZER.encode_batch([text])
        assert score.score == pytest.approx(naive(cfg, params, ids, variant), rel=1e-5)


def test_what_is_said_of_a_line():
    cfg, params = model("bert")
    scores = score_texts(cfg, params, TEXTS)
    assert [s.tokens for s in scores] == [len(text) for text in TEXTS]
    assert [s.words for s in scores] == [2, 1, 6, 12, 3, 0, 32]
    assert [s.unknown for s in scores] == [0, 0, 0, 0, 1, 0, 0]
    assert scores[5].score is None, "no token has no probability, not that of 1"
    assert scores[6].score is None, "64 tokens and two specials: more than 64"
    fits = score_texts(cfg, params, ["Aa" * 31])
    assert fits[0].score < 0


def test_neighbours_and_batches_do_not_matter(monkeypatch):
    cfg, params = model("bert")
    texts = [TEXTS[0], TEXTS[2], TEXTS[4], TEXTS[0]]
    together = score_texts(cfg, params, texts, "within_word")
    assert together[0] == together[3]
    monkeypatch.setattr(pll, "LENGTHS", 1)  # pad all rows to the longest
    scorer = pll.make_scorer(cfg, params, TOKENIZER, "within_word", batch_size=3)
    ids = TOKENIZER.encode_batch(texts[::-1])
    want = [score.score for score in together[::-1]]
    assert scorer(ids) == pytest.approx(want, rel=1e-5)


def test_rows_of_the_worked_example():
    ids = TOKENIZER.encode_batch(["ABc"])
    _, b, c = ids[0]
    mask = TOKENIZER.mask_id
    for variant, second in (
        ("original", [2, ids[0][0], mask, c, 3]),
        ("within_word", [2, ids[0][0], mask, mask, 3]),
    ):
        [(which, batch)] = pll.batches(ids, TOKENIZER, variant)
        sizes, at, truth = (batch[k] for k in ("sizes", "mlm_positions", "truth"))
        assert which.tolist() == [0, 0, 0]
        assert batch["input_ids"].tolist() == [
            [2, mask, b, c, 3],
            second,
            [2, ids[0][0], b, mask, 3],
        ]
        assert sizes.tolist() == [5] * 3 and at.tolist() == [[1], [2], [3]]
        assert truth.tolist() == ids[0]
    _, (which, batch) = pll.batches(ids, TOKENIZER, "original", batch_size=2)
    assert which.tolist() == [0] and len(batch["truth"]) == 2


def test_lengths_that_cost_least():
    sizes = np.array([3, 3, 4, 7, 7, 7, 9, 11, 20, 21])

    def cost(chosen):
        return (np.array(chosen)[np.searchsorted(chosen, sizes)] * sizes).sum()

    known = np.unique(sizes).tolist()
    for most in (1, 2, 3, 9):
        found = pll.choose_lengths(sizes, most)
        tried = (
            [*some, known[-1]]
            for n in range(min(most, len(known)))
            for some in itertools.combinations(known[:-1], n)
        )
        assert len(found) <= most and cost(found) == min(map(cost, tried))
    assert pll.choose_lengths(np.zeros(0, np.int32), 2) == []


def test_of_electra_the_generator_scores():
    cfg = EncoderConfig(**SIZES)
    objective, cfg = electra.make_objective(cfg, generator=0.5)
    params = objective.init(jax.random.key(1))
    own, small = electra.split_pair(params, cfg)["generator"]
    [got] = score_texts(cfg, params, TEXTS[:1])
    [ids] = TOKENIZER.encode_batch(TEXTS[:1])
    assert got.score == pytest.approx(naive(small, own, ids, "original"), rel=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Pseudo-log-likelihoods of encoder-decoders, against their training loss."""

import jax
import numpy as np
import pytest
from made_up import fake_tokenizer
from scipy.special import logsumexp

from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.scoring import rewritten

V, ROOM = 24, 12
RATES = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
CFG = EncoderConfig(
    V, 16, 2, 2, 32, num_decoder_layers=2, type_vocab_size=0, pooler=False,
    classifier_transform=False, max_position_embeddings=32, unroll=1, **RATES,
)  # fmt: skip
OBJECTIVE, _ = make_objective("denoise", CFG)
STARTS = np.arange(V) % 2 == 0  # odd ids continue a word
TEXTS = [(10, 11, 12), (6,), (8, 9, 11, 14, 15), (10, 11, 12)]
SENTINELS = np.array([20, 19])
TOKENIZER = fake_tokenizer(V, word_starts=STARTS, sentinel_ids=SENTINELS)


@pytest.fixture(scope="module")
def params():
    return jax.jit(OBJECTIVE.init)(jax.random.key(0))


def scores(params, texts, spans, variant="original", **more):
    how = rewritten.hiding(TOKENIZER, spans)
    score = rewritten.make_scorer(CFG, params, TOKENIZER, how, variant, **more)
    return score(texts)


def loss_of(params, read, written, truth):
    """Return the objective's loss of a row in which only the last token counts."""
    n, t = len(read), len(written)
    pad = lambda ids: np.array([ids + [0] * (ROOM - len(ids))], np.int32)  # noqa: E731
    batch = {
        "input_ids": pad(read),
        "attention_mask": pad([1] * n),
        "decoder_input_ids": pad(written),
        "decoder_attention_mask": pad([1] * t),
        "lm_ids": pad([0] * (t - 1) + [truth]),
        "lm_weights": pad([0] * (t - 1) + [1]).astype(np.float32),
    }
    return float(SUMS(params, batch)["denoise_loss"].value)


SUMS = jax.jit(lambda params, batch: OBJECTIVE.sums(params, batch, None))


def all_of(rows, make):
    return [make(k) for k in range(len(rows.truth))]


def test_a_row_a_token():
    t5 = rewritten.hiding(TOKENIZER, spans=True)
    bart = rewritten.hiding(TOKENIZER, spans=False)
    rows = rewritten.make_rows([(10, 11, 12), (6,)], t5, None)
    assert all_of(rows, rows.read) == [
        [20, 11, 12, 3],
        [10, 20, 12, 3],
        [10, 11, 20, 3],
        [20, 3],
    ]
    assert all_of(rows, rows.written) == [[0, 20]] * 4
    assert rows.truth.tolist() == [10, 11, 12, 6]
    assert rows.text.tolist() == [0, 0, 0, 1]
    rows = rewritten.make_rows([(10, 11, 13, 12)], bart, STARTS)
    assert all_of(rows, rows.read) == [
        [2, 4, 12, 3],
        [2, 10, 4, 12, 3],
        [2, 10, 11, 4, 12, 3],
        [2, 10, 11, 13, 4, 3],
    ]
    wanted = [[3, 2, *(10, 11, 13)[:i]] for i in range(4)]
    assert all_of(rows, rows.written) == wanted
    assert rows.sizes.tolist() == [4, 5, 6, 6]


@pytest.mark.parametrize("variant", ["original", "within_word"])
@pytest.mark.parametrize("spans", [True, False])
def test_scores_are_what_the_objective_costs(spans, variant, params):
    found = scores(params, TEXTS, spans, variant, batch_size=4)
    starts = STARTS if variant == "within_word" else None
    rows = rewritten.make_rows(TEXTS, rewritten.hiding(TOKENIZER, spans), starts)
    sides = all_of(rows, rows.read), all_of(rows, rows.written)
    parts = zip(*sides, rows.truth.tolist(), strict=True)
    costs = [loss_of(params, *part) for part in parts]
    wanted = -np.bincount(rows.text, costs)
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert found[0] == found[3]


@pytest.mark.parametrize("spans", [True, False])
def test_no_token_is_seen_where_it_is_guessed(spans, params):
    """The likelihoods of all texts of one token add up to 1."""
    found = scores(params, [(token,) for token in range(V)], spans)
    assert logsumexp(found) == pytest.approx(0, abs=1e-5)


def test_what_a_vocabulary_lacks_is_named():
    bare = fake_tokenizer(V, sentinel_ids=np.array([], int), has_mask=False)
    with pytest.raises(LookupError, match="mask token"):
        rewritten.hiding(bare, spans=False)
    with pytest.raises(LookupError, match="extra_id_0"):
        rewritten.hiding(bare, spans=True)

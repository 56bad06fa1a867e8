# SPDX-License-Identifier: Apache-2.0
"""Which scorer goes with which model, and the scores of each."""

import jax
import numpy as np
import pytest
from test_pseudo_likelihoods import SIZES, TOKENIZER, naive

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.config.schema import base
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.scoring.sequence_scorers import (
    LanguageModel,
    Options,
    find_scorers,
    pick_scorer,
    score_texts,
)

CFG = EncoderConfig(**SIZES, pooler=False)
TEXTS = ["AbcBa", "CdEfg", "", "Aa" * 32]


@pytest.fixture(scope="module")
def lm():
    a, b = jax.random.split(jax.random.key(3))
    params = {"encoder": encoder.init(a, CFG), "mlm": heads.init_mlm(b, CFG)}
    config = base()
    config.objective = "mntp*15+clm*1"
    return LanguageModel(
        CFG, params, TOKENIZER, config, (config.objective,), 64, True, {}
    )


@pytest.mark.parametrize(
    "objective, scorers",
    [
        ("mlm", "pll elbo"),
        ("mlm+nsp", "pll elbo"),
        ("electra:generator=0.25", "pll elbo"),
        ("clm", "lm"),
        ("prefix:least=0.5", "lm"),
        ("mntp", "mntp lm elbo"),
        ("mntp:z_loss=1e-4*15+clm*1", "mntp lm elbo"),
        ("mntp*0+clm*1", "lm"),
        ("mlm*3+clm*1", "pll lm elbo"),
        ("diffusion:schedule=cosine", "elbo pll"),
        ("my_lab.fills", "pll elbo"),
    ],
)
def test_what_an_objective_learns(objective, scorers):
    """The scorers of an objective; the first is the default."""
    learnt = [objective]
    assert find_scorers(False, learnt) == scorers.split()
    assert find_scorers(True, learnt) == ["lm"]
    assert pick_scorer(None, False, learnt, "--scorer", "m") == scorers.split()[0]


def test_what_earlier_phases_taught_is_scored_too():
    """The scorer of the last phase is the default."""
    assert find_scorers(False, ["mlm", "clm", "mlm"]) == ["pll", "lm", "elbo"]
    assert find_scorers(False, ["clm", "mlm"]) == ["lm", "pll", "elbo"]
    config = base()
    config.objective = "mlm"
    config.phases = "percent=25 objective=clm; objective=mlm"
    assert resolve.trained_objectives(config) == ("mlm", "clm", "mlm")


@pytest.mark.parametrize(
    "objective, phases, before",
    [
        ("mlm+nsp", "", False),
        ("mntp*15+clm*1", "", True),
        ("clm", "percent=25 objective=mntp; objective=clm", True),
        ("mlm", "percent=25 objective=mntp; objective=mlm", False),
        ("clm", "", False),
    ],
)
def test_where_masked_tokens_are_predicted(objective, phases, before):
    config = base()
    config.objective, config.phases = objective, phases
    assert resolve.reads_before(config) is before


@pytest.mark.parametrize(
    "given, words",
    [
        (
            ("lm", False, ["mlm"], "--what", "runs/a"),
            "--what=lm: runs/a has objective=mlm, which never predicts the next token: "
            "use --what=pll or --what=elbo",
        ),
        (
            ("elbo", False, ["clm"], "--what", "runs/a"),
            "--what=elbo: runs/a has objective=clm, which never fills masks: use "
            "--what=lm",
        ),
        (
            ("pll", False, ["mntp*3+clm*1"], "--scorer", "runs/a"),
            "use --scorer=mntp or --scorer=lm or --scorer=elbo",
        ),
        (
            ("mntp", True, ["clm"], "--scorer", "a"),
            "the place before it: use --scorer=lm",
        ),
        (("ppl", False, ["mlm"], "--scorer", "a"), "--scorer='ppl' is unknown"),
    ],
)
def test_what_it_never_learnt_is_refused(given, words):
    with pytest.raises(UserError) as e:
        pick_scorer(*given)
    assert words in str(e.value) and "\n" not in str(e.value)


def logits(params, ids, causal=False):
    batch = {"input_ids": ids, "attention_mask": ids * 0 + 1}
    if causal:
        batch["attention_steps"] = ids * 0 + np.arange(1, ids.shape[1] + 1)
    hidden = encoder.apply(params["encoder"], CFG, batch).hidden
    word = params["encoder"]["embeddings"]["word"]
    found = heads.mlm_logits(params["mlm"], word, CFG, hidden)
    return np.asarray(jax.nn.log_softmax(found), np.float64)


def test_mntp_reads_the_place_before(lm):
    [ids] = TOKENIZER.encode_batch(TEXTS[:1])
    row = np.array([[2, *ids, 3]] * len(ids), np.int32)
    row[np.arange(len(ids)), 1 + np.arange(len(ids))] = TOKENIZER.mask_id
    found = logits(lm.params, row)
    want = sum(found[i, i, true] for i, true in enumerate(ids))
    scores = score_texts(lm, TEXTS, "mntp")
    assert scores[0].score == pytest.approx(want, rel=1e-5)
    assert scores[2].score is None and scores[3].score is None
    place = score_texts(lm, TEXTS[:1], "pll")[0].score
    assert place == pytest.approx(naive(CFG, lm.params, ids, "original"), rel=1e-5)
    assert abs(place - want) > 0.1


def test_lm_of_an_encoder_sees_no_later_token(lm):
    [ids] = TOKENIZER.encode_batch(TEXTS[:1])
    found = logits(lm.params, np.array([[2, *ids]], np.int32), causal=True)[0]
    want = sum(found[i, true] for i, true in enumerate(ids))
    # A clm model becomes a decoder, as in training; otherwise steps make it causal.
    assert lm.causal[0].is_decoder and not lm.causal[1]
    by_steps = lm._replace(learnt=("mntp",))
    assert by_steps.causal == (CFG, True)
    [one] = score_texts(by_steps, TEXTS[:1], "lm")
    assert one.score == pytest.approx(want, rel=1e-5)
    scores = score_texts(lm, TEXTS, "lm")
    assert scores[0].score == pytest.approx(want, rel=1e-5)
    assert scores[2].score is None and scores[3].score is None
    assert score_texts(lm, TEXTS[:2], "lm")[1] == scores[1]


def test_elbo_is_exact_where_all_masks_are_drawn(lm):
    """Five tokens have 31 masks; with fewer draws the bound is near."""
    exact, _ = score_texts(lm, TEXTS[:2], "elbo", Options(draws=32))
    drawn, _ = score_texts(lm, TEXTS[:2], "elbo", Options(draws=30))
    assert exact.score != drawn.score
    assert exact.score == pytest.approx(drawn.score, rel=0.2)

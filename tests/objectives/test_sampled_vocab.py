# SPDX-License-Identifier: Apache-2.0
"""The loss over a sample of the vocabulary, against that over the whole one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import train_steps
from scipy import stats
from test_objectives import CFG, make_batch

from bertjax import UserError
from bertjax.models.heads import init_mlm, token_logits
from bertjax.objectives.combine import combine
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.sampled_vocab import draw_sample, restrict
from bertjax.objectives.token_head import make_token_head, score_in_chunks
from bertjax.parallel.mesh import make_mesh

V, PIECES, SIZE = 40, 37, 16  # the last three rows pad the table
PREDICTED = np.isin(np.arange(V), (1, 5, 8, 30))
CONFIGS = {
    "tied": {},
    "own matrix": {"tie_word_embeddings": False},
    "no bias": {"decoder_bias": False, "classifier_transform": False},
    "in pieces": {"max_logits_mb": 1, "vocab_size": 70_000, "pieces": 69_999},
}


def draw(seed):
    key, predicted = jax.random.key(seed), jnp.asarray(PREDICTED)
    return draw_sample(key, predicted, SIZE, V, PIECES)


def test_a_sample_has_the_predicted_ids_and_others_alike():
    samples = jax.vmap(draw)(jnp.arange(3000))
    ids, place = np.array(samples.ids), np.array(samples.place)
    assert all(len(set(row)) == SIZE for row in ids.tolist())
    assert ids.max() < PIECES
    counts = np.bincount(ids.ravel(), minlength=V)
    assert (counts[PREDICTED] == 3000).all()
    others = np.flatnonzero(~PREDICTED & (np.arange(V) < PIECES))
    # Each of 33 ids is drawn with probability 12 / 33, and rows have no id twice, which
    # makes the counts' squared deviations smaller by (1 - 12 / 33) (33 / 32).
    expected = 3000 * 12 / 33
    squares = ((counts[others] - expected) ** 2 / (expected * (1 - 12 / 33))).sum()
    assert 0.001 < stats.chi2.sf(squares * 32 / 33, 32) < 0.999
    rows = np.arange(len(ids))[:, None]
    assert (place[rows, ids] == np.arange(SIZE)).all()
    assert ((place >= 0).sum(axis=1) == SIZE).all()


def test_the_sum_over_a_sample_has_the_whole_sum_as_its_mean():
    logits = 2 * np.random.default_rng(0).standard_normal(V)
    samples = jax.vmap(draw)(jnp.arange(3000))
    sums = np.exp(logits[np.array(samples.ids)] + np.array(samples.raised)).sum(axis=1)
    error = sums.std() / np.sqrt(len(sums))
    assert abs(sums.mean() - np.exp(logits[:PIECES]).sum()) < 4 * error
    assert error < 0.02 * sums.mean()  # so the line above can fail


@pytest.mark.parametrize("more", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradient_are_those_of_the_whole_vocabularys_logits(more):
    """The reference has the logits of all ids, those outside the sample at -inf."""
    cfg = dataclasses.replace(CFG, pooler=False, vocab_size=V, pieces=PIECES)
    cfg = dataclasses.replace(cfg, **more)
    rng, key = np.random.default_rng(0), jax.random.key(3)
    params = {
        "mlm": init_mlm(jax.random.key(0), cfg),
        "encoder": {"embeddings": {"word": normal(rng, cfg.vocab_size, 32)}},
    }
    if "bias" in params["mlm"]:
        params["mlm"]["bias"] = normal(rng, cfg.vocab_size)
    hidden = normal(rng, 4, 6, 32)
    ids = rng.integers(0, PIECES, (4, 6)).astype(np.int32)
    weights = (rng.random((4, 6)) < 0.4).astype(np.float32)
    flags = np.isin(np.arange(cfg.vocab_size), ids[weights > 0])
    sample = draw_sample(key, flags, SIZE, cfg.vocab_size, cfg.pieces)

    def loss(params, hidden):
        own, small, *drawn = restrict(params, cfg, ids, weights, SIZE, key)
        terms = score_in_chunks(own, small, (hidden, *drawn), z_loss=0.1)
        return terms["mlm_loss"].value + 0.1 * terms["mlm_z_loss"].value

    def reference(params, hidden):
        logits = token_logits(params, cfg, hidden)
        raised = jnp.full(cfg.vocab_size, -jnp.inf).at[sample.ids].set(sample.raised)
        norm = jax.nn.logsumexp(logits + raised, axis=-1)
        true = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
        return jnp.sum(weights * (norm - true + 0.1 * norm**2))

    ours, theirs = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(params, hidden)
        for f in (loss, reference)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_training_draws_by_the_step_and_evaluations_see_all():
    cfg = dataclasses.replace(CFG, pooler=False)
    batch = make_batch()
    whole, part = (
        combine([make_token_head("mlm", frozenset(), sampled_vocab=n)], cfg)
        for n in (0, SIZE)
    )
    params = jax.jit(whole.init)(jax.random.key(0))
    params["mlm"]["bias"] = normal(np.random.default_rng(0), cfg.vocab_size)

    def loss(objective, rng):
        return float(objective.sums(params, batch, rng)["mlm_loss"].value)

    assert loss(part, None) == loss(whole, None)
    first, again, other = (loss(part, jax.random.key(seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert first != loss(whole, jax.random.key(0))


@pytest.mark.parametrize("layout", [(8, 1, 1), (2, 2, 2)])
def test_devices_share_a_sample(layout):
    objective, _ = make_objective("mlm:sampled_vocab=16", CFG)
    batches = [
        {k: np.concatenate([v, v[::-1]]) for k, v in make_batch(step).items()}
        for step in range(3)
    ]
    one = make_mesh(devices=jax.devices()[:1])
    (rows, params), (expected, wanted) = (
        train_steps(objective, mesh, batches) for mesh in (make_mesh(*layout), one)
    )
    for a, b in zip(rows, expected, strict=True):
        key = "train/mlm_loss"
        assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-4)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_more_predicted_ids_than_the_sample_holds():
    cfg = dataclasses.replace(CFG, pooler=False, vocab_size=V)
    rng = np.random.default_rng(0)
    word = {"embeddings": {"word": normal(rng, V, 32)}}
    params = {"mlm": init_mlm(jax.random.key(0), cfg), "encoder": word}
    ids = np.arange(24, dtype=np.int32).reshape(4, 6)
    ones = np.ones((4, 6), np.float32)
    own, small, places, weights = restrict(params, cfg, ids, ones, 8, jax.random.key(0))
    assert small.vocab_size == 8 and float(weights.sum()) == 8
    terms = score_in_chunks(own, small, (normal(rng, 4, 6, 32), places, weights))
    assert np.isfinite(terms["mlm_loss"].value)


@pytest.mark.parametrize(
    "size, more, message",
    [
        (-1, {}, "mlm's sampled_vocab=-1 must be 0 or more"),
        (40, {"pieces": 40}, "sampled_vocab=40 is not less than the vocabulary, 40"),
        (8, {"final_logit_softcapping": 5.0}, "final_logit_softcapping=5.0 would cap"),
    ],
)
def test_refused(size, more, message):
    cfg = dataclasses.replace(CFG, pooler=False, **more)
    with pytest.raises(UserError, match=message):
        head = make_token_head("mlm", frozenset(), sampled_vocab=size)
        combine([head], cfg).init(jax.random.key(0))

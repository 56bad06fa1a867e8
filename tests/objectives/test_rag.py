# SPDX-License-Identifier: Apache-2.0
"""RAG's marginals: transformers' values, consistency, padding, devices, generation."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps

from bertjax.generation.answers import Writing, write
from bertjax.objectives import rag
from bertjax.objectives.base import TokenIds
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.mesh import make_mesh

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/rag_golden.npz")
B, K, L, T, V = 8, 3, 12, 4, 40


def target_log_probs(logits, ids):
    """Return ln p of the target's tokens, f32 [B, k, T], from logits [B, k, T, V]."""
    likely = jax.nn.log_softmax(jnp.asarray(logits))
    return jnp.take_along_axis(likely, jnp.asarray(ids)[:, None, :, None], -1)[..., 0]


def by_golden(which=slice(None), k=slice(None)):
    logits, scores = GOLDEN["logits"][which, k], GOLDEN["scores"][which, k]
    ids = GOLDEN["ids"][which]
    likely = target_log_probs(logits, ids)
    passages = jax.nn.log_softmax(jnp.asarray(scores), axis=1)
    args = likely, passages, jnp.asarray(ids > 0, jnp.float32)
    return rag.sequence_log_probs(*args), rag.token_log_probs(*args)


def test_marginals_are_those_of_transformers():
    sequence, token = by_golden()
    # transformers' RAG-Sequence adds ln p(z | x) at the second token of a target. The
    # last target has only one token, so it loses p(z | x); ours equals RAG-Token's.
    np.testing.assert_allclose(sequence[:2], -GOLDEN["sequence"][:2], rtol=1e-5)
    np.testing.assert_allclose(token, -GOLDEN["token"], rtol=1e-5)
    np.testing.assert_allclose(sequence[2], token[2], rtol=1e-5)
    passages = jax.nn.log_softmax(jnp.asarray(GOLDEN["scores"]), axis=1)
    marginal = rag.marginal_log_probs(jnp.asarray(GOLDEN["logits"]), passages)
    np.testing.assert_allclose(marginal, GOLDEN["marginal"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(marginal).sum(-1), 1, rtol=1e-5)


def test_both_are_one_for_one_passage():
    sequence, token = by_golden(k=slice(1))
    np.testing.assert_allclose(sequence, token, rtol=1e-5)


def test_probabilities_of_all_targets_sum_to_one():
    """The targets are all pairs of tokens from a vocabulary of five."""
    draw = np.random.default_rng(1)
    first = draw.normal(size=(1, 3, 1, 5))
    second = draw.normal(size=(5, 3, 1, 5))  # given the first
    pairs = [(a, b) for a in range(5) for b in range(5)]
    logits = np.stack([np.concatenate([first[0], second[a]], 1) for a, _ in pairs])
    likely = target_log_probs(logits, pairs)
    passages = jax.nn.log_softmax(jnp.asarray(draw.normal(size=(1, 3))))
    args = likely, jnp.tile(passages, (25, 1)), jnp.ones((25, 2))
    for marginal in (rag.sequence_log_probs, rag.token_log_probs):
        assert float(jnp.exp(marginal(*args)).sum()) == pytest.approx(1, rel=1e-4)


def make_batch(decoder, k=K):
    """Make rows whose target repeats a token of the first passage.

    Every other row has one passage less.
    """
    draw = np.random.default_rng(0)
    real = np.arange(k) < np.where(np.arange(B) % 2, K - 1, K)[:, None]
    ids = np.zeros((B, k, L), np.int32)
    ids[:, :K] = draw.integers(8, V, (B, K, L))
    target = np.repeat(draw.integers(8, 12, (B, 1)), T, axis=1).astype(np.int32)
    weights = (np.arange(T) < draw.integers(2, T + 1, (B, 1))).astype(np.float32)
    ids[:, 0, 2] = target[:, 0]
    size = L if decoder else L - T
    mask = np.broadcast_to(np.arange(L) < L, ids.shape) * real[..., None]
    batch = {
        "passage_weights": real.astype(np.float32),
        "passage_scores": draw.normal(size=(B, k)).astype(np.float32),
        "lm_ids": target,
        "lm_weights": weights,
    }
    before = np.concatenate([np.full((B, 1), 3), target[:, :-1]], axis=1)
    wide = np.repeat(before[:, None], k, axis=1).astype(np.int32)
    if decoder:
        batch["decoder_input_ids"] = wide
        batch["decoder_attention_mask"] = np.ones_like(wide)
    else:
        ids[:, :, size:] = target[:, None]
        steps = np.maximum(np.arange(L) - size + 1, 0)
        batch["attention_steps"] = np.broadcast_to(steps, ids.shape).astype(np.int32)
        places = np.broadcast_to(np.arange(size - 1, L - 1), (B, k, T))
        batch["lm_positions"] = places.astype(np.int32)
    return batch | {"input_ids": ids, "attention_mask": mask.astype(np.int32)}


@pytest.fixture(scope="module", params=[0, 1], ids=["rows", "decoder"])
def generator(request):
    cfg = tiny_encoder(V, L, num_decoder_layers=request.param)
    objective, cfg = make_objective("rag:marginal=token,temperature=0.5", cfg)
    params = jax.jit(objective.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x * 4, params)  # so that passages differ
    return objective, cfg, params, jax.jit(objective.evaluate), request.param


def test_the_loss_is_that_of_its_parts(generator):
    _, cfg, params, run, decoder = generator
    batch = make_batch(decoder)
    batch["example_weights"] = np.float32([1] * (B - 1) + [0])
    sums, outputs = run(params, batch)
    known = np.where(batch["passage_weights"] > 0, batch["passage_scores"] / 0.5, -1e9)
    likely = np.float64(
        jax.jit(rag.read_targets, static_argnums=1)(params, cfg, batch, None)
    )
    odds = np.exp(known - np.log(np.exp(known).sum(1, keepdims=True)))
    each = np.log((odds[..., None] * np.exp(likely)).sum(1)) * batch["lm_weights"]
    np.testing.assert_allclose(outputs["nats"][:-1], -each.sum(1)[:-1], rtol=1e-4)
    want = -each.sum(1)[:-1].sum()
    assert float(sums["rag_loss"].value) == pytest.approx(want, rel=1e-4)
    assert float(sums["rag_loss"].weight) == batch["lm_weights"][:-1].sum()


def test_a_passage_that_is_not_there_changes_nothing(generator):
    *_, params, run, decoder = generator
    batch, wide = make_batch(decoder), make_batch(decoder, K + 1)
    wide["passage_scores"][:, :K], wide["passage_scores"][:, K:] = (
        batch["passage_scores"],
        50,
    )
    one, two = (run(params, rows)[1]["nats"] for rows in (batch, wide))
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_eight_devices_say_the_same(generator):
    *_, params, run, decoder = generator
    batch, mesh = make_batch(decoder), make_mesh()
    one, _ = run(params, batch)
    with jax.set_mesh(mesh):
        (fed,) = feed.to_devices(iter([batch]), mesh, [B])
        two, _ = run(params, fed)
    first, second = (float(x["rag_loss"].value) for x in (one, two))
    assert first == pytest.approx(second, rel=1e-5)


def test_it_learns(generator):
    objective, *_, decoder = generator
    mesh = make_mesh(devices=jax.devices()[:1])
    rows, _ = train_steps(objective, mesh, [make_batch(decoder)] * 60)
    losses = [row["train/rag_loss"] for row in rows]
    assert losses[-1] < losses[0] / 2


def test_what_is_written_has_the_score_of_a_target(generator):
    """Generating token by token, with a cache per passage, gives the same scores as
    reading all at once."""
    _, cfg, params, run, decoder = generator
    batch = jax.tree.map(jnp.asarray, make_batch(decoder))
    tokens = TokenIds(sep_id=1)
    for beams in (1, 3):
        written = write(params, cfg, batch, tokens, Writing(T, beams, temperature=0.5))
        ids = np.asarray(written.ids)
        real = np.arange(T) < np.asarray(written.lengths)[:, None]
        target = dict(batch, lm_ids=written.ids, lm_weights=real.astype(np.float32))
        each = np.repeat(ids[:, None], K, axis=1)
        if decoder:
            first = np.asarray(batch["decoder_input_ids"])[:, :, :1]
            target["decoder_input_ids"] = np.concatenate([first, each[..., :-1]], 2)
        else:
            target["input_ids"] = batch["input_ids"].at[:, :, L - T :].set(each)
        _, outputs = run(params, target)
        np.testing.assert_allclose(-outputs["nats"], written.scores, rtol=1e-3)
        assert len(np.unique(ids)) > 3

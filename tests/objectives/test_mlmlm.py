# SPDX-License-Identifier: Apache-2.0
"""MLMLM's scores: the three kinds on worked examples and by brute force; ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.objectives import token_head
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.mlmlm import candidate_sums
from bertjax.tasks.spelled_entities import Candidates
from bertjax.tasks.task_rows import Ragged

V = 30


def random_names(n, longest, seed=0):
    """Make names of all lengths from 1 to `longest` pieces; one name occurs twice."""
    draw = np.random.default_rng(seed)
    lengths = [*range(1, longest + 1), *draw.integers(1, longest + 1, n - longest)]
    names = [draw.integers(5, V, k).tolist() for k in lengths]
    names[-1] = names[longest - 1]
    return names


def test_the_table_holds_every_piece():
    names = Ragged.of([[7], [8, 9, 6], [5, 5]])
    made = Candidates.of(names, 17, pad_id=0)
    assert made.table.tolist() == [[7, 0, 0], [8, 9, 6], [5, 5, 0]]
    assert made.lengths.tolist() == made.counts.tolist() == [1, 3, 2]
    padded = Candidates.of(names, 2, pad_id=0, pads=True)
    assert padded.table.tolist() == [[7, 0], [8, 9], [5, 5]]
    assert (padded.lengths.tolist(), padded.counts.tolist()) == ([1, 2, 2], [2, 2, 2])


def test_three_means_of_a_worked_example():
    """The entities are "a" and "a b"; p(a) = 1/2 in slot 0, p(b) = 1/8 in slot 1."""
    p = np.full((1, 2, 4), 0.01)
    p[0, 0, 0], p[0, 1, 1] = 1 / 2, 1 / 8
    table, counts = jnp.array([[0, 3], [0, 1]]), jnp.array([1, 2])
    log_p = jnp.log(jnp.asarray(p, jnp.float32))
    sums = candidate_sums(log_p, table, counts, 0, False)
    np.testing.assert_allclose(sums[0], np.log([1 / 2, 1 / 16]), rtol=1e-6)
    np.testing.assert_allclose((sums / counts)[0], np.log([1 / 2, 1 / 4]), rtol=1e-6)
    means = candidate_sums(log_p, table, counts, 0, True) / counts
    np.testing.assert_allclose(means[0], [1 / 2, 5 / 16], rtol=1e-6)


def make_batch(rows, masks, seed=0):
    draw = np.random.default_rng(seed)
    length = masks + 6
    ids = draw.integers(5, V, (rows, length)).astype(np.int32)
    ids[:, 3 : 3 + masks] = 4
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "mlm_positions": np.tile(np.arange(3, 3 + masks, dtype=np.int32), (rows, 1)),
    }


def brute_force(log_p, names, masks, kind, pads):
    """Score each name separately, in float64: [B, N]."""
    log_p, scores = np.asarray(log_p, np.float64), []
    for name in names:
        pieces = name + [0] * (masks - len(name)) if pads else name
        each = np.stack([log_p[:, j, piece] for j, piece in enumerate(pieces)], axis=1)
        each = np.exp(each) if kind == "mean_p" else each
        scores.append(each.sum(1) if kind == "sum_logp" else each.mean(1))
    return np.stack(scores, axis=1)


@pytest.mark.parametrize("pads", [False, True], ids=["own", "pads"])
@pytest.mark.parametrize("kind", ["mean_logp", "mean_p", "sum_logp"])
def test_scores_are_those_of_a_brute_force(kind, pads):
    """Score 50 entities of 1 to 17 pieces, with all slots at once and in parts."""
    names = random_names(50, 17)
    table = Candidates.of(Ragged.of(names), 64, pad_id=0, pads=pads)
    draw = np.random.default_rng(2)
    log_p = jax.nn.log_softmax(draw.normal(size=(3, 17, V)).astype(np.float32) * 2)
    wanted = brute_force(log_p, names, 17, kind, pads)
    args = jnp.asarray(table.table), jnp.asarray(table.counts)
    parts = [
        candidate_sums(log_p[:, at : at + wide], *args, at, kind == "mean_p")
        for at, wide in ((0, 5), (5, 12))
    ]
    whole = candidate_sums(log_p, *args, 0, kind == "mean_p")
    for found in (whole, sum(parts)):
        found = found if kind == "sum_logp" else found / table.counts
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mean_logp", "mean_p"])
def test_a_pass_ranks_and_names_them_all(kind, monkeypatch):
    names = random_names(50, 17)
    table = Candidates.of(Ragged.of(names), 64, pad_id=0)
    cfg = tiny_encoder(V, 32, initializer_range=0.4)
    objective, cfg = make_objective(f"mlmlm:score={kind},top=50", cfg, candidates=table)
    params = jax.jit(objective.init)(jax.random.key(0))
    batch = make_batch(3, table.longest)
    encoded = encoder.apply(params["encoder"], cfg, batch, at=batch["mlm_positions"])
    word = params["encoder"]["embeddings"]["word"]
    logits = heads.mlm_logits(params["mlm"], word, cfg, encoded.hidden)
    scores = brute_force(jax.nn.log_softmax(logits), names, 17, kind, False)
    likely = scores if kind == "mean_p" else np.exp(scores)
    monkeypatch.setattr(token_head, "count_chunks", lambda *_: 4)
    run = jax.jit(objective.evaluate)
    told = run(params, batch)[1]
    found = np.take_along_axis(likely, np.asarray(told["top_ids"]), 1)
    np.testing.assert_allclose(told["top_probabilities"], found, rtol=2e-4)
    np.testing.assert_allclose(found, -np.sort(-likely, 1), rtol=2e-4)
    right = np.array([16, 3, 49], np.int32)
    known = np.array([[5, -1], [-1, -1], [7, 8]], np.int32)
    ranks = run(params, batch | {"right_entities": right, "known_entities": known})[1]
    above = scores > scores[np.arange(3), right][:, None] + 1e-6
    for row, others in zip(above, known, strict=True):
        row[others[others >= 0]] = False
    np.testing.assert_array_equal(ranks["greater"], above.sum(1))
    assert ranks["equal"].tolist() == [1, 0, 1]  # 16 and 49 have the same pieces


def test_what_is_added_to_a_slot_changes_no_rank():
    """The mean of logits instead of log probabilities would fail this test."""
    names = random_names(40, 8)
    table = Candidates.of(Ragged.of(names), 64, pad_id=0)
    draw = np.random.default_rng(1)
    logits = draw.normal(size=(2, 8, V)).astype(np.float32)
    moved = logits + draw.normal(size=(1, 8, 1)).astype(np.float32) * 5

    def order(logits):
        return np.argsort(means(jax.nn.log_softmax(logits))).tolist()

    def means(of):
        args = jnp.asarray(table.table), jnp.asarray(table.counts), 0, False
        return np.round(candidate_sums(jnp.asarray(of), *args) / table.counts, 4)

    assert order(logits) == order(moved)
    assert np.argsort(means(logits)).tolist() != np.argsort(means(moved)).tolist()


def test_the_loss_is_of_the_pieces_alone():
    table = Candidates.of(Ragged.of([[7, 8], [9]]), 64, pad_id=0)
    cfg = tiny_encoder(V, 32, initializer_range=0.4)
    objective, cfg = make_objective("mlmlm", cfg, candidates=table)
    params = jax.jit(objective.init)(jax.random.key(0))
    batch = make_batch(2, 2) | {
        "mlm_ids": table.table,
        "mlm_weights": np.array([[1, 1], [1, 0]], np.float32),
        "right_entities": np.arange(2, dtype=np.int32),
    }
    sums = jax.jit(objective.sums)(params, batch, None)
    encoded = encoder.apply(params["encoder"], cfg, batch, at=batch["mlm_positions"])
    word = params["encoder"]["embeddings"]["word"]
    log_p = jax.nn.log_softmax(
        heads.mlm_logits(params["mlm"], word, cfg, encoded.hidden)
    )
    wanted = -(log_p[0, 0, 7] + log_p[0, 1, 8] + log_p[1, 0, 9])
    assert float(sums["mlm_loss"].value) == pytest.approx(float(wanted), rel=1e-5)
    assert sums["mlm_loss"].weight == 3 == objective.weights(batch)["mlm_loss"]


def test_an_unknown_score_is_refused():
    with pytest.raises(UserError, match="mean_logp"):
        make_objective("mlmlm:score=logp", tiny_encoder(V, 32))

# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: the loss by hand, symmetries, padding, learning, devices."""

import jax
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps

from bertjax.models import encoder
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.mesh import make_mesh

B, C, L, V = 8, 3, 8, 40
CFG = tiny_encoder(V, L)
CLUE = 7


def make_batch(room=C):
    """Make examples with C and C - 1 choices in turn; the right one contains CLUE."""
    draw = np.random.default_rng(0)
    sizes = np.where(np.arange(B) % 2, C - 1, C)
    there = np.arange(room) < sizes[:, None]
    labels = (np.arange(B) % (C - 1)).astype(np.int32)
    ids, lengths = draw.integers(8, V, (B, C, L)), draw.integers(5, L + 1, (B, C))
    ids[np.arange(B), labels, 1:5] = CLUE
    mask = np.arange(L) < lengths[..., None]
    wide = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": mask * 0}
    batch = {"choice_weights": there.astype(np.float32), "labels": labels}
    for name, values in wide.items():
        batch[name] = np.zeros((B, room, L), np.int32)
        batch[name][there] = values[np.arange(C) < sizes[:, None]]
    return batch


@pytest.fixture(scope="module")
def made():
    objective, cfg = make_objective("choose", CFG)
    assert cfg.pooler and objective.needs == {"labels"}
    params = jax.jit(objective.init)(jax.random.key(0))
    # Enlarge the initial values, so that the scores of choices differ.
    params["choose"]["kernel"] = params["choose"]["kernel"] * 100

    @jax.jit
    def run(batch):
        def loss(p):
            return objective.sums(p, batch, None)["choose_loss"].value

        return *objective.evaluate(params, batch), jax.grad(loss)(params)

    return objective, cfg, params, run


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), a, b)


def test_the_loss_by_hand(made):
    objective, cfg, params, run = made
    batch = make_batch() | {"example_weights": np.float32([1] * 7 + [0])}
    sums, told, gradient = run(batch)
    there = batch["choice_weights"] > 0
    names = ("input_ids", "attention_mask", "token_type_ids")
    rows = {name: batch[name][there] for name in names}
    encode = jax.jit(lambda p, rows: encoder.apply(p, cfg, rows).pooled)
    pooled = np.float64(encode(params["encoder"], rows))
    logits = np.full((B, C), -np.inf)
    logits[there] = pooled @ np.float64(params["choose"]["kernel"])[:, 0]
    logits[there] += np.float64(params["choose"]["bias"])[0]
    np.testing.assert_allclose(told["scores"][there], logits[there], rtol=1e-4)
    assert (np.asarray(told["scores"])[~there] < -1e8).all()
    true = logits[np.arange(B), batch["labels"]]
    want = (np.log(np.exp(logits).sum(-1)) - true)[:7].sum()
    assert sums["choose_loss"].value == pytest.approx(want, rel=1e-5)
    assert sums["choose_loss"].weight == 7 == objective.weights(batch)["choose_loss"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        # Adding the same number to all logits does not change a softmax.
        if "choose']['bias" not in name and "key']['bias" not in name:
            assert np.abs(leaf).max() > 0, name


def test_a_permutation_of_choices_permutes_their_scores(made):
    batch, order = (
        make_batch(),
        np.random.default_rng(1).permuted(np.tile(np.arange(C), (B, 1)), axis=1),
    )
    names = ("input_ids", "attention_mask", "token_type_ids", "choice_weights")
    each = np.arange(B)[:, None]
    other = {name: batch[name][each, order] for name in names}
    other["labels"] = np.argmax(order == batch["labels"][:, None], 1).astype(np.int32)
    run = made[3]
    (one, told, gradient), (two, moved, again) = run(batch), run(other)
    scores = np.asarray(told["scores"])
    np.testing.assert_allclose(moved["scores"], scores[each, order], rtol=1e-5)
    assert one["choose_loss"].value == pytest.approx(
        float(two["choose_loss"].value), rel=1e-5
    )
    assert len(np.unique(scores[batch["choice_weights"] > 0])) > B
    close(gradient, again)


def test_choices_that_fill_up_change_nothing(made):
    run = made[3]
    (one, told, gradient), (two, more, again) = (
        run(make_batch()),
        run(make_batch(C + 2)),
    )
    assert one["choose_loss"].value == pytest.approx(
        float(two["choose_loss"].value), rel=1e-5
    )
    np.testing.assert_allclose(more["scores"][:, :C], told["scores"], rtol=1e-5)
    close(gradient, again)


def test_eight_devices_say_the_same(made):
    run, batch, mesh = made[3], make_batch(), make_mesh()
    (one, told, gradient) = run(batch)
    with jax.set_mesh(mesh):
        (fed,) = feed.to_devices(iter([batch]), mesh, [B])
        (two, more, again) = run(fed)
    assert len(fed["input_ids"].sharding.device_set) == 8
    assert one["choose_loss"].value == pytest.approx(float(two["choose_loss"].value))
    np.testing.assert_allclose(more["scores"], told["scores"], rtol=1e-4)
    close(gradient, again)


def test_it_learns(made):
    mesh = make_mesh(devices=jax.devices()[:1])
    rows, _ = train_steps(made[0], mesh, [make_batch()] * 80)
    losses = [row["train/choose_loss"] for row in rows]
    assert losses[0] > 0.5 and losses[-1] < 0.2

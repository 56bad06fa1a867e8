# SPDX-License-Identifier: Apache-2.0
"""Reading: the marginal likelihood by hand, padding, gradients."""

import itertools

import jax
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps

from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.mesh import make_mesh

B, K, L, V, D = 8, 3, 12, 40, 16
CFG = tiny_encoder(V, L)
NAME = "read:trained=1,temperature=0.5"


def make_batch(k=K):
    """Make questions of two tokens with passages of up to six tokens.

    Every other row has one passage less, and the last row has no answer.
    """
    draw = np.random.default_rng(0)
    real = np.arange(k) < np.where(np.arange(B) % 2, K - 1, K)[:, None]
    sizes = draw.integers(3, 7, (B, k))
    begins, ends = np.where(real, 4, 0), np.where(real, 4 + sizes, 0)
    mask = np.zeros((B, 1 + k, L), np.int32)
    mask[:, 0, :4] = 1
    mask[:, 1:] = np.arange(L) < np.where(real, ends + 1, 0)[..., None]
    ids = draw.integers(8, V, (B, 1 + k, L)) * mask
    spans = np.full((2, B, k, 2), -1)
    spans[:, :, 1, 0] = begins[:, 1], begins[:, 1] + 1
    spans[:, ::2, 0] = (begins[::2, :1] + [1, 2], begins[::2, :1] + [1, 2])
    spans[:, -1] = -1
    return {
        "input_ids": ids.astype(np.int32),
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
        "passage_begins": begins.astype(np.int32),
        "passage_ends": ends.astype(np.int32),
        "passage_weights": real.astype(np.float32),
        "passage_scores": draw.normal(size=(B, k)).astype(np.float32),
        "passage_vectors": draw.normal(size=(B, k, D)).astype(np.float32),
        "span_starts": spans[0].astype(np.int32),
        "span_ends": spans[1].astype(np.int32),
    }


@pytest.fixture(scope="module")
def reader():
    objective, cfg = make_objective(NAME, CFG)
    assert not cfg.pooler and objective.needs == {"labels"}
    params = jax.jit(objective.init)(jax.random.key(0))
    params["read"]["kernel"] = params["read"]["kernel"] * 100

    @jax.jit
    def run(params, batch):
        def loss(params, batch):
            return objective.sums(params, batch, None)["read_loss"].value

        gradients = jax.grad(loss, argnums=(0, 1), allow_int=True)(params, batch)
        return *objective.evaluate(params, batch), gradients

    return objective, params, run


def test_the_marginal_by_hand(reader):
    objective, params, run = reader
    batch = make_batch()
    sums, outputs, _ = run(params, batch)
    passages, starts, ends = (
        np.exp(np.float64(outputs[name]))
        for name in ("passage_scores", "start_logits", "end_logits")
    )
    want = 0.0
    for row in range(B - 1):
        likely = 0.0
        for slot, n in itertools.product(range(K), range(2)):
            a, b = (batch[f"span_{x}"][row, slot, n] for x in ("starts", "ends"))
            if a >= 0:
                likely += (
                    passages[row, slot] * starts[row, slot, a] * ends[row, slot, b]
                )
        want -= np.log(likely)
    assert sums["read_loss"].value == pytest.approx(want, rel=1e-4)
    assert sums["read_loss"].weight == B - 1 == objective.weights(batch)["read_loss"]
    np.testing.assert_allclose(passages.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(passages[1::2, -1], 0, atol=1e-30)
    inside = np.arange(L) >= 4
    there = batch["passage_weights"] > 0
    inside = inside & (np.arange(L) < batch["passage_ends"][..., None])
    for places in (starts, ends):
        np.testing.assert_allclose((places * inside).sum(-1)[there], 1, rtol=1e-5)


def test_a_passage_that_is_not_there_changes_nothing(reader):
    _, params, run = reader
    batch = make_batch()
    wide = dict(batch)
    for name, values in batch.items():
        fill = -1 if name.startswith("span") else 0
        pad = [(0, 0), (0, 2), *[(0, 0)] * (values.ndim - 2)]
        wide[name] = np.pad(values, pad, constant_values=fill)
    wide["passage_scores"][:, K:] = wide["passage_vectors"][:, K:] = (
        50  # large values in padding
    )
    one, two = (run(params, rows)[0]["read_loss"].value for rows in (batch, wide))
    assert float(one) == pytest.approx(float(two), rel=1e-5)


def test_who_learns(reader):
    """The question encoder gets a gradient from the passages' scores, the index does
    not. With a frozen retriever its scores are used instead."""
    _, params, run = reader
    batch = make_batch()
    # Every matrix gets a gradient.
    *_, (gradient, of_batch) = run(params, batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        if "bias" not in name:
            assert np.abs(leaf).max() > 0, name
    assert not np.asarray(of_batch["passage_vectors"]).any()
    frozen, _ = make_objective("read:temperature=0.5", CFG)
    scored = {k: v for k, v in batch.items() if k != "passage_vectors"}
    _, given = jax.jit(frozen.evaluate)(params, scored)
    odds = np.exp(2 * batch["passage_scores"]) * batch["passage_weights"]
    want = np.log(odds / odds.sum(1, keepdims=True), where=odds > 0, out=odds * 0)
    there = batch["passage_weights"] > 0
    np.testing.assert_allclose(given["passage_scores"][there], want[there], atol=1e-5)
    question = dict(batch, input_ids=batch["input_ids"].copy())
    question["input_ids"][:, 0, 1] = 5  # in the question's own sequence
    one, two = (run(params, rows)[1]["passage_scores"] for rows in (batch, question))
    assert (one[:, 0] != two[:, 0]).all()


def test_no_answer_anywhere(reader):
    objective, params, run = reader
    batch = make_batch()
    batch["span_starts"][:] = batch["span_ends"][:] = -1
    sums, _, (gradient, _) = run(params, batch)
    assert sums["read_loss"].value == sums["read_loss"].weight == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
    assert np.isfinite(objective.weights(batch)["read_loss"])


def test_eight_devices_say_the_same(reader):
    _, params, run = reader
    batch, mesh = make_batch(), make_mesh()
    one, outputs, (gradient, _) = run(params, batch)
    with jax.set_mesh(mesh):
        (fed,) = feed.to_devices(iter([batch]), mesh, [B])
        two, more, (again, _) = run(params, fed)
    assert len(fed["passage_vectors"].sharding.device_set) == 8
    for name in one:
        assert one[name].value == pytest.approx(float(two[name].value), rel=1e-5)
    for name in outputs:
        np.testing.assert_allclose(more[name], outputs[name], rtol=1e-4)
    same = lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-3)  # noqa: E731
    jax.tree.map(same, gradient, again)


def test_it_learns(reader):
    mesh = make_mesh(devices=jax.devices()[:1])
    rows, _ = train_steps(reader[0], mesh, [make_batch()] * 60)
    losses = [row["train/read_loss"] for row in rows]
    retrieved = [row["train/read_retrieved"] for row in rows]
    assert losses[-1] < losses[0] / 2 and retrieved[-1] > retrieved[0]

# SPDX-License-Identifier: Apache-2.0
"""Retrieval heads: chunks of a batch, devices, widths, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_retrieve import CFG, B, make_batch, make_texts

from bertjax import UserError
from bertjax.models.row_chunks import count_row_chunks, map_rows
from bertjax.objectives import colbert
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding
from bertjax.training.step import make_gradients

HEADS = {
    "retrieve": "retrieve:widths=4/8",
    "splade": "splade:query_flops=0.1,passage_flops=0.2",
    "colbert": "colbert:embedding_size=8",
}


def batch_of(name, taught=True):
    batch = make_batch(make_texts())
    if name == "colbert":
        batch["query_positions"] = np.tile(np.arange(10, dtype=np.int32), (B, 1))
    if taught:
        there = batch["passage_numbers"] >= 0
        draw = np.random.default_rng(3).normal(size=there.shape)
        batch["teacher_scores"] = (draw * there).astype(np.float32)
        batch["teacher_weights"] = there.astype(np.float32)
    return batch


def step_of(text):
    """Return params and run(batch) -> (gradient, sums) of an objective."""
    objective, _ = make_objective(text, CFG)
    params = jax.jit(objective.init)(jax.random.key(0))
    gradients = make_gradients(objective.sums, objective.coefficients)

    @jax.jit
    def run(batch):
        return gradients(params, batch, objective.weights(batch), None)

    return params, run


@pytest.mark.parametrize("name", HEADS)
def test_chunks_and_devices_change_nothing(name):
    batch = batch_of(name)
    text = f"{HEADS[name]},margin_weight=0.25"
    params, whole = step_of(text)
    gradient, sums = whole(batch)
    assert params.keys() - {"encoder"} == {
        *{"retrieve": (), "splade": ("mlm",), "colbert": ("colbert",)}[name]
    }
    # Every other row has a hard negative.
    assert float(sums[f"{name}_margin_loss"][1]) == B / 2

    def check(others):
        for a, b in zip(
            jax.tree.leaves((gradient, sums)), jax.tree.leaves(others), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)

    check(step_of(f"{text},chunks=4")[1](batch))
    if name == "colbert":  # test_retrieve and test_retrieval_golden test the others
        mesh = make_mesh()
        with jax.set_mesh(mesh):
            check(whole(jax.device_put(batch, batch_sharding(mesh))))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0 or "key" in jax.tree_util.keystr(path), path


def test_widths_have_losses_of_their_own():
    batch = batch_of("retrieve", taught=False)
    _, run = step_of(HEADS["retrieve"])
    terms = run(batch)[1]
    losses = {k for k in terms if k.endswith("_loss")}
    assert losses == {"retrieve_loss", "retrieve_4_loss", "retrieve_8_loss"}
    _, alone = step_of("retrieve")
    assert alone(batch)[1]["retrieve_loss"][0] == terms["retrieve_loss"][0]
    with pytest.raises(UserError, match=r"task\.widths: 17 must be from 1 to 16"):
        step_of("retrieve:widths=17")


def test_margins_need_scores():
    _, run = step_of("retrieve:margin_weight=1")
    with pytest.raises(UserError, match=r"task\.margin_weight is more than 0"):
        run(batch_of("retrieve", taught=False))


def test_max_sim_skips_what_is_no_token():
    """Compare with numpy; padding has larger values than any token, without effect."""
    draw = np.random.default_rng(0)
    queries = draw.normal(size=(4, 5, 3)).astype(np.float32)
    passages = draw.normal(size=(6, 7, 3)).astype(np.float32)
    is_query = np.arange(5) < np.array([5, 1, 3, 2])[:, None]
    is_passage = np.zeros((6, 2, 7), bool)
    is_passage[:, 0, :3] = is_passage[:, 1, 4:6] = True
    queries[~is_query] = passages[:, [3, 6]] = 100
    want = [
        [
            (q[keep] @ p[mine].T).max(1).sum()
            for p, both in zip(passages, is_passage, strict=True)
            for mine in both
        ]
        for q, keep in zip(queries, is_query, strict=True)
    ]
    for megabytes in (0, 1e-3):  # all at once, and query by query
        got = colbert.max_sim(queries, is_query, passages, is_passage, megabytes)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_chunks_part_rows_evenly():
    x = jnp.arange(12).reshape(12, 1)
    parts = []
    out = map_rows(lambda rows, i: parts.append(rows.shape) or rows + 0 * i, 3, x)
    assert out.tolist() == x.tolist() and {*parts} == {(4, 1)}
    with pytest.raises(ValueError, match="12 rows are not 5 equal parts"):
        map_rows(lambda rows, i: rows, 5, x)
    million = 2**20 // 4
    assert [count_row_chunks(8, million, mb) for mb in (0, 8, 4, 3, 1)] == [
        *(1, 1, 2, 4, 8)
    ]

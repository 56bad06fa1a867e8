# SPDX-License-Identifier: Apache-2.0
"""The bi-encoder's loss: against numpy, on any mesh, with hidden passages."""

import jax
import numpy as np
import pytest
from conftest import tiny_encoder

from bertjax.models import encoder
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding
from bertjax.tasks.task_rows import Ragged
from bertjax.tasks.types.retrieve import pack

CFG = tiny_encoder(50, 12, initializer_range=0.5)
MARKS = type("Marks", (), {"pad_id": 0, "cls_id": 1, "sep_id": 2})
B = 8


def make_texts(seed=0):
    draw = np.random.default_rng(seed)
    return Ragged.of([draw.integers(5, 50, n) for n in draw.integers(1, 9, 3 * B)])


def make_batch(texts):
    """Make rows of query i, passage B + i and, in every other row, negative 2 B + i."""
    members = np.arange(B)[:, None] + B * np.arange(3)
    members[::2, 2] = -1
    batch = pack(texts, members, 10, 32, MARKS)
    batch["passage_numbers"] = np.where(members >= 0, members - B, -1)[:, 1:]
    # Row 1 has a copy of row 0's passage; row 3's negative answers row 2's query.
    batch["passage_numbers"][1, 0] = 0
    relevant = np.stack([np.arange(B), np.full(B, -1)], axis=1)
    relevant[1, 0] = 0
    relevant[2, 1] = batch["passage_numbers"][3, 1]
    batch["relevant_numbers"] = relevant
    return {k: v.astype(np.int32) if v.dtype == int else v for k, v in batch.items()}


def pooled(params, texts, cls, normalize):
    """Encode each text in its own row, and pool in float64."""
    cfg = encoder.without_pooler(CFG)
    ids = np.zeros((3 * B, 10), np.int32)
    for i, row in enumerate(ids):
        row[: len(texts[i]) + 2] = [1, *texts[i], 2]
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32)}
    encode = jax.jit(lambda p: encoder.apply(p["encoder"], cfg, batch).hidden)
    hidden = np.asarray(encode(params), np.float64)
    sizes = texts.lengths + 2
    out = [h[0] if cls else h[:n].mean(0) for h, n in zip(hidden, sizes, strict=True)]
    return np.stack([v / np.linalg.norm(v) if normalize else v for v in out])


@pytest.mark.parametrize(
    "cls, normalize, temperature", [(0, 1, 0.05), (1, 0, 1.0)], ids=["mean", "dpr"]
)
def test_against_numpy(cls, normalize, temperature):
    name = f"retrieve:cls={cls},normalize={normalize},temperature={temperature}"
    objective, cfg = make_objective(name, CFG)
    params = jax.jit(objective.init)(jax.random.key(0))
    assert not cfg.pooler and params.keys() == {"encoder"}
    texts = make_texts()
    batch = make_batch(texts)

    @jax.jit
    def everything(params, batch):
        def loss(p):
            return objective.sums(p, batch, None)["retrieve_loss"].value

        return objective.evaluate(params, batch), jax.grad(loss)(params)

    (sums, told), gradient = everything(params, batch)
    vectors = pooled(params, texts, cls, normalize)
    there = batch["cls_weights"] > 0
    want = vectors.reshape(3, B, -1).swapaxes(0, 1)
    np.testing.assert_allclose(told["vectors"][there], want[there], atol=2e-5)
    loss, right = 0.0, 0
    for i in range(B):
        scores = {
            (j, k): vectors[i] @ vectors[(1 + k) * B + j] / temperature
            for j in range(B)
            for k in range(2)
            if k == 0 or j % 2
        }
        own = scores.pop((i, 0))
        for other in {0: [(1, 0)], 1: [(0, 0)], 2: [(3, 1)]}.get(i, []):
            del scores[other]  # a passage of another row that answers this query
        loss += np.logaddexp.reduce([own, *scores.values()]) - own
        right += own >= max(scores.values())
    assert sums["retrieve_loss"].value == pytest.approx(loss, rel=1e-4)
    assert (
        sums["retrieve_loss"].weight == B == objective.weights(batch)["retrieve_loss"]
    )
    assert sums["retrieve_accuracy"].value == right
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        # Adding the same number to all scores does not change a softmax.
        if "key" not in name or "bias" not in name:
            assert np.abs(leaf).max() > 0, name
    if not normalize:
        return
    # With eight devices the negatives still come from the whole batch.
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        spread = jax.device_put(batch, batch_sharding(mesh))
        (others, _), another = everything(params, spread)
    assert others["retrieve_loss"].value == pytest.approx(loss, rel=1e-4)
    assert others["retrieve_accuracy"].value == right
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), gradient, another
    )

# SPDX-License-Identifier: Apache-2.0
"""The tagging head: which labels count in its loss, and which must not."""

import jax
import numpy as np
import pytest

from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective

V, B, L, C = 50, 3, 8, 5
CFG = EncoderConfig(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=L,
)


def test_only_labelled_positions_count():
    objective, cfg = make_objective(f"tag:classes={C}", CFG)
    assert objective.needs == {"labels"} and not cfg.pooler
    params = jax.jit(objective.init)(jax.random.key(0))
    draw = np.random.default_rng(0)
    weights = (draw.random((B, L)) < 0.4).astype(np.float32)
    batch = {
        "input_ids": draw.integers(5, V, (B, L)).astype(np.int32),
        "attention_mask": np.ones((B, L), np.int32),
        "token_type_ids": np.zeros((B, L), np.int32),
        "labels": draw.integers(0, C, (B, L)).astype(np.int32),
        "label_weights": weights,
        "example_weights": np.array([1, 1, 0], np.float32),
    }

    def run(params, batch):
        def loss(params):
            return objective.sums(params, batch, None)["tag_loss"].value

        return jax.grad(loss)(params), objective.evaluate(params, batch)

    grads, (sums, outputs) = jax.jit(run)(params, batch)
    counted = weights[:2].sum()
    assert float(sums["tag_loss"].weight) == counted
    assert float(objective.weights(batch)["tag_loss"]) == counted
    # Before training, the loss is near that of guessing, ln C.
    assert float(sums["tag_loss"].value) / counted == pytest.approx(np.log(C), rel=0.1)
    likely = outputs["probability"]
    assert likely.shape == (B, L) and (likely >= 1 / C).all() and (likely <= 1).all()
    assert outputs["tags"].shape == (B, L) and outputs["tags"].dtype == np.int32
    # Labels that do not count may be anything, even out of range.
    other = dict(batch, labels=np.where(weights > 0, batch["labels"], 77))
    other["labels"][2] = -1
    again, (sums2, _) = jax.jit(run)(params, other)
    assert sums2["tag_loss"] == sums["tag_loss"]
    jax.tree.map(np.testing.assert_array_equal, again, grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    # Labels that count do change the loss.
    i, j = np.argwhere(weights[:2] > 0)[0]
    changed = dict(batch, labels=batch["labels"].copy())
    changed["labels"][i, j] = (changed["labels"][i, j] + 1) % C
    _, (sums3, _) = jax.jit(run)(params, changed)
    assert sums3["tag_loss"].value != sums["tag_loss"].value

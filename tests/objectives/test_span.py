# SPDX-License-Identifier: Apache-2.0
"""The span head: its loss by hand, padding, rows of weight 0, all gradients."""

import jax
import numpy as np
import pytest
from conftest import tiny_encoder

from bertjax.objectives.make_objective import make_objective

CFG = tiny_encoder(50, 8)
SIZES = np.array([8, 5, 8])


def test_span():
    objective, cfg = make_objective("span", CFG)
    assert not cfg.pooler and objective.needs == {"labels"}
    params = jax.jit(objective.init)(jax.random.key(0))
    draw = np.random.default_rng(0)
    batch = {
        "input_ids": draw.integers(5, 50, (3, 8)).astype(np.int32),
        "attention_mask": (np.arange(8) < SIZES[:, None]).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, (3, 8)).astype(np.int32),
        "start_positions": np.array([2, 0, 1], np.int32),
        "end_positions": np.array([7, 0, 3], np.int32),
        "example_weights": np.array([1, 1, 0], np.float32),
    }

    @jax.jit
    def everything(params, batch):
        def loss(p):
            return objective.sums(p, batch, None)["span_loss"].value

        return objective.evaluate(params, batch), jax.grad(loss)(params)

    (sums, told), gradient = everything(params, batch)
    want = 0.0
    for name in ("start", "end"):
        logits = np.float64(told[f"{name}_logits"])
        assert logits.shape == (3, 8) and (logits[1, 5:] < -1e8).all()
        for row in (0, 1):
            real = logits[row, : SIZES[row]]
            true = logits[row, batch[f"{name}_positions"][row]]
            want += (np.log(np.exp(real).sum()) - true) / 2
    assert sums["span_loss"].value == pytest.approx(want, rel=1e-5)
    assert sums["span_loss"].weight == 2 == objective.weights(batch)["span_loss"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        # Adding the same number to all logits does not change a softmax.
        if "bias" not in name:
            assert np.abs(leaf).max() > 0, name

    # The ids in padding, and its length, make no difference.
    changed = {**batch, "input_ids": batch["input_ids"] * batch["attention_mask"]}
    (again, _), _ = everything(params, changed)
    assert again["span_loss"].value == sums["span_loss"].value

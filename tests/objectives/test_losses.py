# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models.config import EncoderConfig
from bertjax.objectives import token_head
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.metrics import accuracy

LOGITS = np.log(
    np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.2, 0.2]], np.float32)
)


def test_by_hand():
    ids, weights = jnp.array([0, 1, 2]), jnp.array([1.0, 1.0, 0.0])
    value, weight = cross_entropy(LOGITS, ids, weights)
    assert float(value) == pytest.approx(-np.log(0.5) - np.log(0.2), rel=1e-6)
    assert float(weight) == 2
    assert tuple(map(float, accuracy(LOGITS, ids, weights))) == (1.0, 2.0)


def test_weights_are_not_only_zero_and_one():
    ids, weights = jnp.array([0, 2, 0]), jnp.array([0.5, 2.0, 1.0])
    value, weight = cross_entropy(LOGITS, ids, weights)
    expected = -0.5 * np.log(0.5) - 2 * np.log(0.7) - np.log(0.6)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    assert float(weight) == 3.5
    assert tuple(map(float, accuracy(LOGITS, ids, weights))) == (3.5, 3.5)


def test_logits_of_any_height():
    ids, weights = jnp.array([0, 1, 2]), jnp.ones(3)
    base = cross_entropy(LOGITS, ids, weights).value
    for shift in (80.0, 1e4, -1e4):
        moved = cross_entropy(LOGITS + shift, ids, weights).value
        assert float(moved) == pytest.approx(float(base), rel=2e-3)
    huge = cross_entropy(jnp.array([[0.0, 200.0]]), jnp.array([0]), jnp.ones(1))
    assert float(huge.value) == 200.0


def test_gradient_is_softmax_less_the_truth():
    ids, weights = jnp.array([0, 1, 2]), jnp.array([1.0, 2.0, 0.0])
    grads = jax.grad(lambda x: cross_entropy(x, ids, weights).value)(LOGITS)
    expected = (np.exp(LOGITS) - np.eye(3)) * np.array([[1.0], [2.0], [0.0]])
    np.testing.assert_allclose(grads, expected, atol=1e-6)


def test_what_has_no_weight_costs_nothing():
    """Even ids out of range cost nothing with weight 0, and never give NaN."""
    ids, weights = jnp.array([99, -1, 0]), jnp.zeros(3)

    def loss(x):
        return cross_entropy(x, ids, weights).value

    value, grads = jax.value_and_grad(loss)(LOGITS)
    assert float(value) == 0 and not np.asarray(grads).any()
    assert tuple(map(float, accuracy(LOGITS, ids, weights))) == (0.0, 0.0)


@pytest.mark.parametrize("function", [cross_entropy, accuracy])
@pytest.mark.parametrize(
    "ids, weights", [((3, 1), (3, 1)), ((3,), (1,)), ((1,), (1,)), ((3,), ())]
)
def test_shapes_that_would_broadcast_are_refused(function, ids, weights):
    with pytest.raises(ValueError, match="shapes"):
        function(LOGITS, jnp.zeros(ids, jnp.int32), jnp.ones(weights))


@pytest.mark.parametrize("name", ["mlm", "mlm:z_loss=0.1"])
def test_logits_in_pieces_change_nothing(name):
    """Compare loss, accuracy and gradients; the pieces do not divide the slots."""
    cfg = EncoderConfig(
        vocab_size=70_001,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    batch = {
        "input_ids": jnp.arange(32).reshape(2, 16),
        "attention_mask": jnp.ones((2, 16), jnp.int32),
        "mlm_positions": jnp.arange(14).reshape(2, 7),
        "mlm_ids": 70_000 - jnp.arange(14).reshape(2, 7),
        "mlm_weights": jnp.ones((2, 7)).at[1, 5:].set(0),
    }
    whole, _ = make_objective(name, cfg)
    limited = dataclasses.replace(cfg, max_logits_mb=1)
    assert (
        token_head.count_chunks(limited, 2, 7) == 4
        and token_head.count_chunks(cfg, 2, 7) == 1
    )
    pieces, _ = make_objective(name, limited)
    params = whole.init(jax.random.key(0))

    def run(objective):
        def loss(params):
            sums = objective.sums(params, batch, None)
            total = sums["mlm_loss"].value
            if "mlm_z_loss" in sums:
                total += 0.1 * sums["mlm_z_loss"].value
            return total, sums

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    for a, b in zip(*map(jax.tree.leaves, map(run, (whole, pieces))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

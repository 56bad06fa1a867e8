# SPDX-License-Identifier: Apache-2.0
"""Gradient reversal, and the heads of a concept and of a control concept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import reverse_gradient
from bertjax.objectives.concept import reversal_strength
from bertjax.objectives.make_objective import make_objective

CFG = EncoderConfig(
    30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
ROWS, L, P = 4, 10, 3


def batch(progress=0.5):
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 30, (ROWS, L))
    return {
        "input_ids": ids,
        "attention_mask": np.ones((ROWS, L), np.int32),
        "token_type_ids": np.zeros((ROWS, L), np.int32),
        "mlm_positions": np.tile([1, 4, 7], (ROWS, 1)),
        "mlm_ids": ids[:, [1, 4, 7]],
        "mlm_weights": np.array([[1, 1, 1]] * 3 + [[1, 1, 0]], np.float32),
        "concept_labels": np.array([[1, 0, 0]] * ROWS),
        "concept_texts": np.array([1, 0, 1, 1]),
        "control_labels": np.array([[0, 1, 0]] * ROWS),
        "control_texts": np.array([0, 0, 1, 1]),
        "phase_progress": np.full(ROWS, progress, np.float32),
    }


def test_the_gradient_is_reversed_and_scaled_by_row():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    alpha = jnp.array([0.5, 2.0])

    def loss(x, alpha):
        return jnp.sum(reverse_gradient(x, alpha) ** 2)

    assert loss(x, alpha) == jnp.sum(x**2)
    dx, dalpha = jax.grad(loss, (0, 1))(x, alpha)
    np.testing.assert_allclose(dx, -2 * x * alpha[:, None, None])
    assert not dalpha.any()
    y = x.astype(jnp.bfloat16)
    assert jax.grad(lambda y: loss(y, jnp.float32(3)).astype(float))(y).dtype == y.dtype


def test_the_strength_grows_with_training():
    def at(p, *how):
        return float(reversal_strength({"phase_progress": jnp.array([p])}, *how)[0])

    # Ganin and Lempitsky 2015: 0 at first, 0.9866 half-way, 0.9999 at the end.
    assert at(0.0, 1.0, 10.0) == 0
    assert at(0.5, 1.0, 10.0) == pytest.approx(np.tanh(2.5))
    assert at(1.0, 2.0, 10.0) == pytest.approx(2 * np.tanh(5))
    assert at(0.0, 0.7, 0.0) == pytest.approx(0.7)


@pytest.mark.parametrize("of", ["words", "texts"])
def test_the_encoder_gets_the_opposite_of_what_the_head_gets(of):
    """With reversal the head's gradients are the same as without, and the encoder's are
    multiplied by -alpha."""
    plain, _ = make_objective(f"mlm+control:of={of}", CFG)
    turned, _ = make_objective(f"mlm+concept:of={of},gamma=0,alpha=0.25", CFG)
    data = batch()
    for name in ("labels", "texts"):
        data[f"control_{name}"] = data[f"concept_{name}"]
    # Without concept_labels, all words count for the control.
    data_of_control = {k: v for k, v in data.items() if k != "concept_labels"}
    params = turned.init(jax.random.key(1))
    other = {"control" if k == "concept" else k: v for k, v in params.items()}

    def grads(objective, params, data, term):
        return jax.value_and_grad(lambda p: objective.sums(p, data, None)[term].value)(
            params
        )

    one, a = grads(turned, params, data, "concept_loss")
    two, b = grads(plain, other, data_of_control, "control_loss")
    assert one == pytest.approx(float(two)) and one > 0
    for x, y in zip(*map(jax.tree.leaves, (a["concept"], b["control"])), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    pairs = zip(*map(jax.tree.leaves, (a["encoder"], b["encoder"])), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, -0.25 * y, atol=1e-6)


def test_a_control_leaves_out_words_of_the_concept():
    objective, _ = make_objective("mlm+concept+control", CFG)
    weights = objective.weights(batch())
    assert weights["concept_loss"] == 11 and weights["control_loss"] == 7
    sums = objective.sums(objective.init(jax.random.key(0)), batch(), None)
    assert {*sums} == {
        f"{n}_{m}" for n in ("mlm", "concept", "control") for m in ("loss", "accuracy")
    }
    assert sums["control_loss"].weight == 7


def test_heads_drop_different_numbers():
    cfg = dataclasses.replace(CFG, hidden_dropout_prob=0.5)
    objective, _ = make_objective("mlm+concept:of=texts+control:of=texts", cfg)
    params = objective.init(jax.random.key(0))
    params["control"] = params["concept"]
    data = batch() | {"control_texts": batch()["concept_texts"]}
    sums = objective.sums(params, data, jax.random.key(1))
    assert sums["concept_loss"].value != sums["control_loss"].value
    plain = objective.sums(params, data, None)
    assert plain["concept_loss"].value == plain["control_loss"].value


def test_rows_that_fill_up_weigh_nothing():
    objective, _ = make_objective("mlm+concept:of=texts", CFG)
    data = batch() | {"example_weights": np.array([1, 1, 1, 0], np.float32)}
    assert objective.weights(data)["concept_loss"] == 3


def test_packed_texts_are_as_they_would_be_alone():
    """The first row has two texts of 5 tokens, the second row has one."""
    objective, _ = make_objective("mlm+concept:of=texts", CFG)
    params, data = objective.init(jax.random.key(2)), batch()
    place = np.arange(L)
    packed = data | {
        "segment_ids": np.array([place // 5 + 1, (place < 5) * 1] * 2)[:2],
        "position_ids": np.tile(place % 5, (2, 1)),
        "cls_positions": np.array([[0, 5], [0, 0]]),
        "cls_weights": np.array([[1, 1], [1, 0]], np.float32),
        "concept_texts": np.array([[1, 0], [1, 0]]),
    }
    packed["attention_mask"] = (packed["segment_ids"] > 0).astype(np.int32)
    packed = {name: values[:2] for name, values in packed.items()}
    ids = data["input_ids"]
    alone = {name: values[:3] for name, values in data.items()} | {
        "input_ids": np.concatenate([ids[:1, :5], ids[:1, 5:], ids[1:2, :5]]),
        "concept_texts": np.array([1, 0, 1]),
    }
    alone["attention_mask"] = np.ones((3, 5), np.int32)
    alone["token_type_ids"] = np.zeros((3, 5), np.int32)
    assert objective.weights(packed)["concept_loss"] == 3
    each = [objective.sums(params, one, None) for one in (packed, alone)]
    for name in ("concept_loss", "concept_accuracy"):
        one, other = (sums[name] for sums in each)
        assert one.value == pytest.approx(float(other.value), rel=1e-5)
        assert one.weight == other.weight == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("concept:of=word", "did you mean 'words'"), ("concept:alpha=-1", "0 or more")],
)
def test_senseless_options_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        make_objective(f"mlm+{name}", CFG)

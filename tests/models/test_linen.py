# SPDX-License-Identifier: Apache-2.0
"""The encoder as a Flax module: alone, in another module and in NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx

from bertjax.models import encoder, linen
from bertjax.models.config import EncoderConfig

CFG = EncoderConfig(
    vocab_size=20,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
)
BATCH = {
    "input_ids": jnp.arange(16).reshape(2, 8),
    "attention_mask": jnp.array([[1] * 8, [1] * 5 + [0] * 3]),
}


@pytest.fixture(scope="module")
def params():
    return encoder.init(jax.random.key(1), CFG)


def test_init_makes_the_tree_of_a_checkpoint(params):
    variables = jax.jit(linen.Encoder(CFG).init)(jax.random.key(0), BATCH)
    assert variables.keys() == {"params"}
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(
        jnp.shape, params
    )
    word = variables["params"]["embeddings"]["word"]
    assert 0.015 < float(word.std()) < 0.02  # 0.88 x 0.02
    assert not np.array_equal(word[:8], variables["params"]["pooler"]["kernel"])


def test_apply_is_the_encoder_and_dropout_needs_its_rng(params):
    apply = jax.jit(linen.Encoder(CFG).apply)
    out = apply({"params": params}, BATCH)
    wanted = jax.jit(encoder.apply, static_argnums=1)(params, CFG, BATCH)
    np.testing.assert_array_equal(out.hidden, wanted.hidden)
    np.testing.assert_array_equal(out.pooled, wanted.pooled)
    dropped = apply({"params": params}, BATCH, rngs={"dropout": jax.random.key(2)})
    assert jnp.abs(dropped.hidden - out.hidden).max() > 1e-3


def test_parameters_of_another_config_are_refused(params):
    wide = EncoderConfig(21, 8, 2, 2, 16, max_position_embeddings=8)
    with pytest.raises(errors.ScopeParamShapeError, match="embeddings"):
        linen.Encoder(wide).apply({"params": params}, BATCH)


class Classifier(nn.Module):
    """A user's module around the encoder."""

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, batch):
        encoded = linen.Encoder(self.cfg, name="encoder")(batch)
        return nn.Dense(3, name="classes")(encoded.pooled)


def test_in_a_module_of_ones_own_it_trains_from_a_checkpoint(params):
    """The encoder's gradients equal those of the plain function."""
    module, labels = Classifier(CFG), jnp.array([0, 2])
    variables = module.init(jax.random.key(0), BATCH)
    assert variables["params"].keys() == {"encoder", "classes"}
    variables["params"]["encoder"] = params

    def loss(tree):
        logits = module.apply({"params": tree}, BATCH)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def plain(own, dense):
        pooled = encoder.apply(own, CFG, BATCH).pooled
        logits = pooled @ dense["kernel"] + dense["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(variables["params"])
    wanted = jax.jit(jax.grad(plain))(params, variables["params"]["classes"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        grads["encoder"],
        wanted,
    )
    smaller = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
    assert loss(smaller) < value


def test_the_bridge_to_nnx(params):
    """A model bridged to NNX uses a checkpoint's parameters and has their gradients."""
    model = nnx.bridge.ToNNX(linen.Encoder(CFG), rngs=nnx.Rngs(0)).lazy_init(BATCH)
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    assert jax.tree.map(jnp.shape, pure) == jax.tree.map(jnp.shape, params)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(model, state)
    out = model(BATCH, rngs={})
    wanted = encoder.apply(params, CFG, BATCH)
    np.testing.assert_allclose(out.hidden, wanted.hidden, atol=1e-6)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda m: jnp.sum(m(BATCH, rngs={}).pooled))(model)

    grads = nnx.to_pure_dict(gradients(model))
    found = grads["pooler"]["kernel"]
    plain = jax.grad(lambda p: jnp.sum(encoder.apply(p, CFG, BATCH).pooled))(params)
    np.testing.assert_allclose(found, plain["pooler"]["kernel"], atol=1e-5)

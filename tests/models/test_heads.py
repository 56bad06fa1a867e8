# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.config import EncoderConfig

CFG = EncoderConfig(
    vocab_size=40,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    dtype="bfloat16",
)


def head_of(kind):
    """Return a head's parameters of its last layer, and a function x -> logits."""
    rng = jax.random.key(1)
    if kind == "replaced":
        params = heads.init_rtd(rng, CFG)
        return params["output"], lambda x: heads.rtd_logits(params, CFG, x)[..., None]
    if kind == "pairs":
        params = heads.init_classes(rng, CFG)
        return params, lambda x: heads.class_logits(params, x)
    params = heads.init_task(rng, CFG, 1 if kind == "scores" else 5)
    return params, lambda x: heads.task_logits(params, CFG, x)


@pytest.mark.parametrize("kind", ["pairs", "classes", "scores", "replaced"])
def test_logits_are_not_rounded_to_bfloat16(kind, monkeypatch):
    """They are float32 products of bfloat16 factors, as the masked LM's logits are."""
    if kind == "replaced":  # the layer before its classes is tested elsewhere
        monkeypatch.setattr(heads, "linear", lambda params, x: x)
        monkeypatch.setattr(heads, "activate", lambda x, kind: x)
    params, logits = head_of(kind)
    params["kernel"] = params["kernel"] * 50
    params["bias"] = params["bias"] + 3.1
    x = jax.random.normal(jax.random.key(2), (2, 8, CFG.hidden_size), jnp.bfloat16)
    kernel = np.asarray(params["kernel"].astype(jnp.bfloat16), np.float64)
    expected = np.asarray(x, np.float64) @ kernel + 3.1
    found = logits(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    slope = jax.grad(lambda x: jnp.sum(logits(x)))(x)
    assert slope.dtype == jnp.bfloat16


def test_logits_of_float32_are_a_linear_layer():
    cfg = dataclasses.replace(CFG, dtype="float32")
    params = heads.init_task(jax.random.key(1), cfg, 3)
    x = jax.random.normal(jax.random.key(2), (4, CFG.hidden_size))
    expected = heads.linear(params, x)
    np.testing.assert_allclose(heads.class_logits(params, x), expected, rtol=1e-6)


@pytest.mark.parametrize("decoder_bias", [False, True])
def test_a_head_without_a_transform_is_its_matrix(decoder_bias):
    """As in GPT: tied to the embeddings and without a bias, it has no parameters."""
    cfg = dataclasses.replace(
        CFG, classifier_transform=False, decoder_bias=decoder_bias, dtype="float32"
    )
    params = heads.init_mlm(jax.random.key(1), cfg)
    assert [*params] == ["bias"] * decoder_bias
    keys = jax.random.split(jax.random.key(2), 3)
    hidden, word = (
        jax.random.normal(k, (n, 64)) for k, n in zip(keys[:2], (6, 40), strict=True)
    )
    wanted = hidden @ word.T
    if decoder_bias:
        params["bias"] = jax.random.normal(keys[2], (40,))
        wanted = wanted + params["bias"]
    found = heads.mlm_logits(params, word, cfg, hidden.reshape(2, 3, 64))
    np.testing.assert_allclose(found.reshape(6, 40), wanted, atol=1e-4)
    ids = jnp.arange(6)
    likely = jax.nn.log_softmax(wanted)[ids, ids]
    found = heads.log_likelihoods(params, word, cfg, hidden, ids)
    np.testing.assert_allclose(found, likely, atol=1e-4)
    # The task heads keep their own transform.
    cfg = dataclasses.replace(cfg, task_transform=True)
    assert "transform" in heads.init_task(jax.random.key(3), cfg)


def test_likelihoods_have_the_gradients_of_logits():
    """In bfloat16 no product of the backward pass has an operand in f32, in which CPUs
    take five times as long; the gradients are those of mlm_logits."""
    cfg = dataclasses.replace(CFG, classifier_transform=False)
    keys = jax.random.split(jax.random.key(0), 2)
    word = jax.random.normal(keys[0], (40, 64))
    hidden = jax.random.normal(keys[1], (6, 64)).astype(jnp.bfloat16)
    params, ids = {"bias": jnp.zeros(40)}, jnp.arange(6)

    def by_likelihoods(word, x):
        return heads.log_likelihoods(params, word, cfg, x, ids).sum()

    def by_logits(word, x):
        logits = heads.mlm_logits(params, word, cfg, x[None])[0]
        return jax.nn.log_softmax(logits)[ids, ids].sum()

    slopes = [jax.grad(f, (0, 1)) for f in (by_likelihoods, by_logits)]
    program = jax.jit(slopes[0]).lower(word, hidden).as_text().splitlines()
    products = [line for line in program if "stablehlo.dot_general" in line]
    assert len(products) == 3
    for line in products:
        assert "f32>" not in line.partition(" : ")[2].partition(" -> ")[0], line
    for found, wanted in zip(*(f(word, hidden) for f in slopes), strict=True):
        assert found.dtype == wanted.dtype
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("pieces", [0, 30])
def test_capped_logits_are_the_formula(pieces):
    """The cap applies after the bias; ids that pad the vocabulary are never likely."""
    cfg = dataclasses.replace(
        CFG, classifier_transform=False, dtype="float32", pieces=pieces
    )
    draw = np.random.default_rng(0).standard_normal
    hidden, word = (draw((n, 64)).astype(np.float32) for n in (6, 40))
    params = {"bias": draw(40).astype(np.float32)}
    capped = dataclasses.replace(cfg, final_logit_softcapping=3.0)
    wanted = 3 * np.tanh((hidden @ word.T + params["bias"]) / 3)
    wanted = wanted[:, : pieces or 40]
    found = heads.mlm_logits(params, word, capped, hidden.reshape(2, 3, 64))
    found = found.reshape(6, 40)
    np.testing.assert_allclose(found[:, : pieces or 40], wanted, atol=1e-5)
    assert float(jnp.max(found)) <= 3 and (found[:, pieces or 40 :] < -1e8).all()
    plain = heads.mlm_logits(params, word, cfg, hidden.reshape(2, 3, 64))
    assert float(jnp.max(plain)) > 9
    ids = jnp.arange(6)
    likely = jax.nn.log_softmax(wanted)[ids, ids]
    found = heads.log_likelihoods(params, word, capped, hidden, ids)
    np.testing.assert_allclose(found, likely, atol=1e-4)
    never = heads.log_likelihoods(params, word, capped, hidden, ids, never=2)
    assert float(never[2]) < -1e8


def test_a_cap_is_not_negative():
    with pytest.raises(UserError, match=r"model\.final_logit_softcapping=-1\.0"):
        dataclasses.replace(CFG, final_logit_softcapping=-1.0)

# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models.attention import (
    BACKENDS,
    attend,
    choose_backend,
    describe_backend,
    import_backend,
)
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig
from bertjax.parallel.mesh import make_mesh


def draw(b=2, length=6, heads=3, width=4, scale=1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    return [scale * jax.random.normal(k, (b, length, heads, width)) for k in keys]


def plain(q, k, v, mask):
    """Normalize the weights before they multiply the values, as equation 1 does."""
    scores = jnp.einsum("BQHK,BTHK->BHQT", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("BHQT,BTHK->BQHK", weights, v)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients_are_those_of_equation_1(scale):
    q, k, v = draw(scale=scale)
    mask = AttentionMask(jnp.array([[1] * 6, [1] * 4 + [0] * 2]))

    def loss(attention, q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v)))

    def ours(q, k, v):
        return attend(q, k, v, mask, 0.0, None)

    def theirs(q, k, v):
        return plain(q, k, v, mask.boolean)

    close = dict(rtol=2e-4, atol=2e-5 * scale)
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), **close)
    ours_grad = jax.grad(loss, argnums=(1, 2, 3))(ours, q, k, v)
    theirs_grad = jax.grad(loss, argnums=(1, 2, 3))(theirs, q, k, v)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        np.testing.assert_allclose(a, b, **close)


def test_gradients_in_bfloat16_are_those_in_float32():
    full = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in draw(length=64)]
    mask = AttentionMask(jnp.ones((2, 64)))

    def slopes(dtype):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, mask, 0.0, None)), dtype=jnp.float32)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*(x.astype(dtype) for x in full))

    for half, exact in zip(slopes(jnp.bfloat16), slopes(jnp.float32), strict=True):
        assert half.dtype == jnp.bfloat16
        off = jnp.linalg.norm(half.astype(jnp.float32) - exact)
        assert off < 0.02 * jnp.linalg.norm(exact)


def test_weights_still_sum_to_one_in_bfloat16():
    q, k, _ = (x.astype(jnp.bfloat16) for x in draw(length=64))
    v = jnp.ones((2, 64, 3, 4), jnp.bfloat16)
    y = attend(q, k, v, AttentionMask(jnp.ones((2, 64))), 0.0, None)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), 1.0, rtol=0.01)


def test_dropout_keeps_the_mean():
    q, k, _ = draw(b=64, length=32)
    v = jnp.ones((64, 32, 3, 4))
    y = attend(q, k, v, AttentionMask(jnp.ones((64, 32))), 0.25, jax.random.key(1))
    assert abs(float(jnp.mean(y)) - 1.0) < 0.01
    assert float(jnp.std(y)) > 0.02


# ---------------------------------------------------------------- backends
def rows(length: int) -> tuple[jax.Array, jax.Array]:
    """Return attention_mask and segment_ids [2, L]: row 0 full, row 1 padded."""
    at = np.arange(length)
    real = np.stack([at < length, at < length - 40]).astype(np.int32)
    segments = np.stack([1 + (at > 50) + (at > length - 30), real[1] * (1 + (at > 9))])
    return jnp.asarray(real), jnp.asarray(segments, jnp.int32)


@pytest.mark.parametrize("backend", ["fused", "splash"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_kernels_give_what_the_compiler_gives(backend, packed, window):
    """The kernels' values and gradients at real tokens are xla's, on one device."""
    shape = (2, 128, 2, 64)
    q, k, v, dy = (
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)
    )
    real, segments = rows(128)
    mask = AttentionMask(segments if packed else real, packed, window)
    dy = dy * real[:, :, None, None]

    def run(name):
        def attention(q, k, v):
            return attend(q, k, v, mask, 0.0, None, name)

        y, back = jax.vjp(jax.jit(attention), q, k, v)
        return y * real[:, :, None, None], *back(dy)

    for a, b in zip(run(backend), run("xla"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_fused_kernel_drops_the_same_weights_on_any_mesh():
    shape = (8, 128, 4, 64)
    q, k, v, dy = (
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(1), 4)
    )
    mask = AttentionMask(jnp.ones(shape[:2], jnp.int32))

    def run(name):
        def attention(q, k, v):
            return attend(q, k, v, mask, 0.3, jax.random.key(7), name)

        y, back = jax.vjp(jax.jit(attention), q, k, v)
        return y, *back(dy)

    expected = run("xla")
    for a, b in zip(run("fused"), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for mesh in (make_mesh(2, 2, 2), make_mesh(1, devices=jax.devices()[:1])):
        with jax.set_mesh(mesh):
            for a, b in zip(run("fused"), expected, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_what_cudnn_is_asked_for(monkeypatch, packed, window):
    """cuDNN gets only arguments that it accepts; XLA's result for them is right."""
    q, k, v = draw(length=128)
    real, segments = rows(128)
    mask = AttentionMask(segments if packed else real, packed, window)
    attention, asked = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, implementation, **how):
        asked.append((implementation, *how))
        return attention(q, k, v, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    found = BACKENDS["cudnn"](q, k, v, mask, 0.0, None)
    wanted = attend(q, k, v, mask, 0.0, None)
    real = real[:, :, None, None] > 0
    np.testing.assert_allclose(
        jnp.where(real, found, 0), jnp.where(real, wanted, 0), atol=2e-5
    )
    how = "mask" if packed or window else "key_value_seq_lengths"
    assert asked == [("cudnn", how)]


def test_which_backend_serves():
    assert choose_backend("tpu", (8, 128, 12, 64), 0.1)[0] == "fused"
    assert choose_backend("tpu", (8, 8192, 12, 64), 0.0)[0] == "splash"
    # splash has no dropout
    assert choose_backend("tpu", (8, 8192, 12, 64), 0.1)[0] == "xla"
    assert choose_backend("tpu", (8, 96, 12, 64), 0.0)[0] == "xla"
    assert choose_backend("gpu", (8, 512, 12, 64), 0.0)[0] == "cudnn"
    assert choose_backend("gpu", (8, 512, 12, 64), 0.0, dtype=jnp.float32)[0] == "xla"
    with pytest.raises(UserError, match="attention=fused: rows of 8192"):
        choose_backend("fused", (8, 8192, 12, 64), 0.0)
    with pytest.raises(UserError, match="splash: it has no dropout"):
        choose_backend("splash", (8, 8192, 12, 64), 0.1)


def test_a_choice_says_why():
    def cfg(attention, rate, dtype="bfloat16"):
        return EncoderConfig(
            100, 768, 12, 12, 3072, attention=attention, dtype=dtype,
            attention_probs_dropout_prob=rate,
        )  # fmt: skip

    drops = "it has no dropout: model.attention_probs_dropout_prob=0.1"
    assert describe_backend(cfg("gpu", 0.1), [128, 128]) == f"xla (not cudnn: {drops})"
    assert describe_backend(cfg("gpu", 0.0), [128, 512]) == "cudnn"
    said = describe_backend(cfg("gpu", 0.0, "float32"), [128])
    assert said == "xla (not cudnn: it does not support float32)"
    assert describe_backend(cfg("xla", 0.1), [128]) == "xla"
    said = describe_backend(cfg("tpu", 0.0), [1024, 128])
    assert said == "128 tokens: fused, 1024 tokens: splash"
    said = describe_backend(cfg("tpu", 0.1), [1024])
    assert said == (
        f"xla (not splash: {drops}; not fused: rows of 1024 tokens and 12 heads of 64 "
        "on 1 device: it takes up to 512 tokens, a multiple of 128, and heads that "
        "fill 128 lanes)"
    )
    with pytest.raises(UserError, match=r"model\.attention=cudnn: it has no dropout"):
        describe_backend(cfg("cudnn", 0.1), [128])
    with pytest.raises(UserError, match="cudnn: heads are 60 wide, not a multiple"):
        choose_backend("cudnn", (1, 128, 12, 60), 0.0)


@pytest.mark.parametrize("packed, window", [(False, 0), (True, 0), (False, 4)])
def test_a_backend_from_outside_the_package(packed, window):
    real = jnp.array([[1] * 8, [1] * 5 + [0] * 3])
    mask = AttentionMask(real * 2 if packed else real, packed, window)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 4))
    wanted = attend(q, k, v, mask, 0.0, None)
    found = attend(q, k, v, mask, 0.0, None, "lab.softmax:implementation=xla")
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    mask = mask._replace(query_positions=jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match="takes a query for each key"):
        attend(q[:, :1], k, v, mask, 0.0, None, "lab.softmax")
    assert choose_backend("lab.softmax", q.shape, 0.1)[0] == "lab.softmax"
    with pytest.raises(UserError, match=r"model.attention='lab.nothing': there is no"):
        EncoderConfig(8, 8, 1, 1, 8, attention="lab.nothing:a=1")
    with pytest.raises(UserError, match="does not define make_attention"):
        import_backend("lab.triangle")

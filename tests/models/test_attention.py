# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models.attention import attend, attention_mask


def draw(b=2, length=6, heads=3, width=4, scale=1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    return [scale * jax.random.normal(k, (b, length, heads, width)) for k in keys]


def plain(q, k, v, mask):
    """Divide before the values are mixed, as equation 1 is written."""
    scores = jnp.einsum("BQHK,BTHK->BHQT", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("BHQT,BTHK->BQHK", weights, v)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients_are_those_of_equation_1(scale):
    q, k, v = draw(scale=scale)
    mask = attention_mask(jnp.array([[1] * 6, [1] * 4 + [0] * 2]))

    def loss(attention, q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v)))

    def ours(q, k, v):
        return attend(q, k, v, mask, 0.0, None)

    def theirs(q, k, v):
        return plain(q, k, v, mask)

    close = dict(rtol=2e-4, atol=2e-5 * scale)
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), **close)
    ours_grad = jax.grad(loss, argnums=(1, 2, 3))(ours, q, k, v)
    theirs_grad = jax.grad(loss, argnums=(1, 2, 3))(theirs, q, k, v)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        np.testing.assert_allclose(a, b, **close)


def test_weights_still_sum_to_one_in_bfloat16():
    q, k, _ = (x.astype(jnp.bfloat16) for x in draw(length=64))
    v = jnp.ones((2, 64, 3, 4), jnp.bfloat16)
    y = attend(q, k, v, attention_mask(jnp.ones((2, 64))), 0.0, None)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), 1.0, rtol=0.01)


def test_dropout_keeps_the_mean():
    q, k, _ = draw(b=64, length=32)
    v = jnp.ones((64, 32, 3, 4))
    mask = attention_mask(jnp.ones((64, 32)))
    y = attend(q, k, v, mask, 0.25, jax.random.key(1))
    assert abs(float(jnp.mean(y)) - 1.0) < 0.01
    assert float(jnp.std(y)) > 0.02

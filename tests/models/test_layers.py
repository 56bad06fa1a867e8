# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models import layers
from bertjax.models.embeddings import apply_rope, rope_angles


def test_layer_norm_by_hand():
    x = np.array([[1.0, 2.0, 3.0, 6.0]], np.float32)  # mean 3, variance 3.5
    params = {"scale": jnp.full(4, 2.0), "bias": jnp.full(4, 0.5)}
    expected = (x - 3) / np.sqrt(3.5 + 0.1) * 2 + 0.5
    np.testing.assert_allclose(layers.layer_norm(params, x, 0.1), expected, rtol=1e-6)
    half = layers.layer_norm(params, jnp.asarray(x, jnp.bfloat16), 0.1)
    assert half.dtype == jnp.bfloat16


def test_layer_norm_of_large_values_with_a_far_mean():
    """E[x^2] - E[x]^2 would lose all significant digits here."""
    x = jnp.array([[10_000.0, 10_001.0, 10_002.0, 10_003.0]])
    params = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    expected = np.array([[-1.5, -0.5, 0.5, 1.5]]) / np.sqrt(1.25)
    np.testing.assert_allclose(layers.layer_norm(params, x, 1e-12), expected, rtol=1e-3)


def test_gelus_by_hand():
    x = jnp.array([-1.0, 0.0, 1.0, 2.0])
    exact = [-0.15865525, 0.0, 0.84134475, 1.9544997]
    tanh = [-0.15880801, 0.0, 0.841192, 1.9545977]
    np.testing.assert_allclose(layers.activate(x, "gelu"), exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        layers.activate(x, "gelu_tanh"), tanh, rtol=1e-5, atol=1e-7
    )


def test_relu_squared_by_hand():
    x = jnp.array([-2.0, 0.0, 0.5, 3.0])
    np.testing.assert_array_equal(layers.activate(x, "relu2"), [0.0, 0.0, 0.25, 9.0])
    np.testing.assert_array_equal(
        jax.grad(lambda x: jnp.sum(layers.activate(x, "relu2")))(x), [0, 0, 1, 6]
    )


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("width", [64, 65])
def test_dropout_statistics(rate, width):
    x = jnp.ones((2000, width))
    y = np.asarray(layers.dropout(x, rate, jax.random.key(0)))
    n = y.size
    dropped = (y == 0).mean()
    assert abs(dropped - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-4)
    # Each column has the right rate; columns half a row apart are independent.
    columns = (y == 0).mean(0)
    assert np.abs(columns - rate).max() < 6 * np.sqrt(rate * (1 - rate) / 2000)
    half = (width + 1) // 2
    a, b = y[:, : width - half] == 0, y[:, half:] == 0
    both = (a & b).mean()
    assert abs(both - rate**2) < 5 * np.sqrt(rate**2 / (2000 * half))


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_in_bfloat16_scales_without_a_bias(rate):
    """The factor 1 / (1 - rate) is not rounded to bfloat16; only each product is."""
    x = np.random.default_rng(0).uniform(1, 2, (512, 512)).astype(jnp.bfloat16)
    y = np.asarray(layers.dropout(jnp.asarray(x), rate, jax.random.key(0)), np.float64)
    x = np.asarray(x, np.float64)
    kept = y != 0
    assert abs(y[kept].sum() / x[kept].sum() * (1 - rate) - 1) < 1e-4

    def total(x):
        return jnp.sum(layers.dropout(x, rate, jax.random.key(0)) * x.astype(x.dtype))

    slope = np.asarray(jax.grad(total)(jnp.asarray(x, jnp.bfloat16)), np.float64)
    assert abs(slope[kept].sum() / (2 * y[kept].sum()) - 1) < 2e-4


def test_dropout_keeps_the_dtype_and_is_off_without_a_key():
    x = jnp.ones((4, 6), jnp.bfloat16)
    assert layers.dropout(x, 0.5, jax.random.key(0)).dtype == jnp.bfloat16
    assert layers.dropout(x, 0.5, None) is x
    assert layers.dropout(x, 0.0, jax.random.key(0)) is x


def test_linear_takes_split_kernels_flat():
    draw = np.random.default_rng(0)
    kernel = draw.standard_normal((6, 2, 3)).astype(np.float32)
    bias = draw.standard_normal((2, 3)).astype(np.float32)
    x = draw.standard_normal((5, 6)).astype(np.float32)
    expected = np.einsum("td,dhk->thk", x, kernel) + bias
    got = layers.linear({"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}, x)
    np.testing.assert_allclose(got, expected.reshape(5, 6), rtol=1e-5, atol=1e-6)


def test_draw_gives_every_leaf_its_own_numbers():
    specs = {
        "a": layers.linear_specs(into=(3,), out=(4,)),
        "b": layers.linear_specs(into=(3,), out=(4,)),
        "norm": layers.norm_specs(4),
    }
    made = layers.draw(jax.random.key(0), specs, 0.02)
    assert not np.intersect1d(made["a"]["kernel"], made["b"]["kernel"]).size
    stacked = layers.draw(jax.random.key(0), layers.stack_specs(specs, 2), 0.02)
    assert stacked["a"]["kernel"].shape == (2, 3, 4)
    assert np.unique(stacked["a"]["kernel"]).size == 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_turn_by_a_product_as_by_halves(dtype):
    """Values are equal bit for bit; gradients are equal up to rounding."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 8), dtype)
    rope = rope_angles(jnp.arange(7)[None], 8, 100.0)
    weights = jax.random.normal(jax.random.key(1), x.shape)

    def total(x, by_product):
        return jnp.sum(apply_rope(x, rope, by_product) * weights)

    for make in (lambda x, how: apply_rope(x, rope, how), jax.grad(total)):
        halves, product = (np.asarray(make(x, how), "f4") for how in (False, True))
        atol = 1e-6 if dtype == "float32" else 0.05
        np.testing.assert_allclose(product, halves, rtol=1e-6, atol=atol)
    halves, product = (apply_rope(x, rope, how) for how in (False, True))
    np.testing.assert_array_equal(np.asarray(halves), np.asarray(product))


def half_and_full(shape, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x = jnp.asarray(x, jnp.bfloat16)
    return x, x.astype(jnp.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_of_half_precision_products(axis, batched):
    """Only the result's gradient and the products' results are rounded to bfloat16."""
    x, full_x = half_and_full((3, 24, 16), 0)
    kernel, full_kernel = half_and_full((16, 40) if axis == 0 else (40, 16), 1)
    dy, full_dy = half_and_full((3, 24, 40), 2)

    def total(x, kernel, dy):
        y = layers.product_f32(x, kernel, axis)
        assert y.dtype == jnp.float32
        return jnp.sum(y * dy)

    slope = jax.grad(total, (0, 1))
    if batched:
        slope = jax.vmap(slope, (0, None, 0))
    turned = full_kernel if axis == 0 else full_kernel.T
    y = np.asarray(full_x @ turned)
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layers.product_f32(x, kernel, axis), y, **close)
    dx, dw = jax.jit(slope)(x, kernel, dy.astype(jnp.float32))
    assert dx.dtype == dw.dtype == jnp.bfloat16
    expected = jnp.einsum("bto,io->bti", full_dy, turned)
    np.testing.assert_allclose(dx.astype(np.float32), expected, rtol=5e-3, atol=5e-3)
    expected = jnp.einsum("bti,bto->bio", full_x, full_dy)
    expected = expected if batched else expected.sum(0)
    expected = expected if axis == 0 else expected.swapaxes(-1, -2)
    np.testing.assert_allclose(dw.astype(np.float32), expected, rtol=5e-3, atol=5e-3)


def test_gradients_of_half_precision_products_on_a_mesh():
    """Where rows are on several devices, their products are summed over all of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x, full_x = half_and_full((64, 16), 0)
    dy, full_dy = half_and_full((64, 40), 1)
    products = jax.jit(layers.sum_products)(*jax.device_put((x, dy), rows))
    assert products.dtype == jnp.float32
    np.testing.assert_allclose(products, full_x.T @ full_dy, rtol=1e-5, atol=1e-5)

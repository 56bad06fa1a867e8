# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bertjax.training import OPTIMIZERS
from bertjax.training.layerwise import decay_mask
from bertjax.training.optim import MAKERS, make_optimizer

PARAMS = {
    "embeddings": {"word": jnp.ones((3, 2)), "norm": {"scale": jnp.ones(2)}},
    "layers": {"up": {"kernel": jnp.ones((1, 2, 2)), "bias": jnp.ones((1, 2))}},
}


def make(name="adamw", lr=0.1, wd=0.01, clip=0.0, **more):
    settings = dict(wd=wd, b1=0.9, b2=0.999, eps=1e-6, clip=clip)
    return make_optimizer(name, lambda step: lr, **settings | more)


def first_update(tx, grads, params):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


def test_the_names_that_configs_are_checked_against():
    assert MAKERS.keys() == OPTIMIZERS.keys()


def test_what_decays():
    """Stacked biases and scales do not decay: one of their two axes is of layers."""
    assert decay_mask(PARAMS) == {
        "embeddings": {"word": True, "norm": {"scale": False}},
        "layers": {"up": {"kernel": True, "bias": False}},
    }
    tx = make(lr=0.5, wd=0.1)
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    updates = first_update(tx, grads, PARAMS)
    after = optax.apply_updates(PARAMS, updates)
    assert float(after["layers"]["up"]["bias"][0, 0]) == 1
    assert float(after["embeddings"]["norm"]["scale"][0]) == 1
    np.testing.assert_allclose(after["embeddings"]["word"], 1 - 0.5 * 0.1)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_what_is_no_matrix_does_not_decay(name):
    """Neither a scalar nor a vector of a head from outside decays, stacked or not."""
    params = {
        "contrast": {"temperature": jnp.ones(()), "center": jnp.ones(4)},
        "own": {"layers": {"center": jnp.ones((2, 4)), "map": jnp.ones((2, 4, 4))}},
        "pair": [jnp.ones(4), jnp.ones((4, 4))],
    }
    decayed = decay_mask(params)
    assert decayed == {
        "contrast": {"temperature": False, "center": False},
        "own": {"layers": {"center": False, "map": True}},
        "pair": [False, True],
    }
    tx = make(name, lr=0.5, wd=0.1)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates = first_update(tx, grads, params)
    moved = jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates)
    assert moved == decayed


def test_cautious_decay_case_by_case():
    """The update is -0.1 x (sign of g + 0.5 x p); where g and p disagree, p is out."""
    p = np.array([[2.0, 2.0, -2.0, -2.0, 2.0, 0.0]], np.float32)
    g = np.array([[1.0, -1.0, 1.0, -1.0, 0.0, 1.0]], np.float32)
    decay = [[1.0, 0.0, 0.0, -1.0, 1.0, 0.0]]  # 0.5 x p, or 0
    params = {"kernel": p, "bias": p[0]}
    tx = make(lr=0.1, wd=0.5, cautious_decay=True)
    updates = first_update(tx, {"kernel": g, "bias": g[0]}, params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * (g + decay), atol=1e-6)
    np.testing.assert_allclose(updates["bias"], -0.1 * g[0], atol=1e-6)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_cautious_decay_of_every_optimizer(name):
    """Elements decay only where the decay does not oppose the step without decay."""
    normal = np.random.default_rng(0).normal
    shapes = {"layers": {"up": {"kernel": (2, 6, 4)}}, "word": (7, 4), "bias": (4,)}
    params, grads = (
        jax.tree.map(
            lambda s: normal(size=s).astype("f4"),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for _ in range(2)
    )

    def step(**settings):
        tx = make(name, lr=1.0, **settings)
        return first_update(tx, grads, params)

    plain, found = step(wd=0.0), step(wd=0.2, cautious_decay=True)
    agree = jax.tree.map(lambda u, p: u * p <= 0, plain, params)  # u is subtracted
    wanted = jax.tree.map(
        lambda u, p, a, decays: u - 0.2 * p * a * decays,
        plain,
        params,
        agree,
        decay_mask(params),
    )
    for got, want, mask, whole in zip(
        *map(jax.tree.leaves, (found, wanted, agree, step(wd=0.2))), strict=True
    ):
        if name == "lamb":  # it scales steps to the size of the parameters
            continue
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        assert 0 < np.mean(mask) < 1
        assert got.ndim == 1 or not np.allclose(got, whole, atol=1e-3)
    if name == "lamb":
        tx = make("adamw", lr=1.0, wd=0.2, cautious_decay=True)
        adam = tx.update(grads, tx.init(params), params)[0]["word"]
        scale = np.linalg.norm(params["word"]) / np.linalg.norm(adam)
        np.testing.assert_allclose(found["word"], scale * adam, rtol=1e-5)


def test_first_adamw_update_by_hand():
    """With bias correction, the first update is -lr x g / (|g| + eps)."""
    tx = make(lr=0.1, wd=0.0)
    params = {"kernel": jnp.array([1.0, 2.0])}
    grads = {"kernel": jnp.array([0.5, -4.0])}
    updates = first_update(tx, grads, params)
    np.testing.assert_allclose(updates["kernel"], [-0.1, 0.1], rtol=1e-5)


def test_clipping_by_the_global_norm():
    """Adam's update hides the scale; its first moment is 0.1 x the clipped gradient."""
    grads = {"a": {"kernel": jnp.array([3.0])}, "b": {"bias": jnp.array([4.0])}}
    params = jax.tree.map(jnp.ones_like, grads)
    for clip, scale in ((1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)):
        tx = make(clip=clip)
        _, state = tx.update(grads, tx.init(params), params)
        mu = optax.tree.get(state, "mu")
        assert float(mu["a"]["kernel"][0]) == pytest.approx(0.3 * scale, rel=1e-5)
        assert float(mu["b"]["bias"][0]) == pytest.approx(0.4 * scale, rel=1e-5)

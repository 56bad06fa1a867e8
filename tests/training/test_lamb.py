# SPDX-License-Identifier: Apache-2.0
"""LAMB: each layer has its own norms, stacked or not, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layered_trees import B1, B2, EPS, LR, WD, draw

from bertjax.parallel.mesh import make_mesh
from bertjax.training.optim import make_optimizer
from bertjax.training.schedules import make_schedule
from bertjax.training.state import init_sharded, plan_state

SETTINGS = dict(wd=WD, b1=B1, b2=B2, eps=EPS)


def make(clip=0.0, **change):
    return make_optimizer("lamb", lambda step: LR, **{**SETTINGS, **change}, clip=clip)


def first_update(tx, grads, params):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


@pytest.mark.parametrize("param, grad", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_norm_of_zero_makes_the_ratio_one(param, grad):
    """A layer of zeros beside a layer of ones causes no division by zero."""
    tx = make(wd=0.0)
    params = {
        "layers": {"kernel": jnp.stack([jnp.full((2, 2), param), jnp.ones((2, 2))])}
    }
    grads = {
        "layers": {"kernel": jnp.stack([jnp.full((2, 2), grad), jnp.ones((2, 2))])}
    }
    updates = first_update(tx, grads, params)
    first, second = np.asarray(updates["layers"]["kernel"])
    np.testing.assert_allclose(first, -LR * np.sign(grad), rtol=1e-5)
    np.testing.assert_allclose(second, -LR, rtol=1e-5)


def test_the_step_has_the_size_of_the_layer():
    """Whatever the gradients' scale, the norm of a layer's update is lr x its norm."""
    params, tx = draw(0), make(clip=1.0)
    for scale in (1e-3, 1e3):
        grads = jax.tree.map(lambda x, s=scale: x * s, draw(1))
        updates = first_update(tx, grads, params)
        pair = (
            t["encoder"]["layers"]["mlp"]["up"]["kernel"] for t in (updates, params)
        )
        for u, p in zip(*pair, strict=True):
            ratio = np.linalg.norm(u) / np.linalg.norm(p)
            assert ratio == pytest.approx(LR, rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [(8, 1, 1), (1, 4, 2), (2, 2, 2)],
)
@pytest.mark.slow
def test_norms_are_of_whole_arrays_on_any_mesh(layout):
    from bertjax.models.config import EncoderConfig
    from bertjax.objectives.make_objective import make_objective

    cfg = EncoderConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    objective, _ = make_objective("mlm", cfg)
    schedule = make_schedule("constant", 0.1, 0, 10)
    tx = make_optimizer("lamb", schedule, **SETTINGS, clip=1.0)

    def init():
        return objective.init(jax.random.key(0))

    noise = [
        jax.tree.map(
            lambda x, s=seed: (
                np.random.default_rng(s).normal(size=x.shape).astype("f4")
            ),
            jax.eval_shape(init),
        )
        for seed in (1, 2)
    ]
    ends = []
    for mesh in (make_mesh(devices=jax.devices()[:1]), make_mesh(*layout)):
        _, shardings = plan_state(init, tx, mesh, ())
        state = init_sharded(init, tx, mesh, shardings)
        params, opt = state.params, state.opt_state
        with jax.set_mesh(mesh):
            update = jax.jit(
                tx.update, out_shardings=(shardings.params, shardings.opt_state)
            )
            for g in noise:
                updates, opt = update(jax.device_put(g, shardings.params), opt, params)
                params = optax.apply_updates(params, updates)
        ends.append(jax.device_get(params))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

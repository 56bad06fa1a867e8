# SPDX-License-Identifier: Apache-2.0
"""Muon, NorMuon and AdaMuon on a mesh; test_optimizers.py tests the algorithms."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.parallel.mesh import make_mesh
from bertjax.training.muon import MUON_RMS, newton_schulz, orthogonalize
from bertjax.training.optim import make_optimizer
from bertjax.training.state import init_sharded, plan_state

LR = 0.1
SHAPES = {
    "encoder": {
        "embeddings": {"word": (7, 8)},
        "layers": {
            "attention": {
                "query": {"kernel": (2, 8, 2, 4), "bias": (2, 2, 4)},
                "output": {"kernel": (2, 2, 4, 8)},
            },
            "mlp": {"down": {"kernel": (2, 12, 8)}},
        },
    }
}


def draw(seed):
    normal = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda shape: normal(size=shape).astype("f4"),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def steps(name, mesh, ns_dtype="float32"):
    """Take two steps on a mesh; return (final parameters, planned shardings)."""
    settings = dict(wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=0.0)
    tx = make_optimizer(name, lambda step: LR, ns_dtype=ns_dtype, **settings)
    _, where = plan_state(lambda: draw(0), tx, mesh, ())
    state = init_sharded(lambda: draw(0), tx, mesh, where)

    def update(state, grads):
        updates, moments = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=moments)

    with jax.set_mesh(mesh):
        jitted = jax.jit(update, out_shardings=where)
        for seed in (1, 2):
            state = jitted(state, jax.device_put(draw(seed), where.params))
    return jax.device_get(state.params), where


@pytest.mark.parametrize("name", ["muon", "normuon", "adamuon"])
def test_four_devices_do_what_one_does(name):
    one, _ = steps(name, make_mesh(devices=jax.devices()[:1]))
    four, where = steps(name, make_mesh(1, 4, 1, devices=jax.devices()[:4]))
    for a, b in zip(*map(jax.tree.leaves, (one, four)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    # State of a kernel's shape is sharded as the kernel is.
    spread = {
        jax.tree_util.keystr(path): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(where.opt_state)
        if any(place.spec) and "layers" in jax.tree_util.keystr(path)
    }
    of = where.params["encoder"]["layers"]["mlp"]["down"]["kernel"].spec
    found = [spec for path, spec in spread.items() if "'down'" in path]
    assert found == [of] * (2 if name == "adamuon" else 1) and any(of)


@pytest.mark.parametrize("name", ["normuon", "adamuon"])
def test_the_updates_of_each_layer_have_the_same_size(name):
    after, _ = steps(name, make_mesh(devices=jax.devices()[:1]))
    settings = dict(wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=0.0)
    tx = make_optimizer(name, lambda step: LR, **settings)
    grads = jax.tree.map(lambda g: g * np.float32(1e3), draw(1))
    for tree in (grads, jax.tree.map(lambda g: 1e-3 * g, grads)):
        updates, _ = jax.jit(tx.update)(tree, tx.init(after), after)
        for kernel in jax.tree.leaves(updates["encoder"]["layers"]["mlp"]):
            sizes = np.sqrt(np.mean(np.square(kernel), axis=(1, 2)))
            np.testing.assert_allclose(sizes, LR * MUON_RMS, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1), (2, 1, 2)])
def test_devices_have_whole_matrices(shape):
    """A kernel is gathered and sent back once, not once per iteration."""
    mesh = make_mesh(*shape, devices=jax.devices()[:4])
    kernel = np.zeros((6, 64, 128), "f4")
    where = NamedSharding(mesh, PartitionSpec(None, "data"))
    tree = {"layers": {"up": {"kernel": jax.device_put(kernel, where)}}}
    turn = jax.jit(lambda x: orthogonalize(x, "float32"))
    with jax.set_mesh(mesh):
        text = turn.lower(tree).compile().as_text()
    moves = re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)\(", text)
    assert 0 < len(moves) <= 2, moves


def difference(a, b):
    """Return the root mean square of a - b divided by the root mean square of b."""
    return np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))


@pytest.mark.parametrize("shape", [(2, 24, 8), (2, 8, 40)])
@pytest.mark.parametrize("dtype, most", [("float32", 1e-5), ("bfloat16", 0.1)])
def test_newton_schulz_is_optaxs_in_any_dtype(shape, dtype, most):
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    turn = jax.vmap(lambda m: newton_schulz(m, dtype))
    found = np.asarray(jax.jit(turn)(x))
    assert found.dtype == np.float32
    sizes = np.linalg.svd(found, compute_uv=False)
    assert 0.6 < sizes.min() and sizes.max() < 1.3
    orthogonalize = optax.contrib.scale_by_muon(
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )
    wanted, _ = jax.jit(orthogonalize.update)(x, orthogonalize.init(x))
    assert difference(found, np.asarray(wanted)) < most


@pytest.mark.parametrize("name", ["muon", "normuon", "adamuon"])
def test_updates_in_bfloat16_are_near_those_in_float32(name):
    """On one device and on four. AdaMuon's bound is wide, as it makes small elements
    large and its matrices of signs (8 x 8) have small singular values."""
    mesh = make_mesh(devices=jax.devices()[:1])
    single, _ = steps(name, mesh)
    half, _ = steps(name, mesh, "bfloat16")
    four, _ = steps(name, make_mesh(1, 4, 1, devices=jax.devices()[:4]), "bfloat16")
    moved = [jax.tree.map(np.subtract, x, draw(0)) for x in (single, half, four)]
    most = 0.5 if name == "adamuon" else 0.1
    for a, b, c in zip(*map(jax.tree.leaves, moved), strict=True):
        assert difference(b, a) < most
        assert difference(c, b) < most


@pytest.mark.parametrize("name", ["muon", "normuon", "adamuon"])
def test_the_state_has_one_form_in_any_dtype(name):
    """So a run can resume on a device where `fast` means another dtype."""
    settings = dict(wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=0.0)
    single, half = (
        make_optimizer(name, lambda step: LR, ns_dtype=dtype, **settings).init(draw(0))
        for dtype in ("float32", "bfloat16")
    )
    jax.tree.map(np.testing.assert_array_equal, single, half)

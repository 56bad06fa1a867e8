# SPDX-License-Identifier: Apache-2.0
"""Each optimizer against the algorithm in plain numpy, one layer at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layered_trees import B1, B2, EPS, LR, SHAPES, WD, draw, is_shape

from bertjax import UserError
from bertjax.training import OPTIMIZERS, read_rates
from bertjax.training.layerwise import is_stacked, rate_multipliers
from bertjax.training.muon import SecondMoment
from bertjax.training.optim import make_optimizer

STEPS = 3


def run(name, shapes=SHAPES, **change):
    """Take three steps; return (initial parameters, gradients, final parameters)."""
    settings = dict(wd=WD, b1=B1, b2=B2, eps=EPS, clip=0.0) | change
    tx = make_optimizer(name, lambda step: LR, **settings)
    params, grads = draw(0, shapes), [draw(s, shapes) for s in range(1, STEPS + 1)]

    @jax.jit
    def steps(params):
        state = tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return params, grads, steps(params)


def compare(name, layer, shapes=SHAPES, rtol=3e-4, **change):
    """Check every leaf, layer by layer, against layer(path, x, grads) in float64."""
    before, grads, after = run(name, shapes, **change)

    def check(path, got, x, *gs):
        rows = zip(got, x, *gs, strict=True) if is_stacked(path) else [(got, x, *gs)]
        for a, b, *g in rows:
            want = layer(path, b.astype(np.float64), np.asarray(g, np.float64))
            np.testing.assert_allclose(a, want, rtol=rtol, atol=1e-5)

    jax.tree_util.tree_map_with_path(check, after, before, *grads)


def wd_of(path):
    return 0.0 if path[-1].key in ("bias", "scale") else WD


def moments(grads):
    m = v = np.zeros_like(grads[0])
    for t, g in enumerate(grads, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        yield t, g, m, v


def adamw(path, x, grads, corrected=True):
    for t, _, m, v in moments(grads):
        if corrected:
            m, v = m / (1 - B1**t), v / (1 - B2**t)
        x = x - LR * (m / (np.sqrt(v) + EPS) + wd_of(path) * x)
    return x


def stable(path, x, grads):
    for t, g, m, v in moments(grads):
        m, v = m / (1 - B1**t), v / (1 - B2**t)
        over = np.sqrt(np.mean(g * g / np.maximum(v, EPS**2)))
        rate = LR / max(1.0, over)
        x = x - rate * wd_of(path) * x - rate * m / (np.sqrt(v) + EPS)
    return x


def lamb(path, x, grads):
    for t, _, m, v in moments(grads):
        update = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        ratio = 1.0
        if wd := wd_of(path):
            update = update + wd * x
            ratio = np.linalg.norm(x) / np.linalg.norm(update)
        x = x - LR * ratio * update
    return x


def orthogonal(x):
    """Return a matrix after five quintic Newton-Schulz iterations (Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if turned else x


def muon(path, x, grads):
    if not is_stacked(path) or path[-1].key != "kernel":
        return adamw(path, x, grads)
    shape, m, beta = x.shape, np.zeros_like(x), 0.95
    sides = (6, 4) if path[-2].key == "output" else (4, 6)
    for t, g in enumerate(grads, 1):
        m = beta * m + (1 - beta) * g
        # Nesterov momentum; both terms are corrected for bias.
        ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        step = 0.2 * np.sqrt(6) * orthogonal(ahead.reshape(sides)).reshape(shape)
        x = x - LR * (step + WD * x)
    return x


def as_muon(algorithm):
    """Apply an algorithm for one matrix [in, out] to the layers' kernels, else AdamW.

    algorithm(gradients) yields the updates, which both papers then scale to an RMS of
    0.2: 0.2 x sqrt(m n) / Frobenius norm.
    """

    def layer(path, x, grads):
        if not is_stacked(path) or path[-1].key != "kernel":
            return adamw(path, x, grads)
        sides = (6, 4) if path[-2].key == "output" else (4, 6)
        for step in algorithm([g.reshape(sides) for g in grads]):
            step = 0.2 * np.sqrt(step.size) / np.linalg.norm(step) * step
            x = x - LR * (WD * x + step.reshape(x.shape))
        return x

    return layer


@as_muon
def normuon(grads, beta=0.95):
    """Algorithm 1 of arXiv 2510.05491, with the authors' Nesterov momentum.

    v has one number per neuron: per column of our [in, out], a row in the paper.
    """
    m, v = np.zeros_like(grads[0]), np.zeros(grads[0].shape[1])
    for t, g in enumerate(grads, 1):
        m = beta * m + (1 - beta) * g
        # Both terms are corrected for bias, as in optax.
        ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        o = orthogonal(ahead)
        for neuron in range(len(v)):
            v[neuron] = 0.95 * v[neuron] + 0.05 * np.mean(o[:, neuron] ** 2)
        yield o / (np.sqrt(v) + 1e-8)


@as_muon
def adamuon(grads, beta=0.95):
    """Algorithm 1 of arXiv 2507.11005, with the authors' Nesterov momentum."""
    m = v = np.zeros_like(grads[0])
    for g in grads:
        m = beta * m + (1 - beta) * g
        o = orthogonal(np.sign(beta * m + (1 - beta) * g))
        v = beta * v + (1 - beta) * o * o
        yield o / (np.sqrt(v) + 1e-8)


def test_adamw():
    compare("adamw", adamw)


def test_adamw_without_bias_correction():
    compare("adamw", functools.partial(adamw, corrected=False), bias_correction=False)


def test_stableadamw():
    compare("stableadamw", stable)


def test_lamb():
    compare("lamb", lamb)


def test_muon():
    compare("muon", muon, rtol=2e-3)


def test_normuon():
    compare("normuon", normuon, rtol=2e-3)


def test_adamuon():
    compare("adamuon", adamuon, rtol=2e-3)


@pytest.mark.parametrize("name", ["normuon", "adamuon"])
def test_second_moments_are_by_neuron_or_by_element(name):
    """The state beside muon's momentum exists for kernels only, with these shapes."""
    tx = make_optimizer(name, lambda step: LR, wd=WD, b1=B1, b2=B2, eps=EPS, clip=0.0)
    state = jax.eval_shape(tx.init, draw(0))
    (kept,) = (
        x.nu
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SecondMoment))
        if isinstance(x, SecondMoment)
    )
    shapes = [x.shape for x in jax.tree.leaves(kept)]
    if name == "normuon":
        assert shapes == [(3, 1, 1, 4), (3, 1, 2, 3), (3, 1, 6)]
    else:
        assert shapes == [(3, 2, 3, 4), (3, 4, 2, 3), (3, 4, 6)]


def test_adamw_is_torchs():
    torch = pytest.importorskip("torch")

    def theirs(path, x, grads):
        p = torch.nn.Parameter(torch.tensor(x))
        tx = torch.optim.AdamW([p], LR, (B1, B2), EPS, wd_of(path))
        for g in grads:
            p.grad = torch.tensor(g)
            tx.step()
        return p.detach().numpy()

    compare("adamw", theirs)


def test_adafactor():
    """It is optax's on single matrices, factored if both sides are 128 or more."""
    shapes = {
        "layers": {
            "attention": {"query": {"kernel": (2, 128, 2, 65), "bias": (2, 2, 65)}},
            "mlp": {"down": {"kernel": (2, 130, 128)}, "norm": {"scale": (2, 128)}},
        },
        "mlm": {"decoder": (130, 128), "bias": (130,)},
    }

    @jax.jit
    def descend(p, grads, wd):
        tx = optax.adafactor(LR)
        state = tx.init(p)
        for g in grads:
            updates, state = tx.update(g, state, p)
            p = optax.apply_updates(p, updates) - LR * wd * p
        return p

    def theirs(path, x, grads):
        shape = x.shape
        x = x.reshape(128, 130) if len(shape) == 3 else x
        grads = grads.reshape(-1, *x.shape).astype("f4")
        return np.asarray(descend(x.astype("f4"), grads, wd_of(path))).reshape(shape)

    compare("adafactor", theirs, shapes)
    tx = make_optimizer(
        "adafactor", lambda step: LR, wd=WD, b1=B1, b2=B2, eps=EPS, clip=0.0
    )
    params = draw(0, shapes)
    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(tx.init, params)))
    assert kept < 0.05 * sum(x.size for x in jax.tree.leaves(params))


def test_layer_decay():
    """With decay d, heads have factor 1, the last of 3 layers d, the first d^3, the
    embeddings d^4."""
    factors = rate_multipliers(jax.tree.map(np.zeros, SHAPES, is_leaf=is_shape), 0.5)
    encoder = factors["encoder"]
    assert encoder["embeddings"] == {"word": 1 / 16, "norm": {"scale": 1 / 16}}
    assert factors["mlm"] == {"transform": {"kernel": 1.0}, "bias": 1.0}
    kernel = encoder["layers"]["attention"]["query"]["kernel"]
    assert kernel.shape == (3, 1, 1, 1) and kernel.ravel().tolist() == [
        1 / 8,
        1 / 4,
        1 / 2,
    ]
    # The first layer lacks this leaf.
    assert encoder["layers"]["mlp"]["norm"]["scale"].ravel().tolist() == [1 / 4, 1 / 2]


def test_rates_of_groups():
    """A group's rate times the layer decay: kernels by layer, 2 x (1/8, 1/4, 1/2)."""
    tree = jax.tree.map(np.zeros, SHAPES, is_leaf=is_shape)
    rates = {"embeddings": 3.0, "heads": 5.0, "vectors": 7.0, "kernels": 2.0}
    plain = rate_multipliers(tree, 1.0, rates)
    assert plain == {
        "encoder": {
            "embeddings": {"word": 3.0, "norm": {"scale": 7.0}},
            "layers": {
                "attention": {
                    "query": {"kernel": 2.0, "bias": 7.0},
                    "output": {"kernel": 2.0},
                },
                "mlp": {"up": {"kernel": 2.0}, "norm": {"scale": 7.0}},
            },
        },
        "mlm": {"transform": {"kernel": 5.0}, "bias": 7.0},
    }
    both = rate_multipliers(tree, 0.5, {"kernels": 2.0, "embeddings": 3.0})
    kernel = both["encoder"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.ravel().tolist() == [1 / 4, 1 / 2, 1.0]
    assert both["encoder"]["embeddings"] == {"word": 3 / 16, "norm": {"scale": 1 / 16}}
    assert both["mlm"] == {"transform": {"kernel": 1.0}, "bias": 1.0}


@pytest.mark.parametrize("name", ["adamw", "adamuon"])
def test_rates_scale_the_first_steps(name):
    settings = dict(wd=WD, b1=B1, b2=B2, eps=EPS, clip=0.0)
    params, grads = draw(0), draw(1)
    rates = {"embeddings": 0.0, "heads": 0.25, "kernels": 2.0}

    def step(**more):
        tx = make_optimizer(name, lambda step: LR, **settings, **more)
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)

    factors = rate_multipliers(params, 1.0, rates)
    wanted = jax.tree.map(lambda u, f: u * f, step(), factors)
    found = step(rates=rates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted
    )
    assert not found["encoder"]["embeddings"]["word"].any()


@pytest.mark.parametrize(
    "text, said",
    [
        ("embedings:0.3", r"optim.rates='embedings' .*did you mean 'embeddings'"),
        ("heads:1,heads:2", r"optim.rates=heads:1,heads:2: 'heads' is given twice"),
        ("heads:-1", r"optim.rates=heads:-1: 'heads:-1' is not GROUP:NUMBER"),
        ("heads=2", r"'heads=2' is not GROUP:NUMBER"),
        ("heads:nan", r"'heads:nan' is not GROUP:NUMBER"),
    ],
)
def test_rates_that_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        read_rates(text)
    assert read_rates(" heads: 0.5, kernels:0,") == {"heads": 0.5, "kernels": 0.0}
    assert read_rates("") == {}


def test_layer_decay_scales_the_steps():
    before, _, plain = run("adamw")
    *_, decayed = run("adamw", layer_decay=0.5)
    first = jax.tree.map(lambda a, b: a - b, plain, before)["mlm"]["bias"]
    other = jax.tree.map(lambda a, b: a - b, decayed, before)["mlm"]["bias"]
    np.testing.assert_array_equal(first, other)

    def bottom(tree):  # a bias has no weight decay: its steps scale with the rate
        return np.asarray(tree["encoder"]["layers"]["attention"]["query"]["bias"])

    moved = (bottom(decayed) - bottom(before)) / (bottom(plain) - bottom(before))
    for layer, factor in enumerate((1 / 8, 1 / 4, 1 / 2)):
        np.testing.assert_allclose(moved[layer], factor, rtol=2e-3)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_zeros_that_are_kept(name):
    """Zeros of the named weights stay 0 under every optimizer; other weights move."""
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=(2, 6, 4)).astype(np.float32)
    kernel[:, ::2, 1:3] = 0
    params = {"layers": {"up": {"kernel": kernel, "bias": np.zeros((2, 4))}}}
    params = jax.tree.map(jnp.asarray, params)
    settings = dict(wd=0.1, b1=0.9, b2=0.999, eps=1e-6, clip=1.0)
    zeros = [r"layers/.*kernel"]
    tx = make_optimizer(name, lambda step: 0.01, zeros=zeros, **settings)
    state, after = tx.init(params), params
    for step in range(3):
        grads = jax.tree.map(lambda p, s=step: jnp.cos(p + s), after)
        updates, state = tx.update(grads, state, after)
        after = optax.apply_updates(after, updates)
    found = np.asarray(after["layers"]["up"]["kernel"])
    assert np.array_equal(found == 0, kernel == 0)
    assert (found[kernel != 0] != kernel[kernel != 0]).all()
    assert (np.asarray(after["layers"]["up"]["bias"]) != 0).all()

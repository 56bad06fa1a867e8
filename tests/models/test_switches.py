# SPDX-License-Identifier: Apache-2.0
"""Options that no family uses: each against its formula, in every form of the program.

The reference is numpy in float64, written from the formulas, one layer at a time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fetched

from bertjax.models import encoder
from bertjax.models.attention import attend
from bertjax.models.attention_maps import attention_maps
from bertjax.models.config import EncoderConfig
from bertjax.models.stacked_layers import unstack
from bertjax.training import OPTIMIZERS
from bertjax.training.optim import make_optimizer

B, L, D, H, V = 2, 6, 8, 2, 12
POST = EncoderConfig(
    vocab_size=V,
    hidden_size=D,
    num_hidden_layers=3,
    num_attention_heads=H,
    intermediate_size=12,
    max_position_embeddings=L,
    type_vocab_size=0,
    hidden_act="relu",
    pooler=False,
)
PRE = dataclasses.replace(
    POST,
    position_embedding_type="rope",
    norm_position="pre",
    norm_type="rms_norm",
    norm_bias=False,
    first_attention_norm=False,
    final_norm=True,
    attention_bias=False,
    mlp_type="glu",
    mlp_bias=False,
)
FORMS = {"post": POST, "pre": PRE}
SWITCHES = {
    "relu2": dict(hidden_act="relu2"),
    "qk_norm": dict(qk_norm=True),
    "embedding_skip": dict(embedding_skip=True),
    "value_skip": dict(value_skip=True),
    "unet_skips": dict(unet_skips=True),
    "all": dict(qk_norm=True, embedding_skip=True, value_skip=True, unet_skips=True),
}
by_switch = pytest.mark.parametrize("switch", SWITCHES)
# Programs that are slow to compile run for one switch only, unless slow tests run.
slow = pytest.mark.slow
FAST = ("all",)
by_some = pytest.mark.parametrize(
    "switch", [x if x in FAST else pytest.param(x, marks=slow) for x in SWITCHES]
)
by_form = pytest.mark.parametrize("form", ["pre", pytest.param("post", marks=slow)])
replace = dataclasses.replace
apply = fetched(encoder.apply, static_argnums=1)
close = dict(rtol=1e-5, atol=1e-5)


def batch():
    draw = np.random.default_rng(1)
    real = np.arange(L) < np.array([[L], [L - 2]])
    ids = draw.integers(0, V, (B, L)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": real.astype(np.int32)}


def with_switch(form, switch, **more):
    """Return (config, parameters far enough from their initial values to matter)."""
    cfg = replace(FORMS[form], **SWITCHES[switch], **more)
    draw = np.random.default_rng(0)
    made = jax.device_get(encoder.init(jax.random.key(0), cfg))
    return cfg, jax.tree.map(
        lambda x: x + np.float32(0.4) * draw.standard_normal(x.shape, np.float32), made
    )


# ---------------------------------------------------------------- the formulas
def norm(p, cfg, x):
    if cfg.norm_type == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.layer_norm_eps)
    return y * p.get("scale", 1) + p.get("bias", 0)


def dense(p, x):
    kernel = p["kernel"].reshape(x.shape[-1], -1)
    return x @ kernel + p.get("bias", np.zeros(1)).reshape(-1)


def turn(x):
    """Rotate the halves of each head, x [B, L, H, K], by the angles of its position."""
    half = x.shape[-1] // 2
    angle = np.arange(L)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q, k, v, real):
    scores = np.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores) * real[:, None, None]
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bhqt,bthk->bqhk", weights, v)


def reference(params, cfg):
    """Return the hidden states, float64 [B, L, D]."""
    acts = {"relu": lambda x: x * (x > 0), "relu2": lambda x: (x * (x > 0)) ** 2}
    act, pre = acts[cfg.hidden_act], cfg.norm_position == "pre"
    ids, real = batch().values()
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    embeddings = p["embeddings"]
    x = embeddings["word"][ids]
    if "position" in embeddings:
        x = x + embeddings["position"][:L]
    x = norm(embeddings["norm"], cfg, x)
    first, values, results, n = x, None, [], cfg.num_hidden_layers
    for i, layer in enumerate(unstack(p, cfg)["layers"]):
        if cfg.unet_skips and i >= n - n // 2:
            weight = p["layers"]["unet_skips"]["early"][i - (n - n // 2)]
            x = x + weight * results[n - 1 - i]
        if cfg.embedding_skip:
            mix = p["layers"]["embedding_skip"]
            x = mix["own"][i] * x + mix["first"][i] * first
        own, mlp = layer["attention"], layer["mlp"]
        y = norm(own["norm"], cfg, x) if pre and "norm" in own else x
        q, k, v = (
            dense(own[name], y).reshape(B, L, H, -1)
            for name in ("query", "key", "value")
        )
        values = v if i == 0 else values
        if cfg.value_skip and i > 0:
            mix = p["layers"]["value_skip"]
            v = mix["own"][i - 1] * v + mix["first"][i - 1] * values
        if cfg.qk_norm:
            q, k = (z / np.sqrt((z**2).mean(-1, keepdims=True)) for z in (q, k))
        if cfg.position_embedding_type == "rope":
            q, k = turn(q), turn(k)
        x = x + dense(own["output"], attention(q, k, v, real).reshape(B, L, -1))
        x = x if pre else norm(own["norm"], cfg, x)
        y = norm(mlp["norm"], cfg, x) if pre else x
        z = act(dense(mlp["up"], y))
        z = z * dense(mlp["gate"], y) if "gate" in mlp else z
        x = x + dense(mlp["down"], z)
        x = x if pre else norm(mlp["norm"], cfg, x)
        results.append(x)
    return norm(p["final_norm"], cfg, x) if cfg.final_norm else x


@by_form
@by_switch
def test_hidden_states_are_those_of_the_formula(switch, form):
    cfg, params = with_switch(form, switch, unroll=1)
    real = batch()["attention_mask"] > 0
    expected = reference(params, cfg)[real]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(
        apply(params, cfg, batch()).hidden[real], expected, **close
    )
    plain = replace(cfg, **off(switch))
    layers = {k: x for k, x in params["layers"].items() if k not in SWITCHES[switch]}
    plain = apply({**params, "layers": layers}, plain, batch()).hidden[real]
    assert np.abs(plain - expected).max() > 1e-2


def off(switch):
    """Return the default values of the switch's options."""
    return {name: getattr(POST, name) for name in SWITCHES[switch]}


# ---------------------------------------------------------------- forms of the program
@by_form
@by_some
def test_every_form_of_the_program_gives_the_same(switch, form):
    cfg, params = with_switch(form, switch)
    hidden = np.asarray(apply(params, cfg, batch()).hidden)
    loop = replace(cfg, unroll=1)
    np.testing.assert_allclose(apply(params, loop, batch()).hidden, hidden, **close)
    at = np.int32([[0, 3], [2, 1]])
    there = np.take_along_axis(hidden, at[..., None], axis=1)
    apart = unstack(params, cfg)
    for held, own in ((params, cfg), (apart, cfg), (params, loop)):
        found = apply(held, own, batch(), None, at).hidden
        np.testing.assert_allclose(found, there, **close)
    np.testing.assert_allclose(apply(apart, cfg, batch()).hidden, hidden, **close)
    kept = fetched(lambda p: encoder.apply_layers(p, cfg, batch(), lambda x: x))
    depths = kept(params), kept(apart)
    assert depths[0].shape == (4, B, L, D)
    np.testing.assert_allclose(depths[0][-1], hidden, **close)
    np.testing.assert_allclose(depths[0], depths[1], **close)


@by_form
@by_some
def test_gradients_in_every_form(switch, form):
    """Each leaf has a gradient; a loop over layers and remat do not change it."""
    cfg, params = with_switch(form, switch)
    weights = np.random.default_rng(3).standard_normal((B, 2, D))
    at = np.int32([[0, 3], [2, 1]])

    def loss(params, cfg):
        return jnp.sum(encoder.apply(params, cfg, batch(), None, at).hidden * weights)

    gradient = fetched(jax.grad(loss), static_argnums=1)
    grads = gradient(params, cfg)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        where = jax.tree_util.keystr(path)
        if "'key']['bias" not in where:  # it changes all scores of a query equally
            assert (np.abs(grad).reshape(len(grad), -1).max(1) > 1e-6).all() or (
                "word" in where or "position" in where
            ), where
    for change in (dict(unroll=1, remat="dots"), dict(remat="full")):
        other = gradient(params, replace(cfg, **change))
        for x, y in zip(*map(jax.tree.leaves, (grads, other)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@by_switch
def test_bfloat16_stays_bfloat16(switch):
    cfg, params = with_switch("pre", switch, dtype="bfloat16", unroll=1)
    hidden = apply(params, cfg, batch()).hidden
    assert hidden.dtype == jnp.bfloat16
    exact = apply(params, replace(cfg, dtype="float32"), batch()).hidden
    assert float(np.abs(hidden - exact).mean()) < 0.05


@by_some
def test_attention_maps_are_of_what_the_layers_see(switch, monkeypatch):
    """The maps are the weights computed from the arguments of each layer's `attend`."""
    cfg, params = with_switch("pre", switch)
    maps = jax.jit(attention_maps, static_argnums=1)(params, cfg, batch())
    seen = []

    def spy(q, k, v, mask, *rest):
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(mask.boolean, scores, -jnp.inf)
        seen.append(jax.nn.softmax(scores))
        return attend(q, k, v, mask, *rest)

    monkeypatch.setattr("bertjax.models.transformer_layer.attend", spy)
    encoder.apply(unstack(params, cfg), cfg, batch())
    np.testing.assert_allclose(maps, seen, **close)


@slow
def test_runs_side_by_side_are_each_as_alone():
    """Under vmap, as a sweep runs them."""
    cfg, one = with_switch("pre", "all", unroll=1)
    other = jax.tree.map(lambda x: 1.5 * x, one)
    both = jax.tree.map(lambda *parts: jnp.stack(parts), one, other)
    found = jax.vmap(lambda p: encoder.apply(p, cfg, batch()).hidden)(both)
    for each, params in zip(found, (one, other), strict=True):
        np.testing.assert_allclose(each, apply(params, cfg, batch()).hidden, **close)


# ---------------------------------------------------------------- depths, and none
@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=slow)])
def test_an_even_number_of_layers(layers):
    """With two layers, the second half without the last layer is empty."""
    cfg, params = with_switch("pre", "all", num_hidden_layers=layers)
    real = batch()["attention_mask"] > 0
    expected = reference(params, cfg)
    at = np.int32([[0, 3], [2, 1]])
    there = np.take_along_axis(expected, at[..., None], axis=1)
    for unroll in (0, 1):
        own = replace(cfg, unroll=unroll)
        found = apply(params, own, batch(), None, at).hidden
        np.testing.assert_allclose(found, there, **close)
    found = apply(params, replace(cfg, unroll=1), batch()).hidden
    np.testing.assert_allclose(found[real], expected[real], **close)


def test_scalars_begin_as_their_sources_have_them():
    plain = encoder.init(jax.random.key(0), PRE)["layers"]
    assert plain.keys() == {"attention", "mlp"}
    found = encoder.init(jax.random.key(0), replace(PRE, **SWITCHES["all"]))["layers"]
    assert jax.tree.map(
        np.ndarray.tolist,
        jax.device_get({name: found[name] for name in found.keys() - plain.keys()}),
    ) == {
        "embedding_skip": {"own": [1, 1, 1], "first": [0, 0, 0]},
        "value_skip": {"own": [0.5, 0.5], "first": [0.5, 0.5]},
        "unet_skips": {"early": [1]},
    }


@by_form
def test_a_program_without_switches_has_one_loop_that_carries_hidden_states(form):
    cfg = replace(FORMS[form], unroll=1)
    params = encoder.init(jax.random.key(0), cfg)
    made = jax.make_jaxpr(lambda p: encoder.apply(p, cfg, batch()).hidden)(params)
    (loop,) = (eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan")
    assert [x.aval.shape for x in loop.outvars] == [(B, L, D)]


# ---------------------------------------------------------------- zero outputs
@by_form
def test_outputs_that_begin_as_zero_add_nothing(form):
    usual = FORMS[form]
    cfg = replace(usual, zero_init_outputs=True)
    params, plain = (encoder.init(jax.random.key(0), c) for c in (cfg, usual))
    attention, mlp = plain["layers"]["attention"], plain["layers"]["mlp"]
    for into in (attention["output"], mlp["down"]):
        assert float(np.abs(into["kernel"]).min()) > 0
        into["kernel"] = jnp.zeros_like(into["kernel"])
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    depths = encoder.apply_layers(params, cfg, batch(), lambda x: x)
    for x in depths[1:-1]:  # a second norm changes nothing
        np.testing.assert_allclose(x, depths[0], **close)


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("adamw", "normuon") else pytest.param(n, marks=slow)
        for n in sorted(OPTIMIZERS)
    ],
)
def test_outputs_that_begin_as_zero_move(name):
    """In every layer the zero kernels change first, then the kernels before them."""
    cfg = replace(PRE, zero_init_outputs=True, unroll=1)
    weights = np.random.default_rng(3).standard_normal((B, L, D))
    params = begin = encoder.init(jax.random.key(0), cfg)
    settings = dict(wd=0.01, b1=0.9, b2=0.99, eps=1e-6, clip=1.0)
    tx = make_optimizer(name, lambda step: 0.01, **settings)

    @jax.jit
    def step(params, state):
        grads = gradient_of_sum(params, cfg, weights)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(2):
        params, state = step(params, state)
    for part, kernel in (("attention", "output"), ("mlp", "down"), ("mlp", "up")):
        before, after = (p["layers"][part][kernel]["kernel"] for p in (begin, params))
        moved = np.abs(after - before).reshape(len(after), -1).max(1)
        assert ((moved > 1e-5) & (moved < 1)).all(), (kernel, moved)


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.grad, argnums=0)
def gradient_of_sum(params, cfg, weights):
    return jnp.sum(encoder.apply(params, cfg, batch()).hidden * weights)

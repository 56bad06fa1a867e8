# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters do not change, have no moments, and do not affect the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ENCODERS, tiny_encoder, train_steps
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import path_name
from bertjax.training import layerwise, multi_step, optim, read_freeze, schedules
from bertjax.training.frozen import frozen_sizes, join, split
from bertjax.training.state import make_state, plan_state
from bertjax.training.step import make_train_step

B, L, P, V = 16, 8, 2, 64
CFG = tiny_encoder(V, L, num_hidden_layers=3)
LOWER = "encoder/embeddings/.*,encoder/layers/.*[:2]"


def make_params(cfg=CFG, objective="mlm"):
    return jax.jit(make_objective(objective, cfg)[0].init)(jax.random.key(3))


def sizes_of(text, params):
    return frozen_sizes(params, read_freeze(text))


def make_batch(step):
    draw = np.random.default_rng(step)
    lengths = draw.integers(3, L + 1, B)[:, None]
    return {
        "input_ids": draw.integers(0, V, (B, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < lengths).astype(np.int32),
        "mlm_positions": draw.integers(0, 3, (B, P)).astype(np.int32),
        "mlm_ids": draw.integers(0, V, (B, P)).astype(np.int32),
        "mlm_weights": draw.integers(0, 2, (B, P)).astype(np.float32),
    }


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {path_name(path): leaf for path, leaf in found}


# ---------------------------------------------------------------- the key
def test_the_rules_of_a_key():
    text = r"encoder/layers[:6]/.*, mlm/.{1,4},encoder/embeddings/word[0:30522]"
    rules = [(rule.pattern, rule.first) for rule in read_freeze(text)]
    assert rules == [
        ("encoder/layers/.*", 6),
        ("mlm/.{1,4}", None),
        ("encoder/embeddings/word", 30522),
    ]
    assert read_freeze("") == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("encoder/(", "not a regular expression"),
        ("encoder/.*[:0]", "the first 0"),
        ("nosuchpart/.*", "nosuchpart/.* matches no parameter"),
        ("encoder/layers/.*[:4]", "which has 3"),
        ("encoder/embeddings/word[:65]", "which has 64"),
        (".*", "nothing is left"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(UserError, match=r"optim\.freeze") as e:
        sizes_of(text, PARAMS)
    assert words in str(e.value)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("layers", [1, 2])
def test_layers_count_from_the_embeddings_up(kind, layers):
    """Also in leaves that the first layers lack, or that several layers share."""
    cfg = dataclasses.replace(CFG, **ENCODERS[kind])
    params = make_params(cfg)
    sizes = sizes_of(f"encoder/layers/.*[:{layers}]", params)
    depth = max(x.shape[0] for k, x in leaves(params).items() if "/layers/" in k)
    for name, leaf in leaves(params).items():
        if "/layers/" not in name:
            assert name not in sizes
            continue
        left = leaf.shape[0] - (
            sizes.get(name, 0) or (0 if name not in sizes else leaf.shape[0])
        )
        assert left == min(leaf.shape[0], depth - layers), name


@given(st.integers(1, V), st.sampled_from([LOWER, "mlm/.*", "encoder/layers/mlp/.*"]))
def test_parts_make_the_whole(rows, text):
    params = jax.tree.map(np.asarray, PARAMS)
    sizes = sizes_of(f"{text},encoder/embeddings/word[:{rows}]", params)
    trained, frozen = split(params, sizes)
    back = join(trained, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    for name, leaf in leaves(trained).items():
        assert name not in sizes or sizes[name] == leaves(params)[name].shape[0] - len(
            leaf
        )


PARAMS = make_params()


# ---------------------------------------------------------------- the state
def test_frozen_leaves_have_no_moments_and_their_own_places():
    mesh, tx = make_mesh(2, 2, 2), optax.adam(1e-3)
    objective, _ = make_objective("mlm", CFG)

    def init():
        return objective.init(jax.random.key(0))

    def count(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    sizes = sizes_of(LOWER, jax.eval_shape(init))
    shapes, where = plan_state(init, tx, mesh, objective.shardings, freeze=sizes)
    whole, usual = plan_state(init, tx, mesh, objective.shardings)
    assert count(shapes.params) + count(shapes.frozen) == count(whole.params)
    assert count(shapes.opt_state) == 2 * count(shapes.params) + 1
    up = where.frozen["encoder"]["layers"]["mlp"]["up"]["kernel"]
    assert up.spec == usual.params["encoder"]["layers"]["mlp"]["up"]["kernel"].spec
    word = where.frozen["encoder"]["embeddings"]["word"]
    assert word.spec == usual.params["encoder"]["embeddings"]["word"].spec


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "muon",
        pytest.param("lamb", marks=pytest.mark.slow),
        pytest.param("adafactor", marks=pytest.mark.slow),
    ],
)
def test_what_is_frozen_keeps_its_bits(name):
    """With any optimizer, with decay, an average, the guard and two steps per call."""
    objective, _ = make_objective("mlm", CFG)
    schedule = schedules.make_schedule("constant", 0.1, 0, 10)
    more = {} if name == "adafactor" else dict(b1=0.9, b2=0.99, eps=1e-6)
    tx = optim.make_optimizer(name, schedule, clip=1.0, wd=0.5, **more)
    sizes = sizes_of(f"{LOWER},mlm/bias[:40]", PARAMS)
    first = make_state(PARAMS, tx, guarded=True, averaged=True, freeze=sizes)
    step = make_train_step(
        objective.sums, objective.weights, {}, tx, schedule, seed=0, ema=0.9
    )
    batches = [make_batch(i) for i in range(2)]
    call = {k: jnp.stack([b[k] for b in batches]) for k in batches[0]} | {"count": 2}
    last, _ = jax.jit(multi_step.many_steps(step))(first, call)
    before, after = leaves(PARAMS), leaves(join(last.params, last.frozen))
    averages = leaves(join(last.ema, last.frozen))
    for path, leaf in before.items():
        n = sizes.get(path, 0)
        n = len(leaf) if n is None else n
        for found in (after[path], averages[path]):
            np.testing.assert_array_equal(found[:n], leaf[:n], err_msg=path)
            rest = found[n:] != leaf[n:]
            assert rest.mean() > 0.5 if rest.size else n == len(leaf), path


def test_the_rest_learns_as_if_the_gradient_were_zero():
    """Training the rest changes it as SGD on all parameters does."""
    objective, _ = make_objective("mlm", CFG)
    schedule = schedules.make_schedule("constant", 0.1, 0, 10)
    make = (objective.sums, objective.weights, {}, optax.sgd(0.1), schedule)
    step, sizes = jax.jit(make_train_step(*make, seed=0)), sizes_of(LOWER, PARAMS)
    part, _ = step(make_state(PARAMS, optax.sgd(0.1), freeze=sizes), make_batch(0))
    whole, _ = step(make_state(PARAMS, optax.sgd(0.1)), make_batch(0))
    expected, _ = split(whole.params, sizes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        part.params,
        expected,
    )


def test_depths_of_rates_count_frozen_layers():
    factors = leaves(layerwise.rate_multipliers(PARAMS, 0.5))
    trained, frozen = split(PARAMS, sizes_of("encoder/layers/.*[:2]", PARAMS))
    found = leaves(layerwise.rate_multipliers(trained, 0.5, frozen=frozen))
    for name, factor in found.items():
        assert np.ravel(factor)[-1] == np.ravel(factors[name])[-1], name
    whole = "encoder/layers/.*"
    trained, frozen = split(PARAMS, sizes_of(whole, PARAMS))
    found = leaves(layerwise.rate_multipliers(trained, 0.5, frozen=frozen))
    assert found == {k: v for k, v in factors.items() if "/layers/" not in k}


@pytest.mark.slow
def test_any_mesh_and_micro_batches():
    objective, _ = make_objective("mlm", CFG)
    batches = [make_batch(i % 2) for i in range(4)]
    # 40 of the table's 64 rows are frozen; each part is sharded separately.
    freeze = "encoder/embeddings/word[:40],encoder/layers/.*[:1]"
    one = make_mesh(devices=jax.devices()[:1])
    rows, params = train_steps(objective, one, batches, freeze=freeze)
    eight = train_steps(objective, make_mesh(2, 2, 2), batches, freeze=freeze)
    parted = train_steps(objective, one, batches, accumulate=4, freeze=freeze)
    for other, found in (eight, parted):
        for a, b in zip(other, rows, strict=True):
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, params
        )

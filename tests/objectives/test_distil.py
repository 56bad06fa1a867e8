# SPDX-License-Identifier: Apache-2.0
"""Distillation of a masked LM: the published losses; padding does not count."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, tiny_encoder, train_steps

from bertjax import UserError
from bertjax.objectives.losses import cosine_distance, kl_divergence
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.teacher import Teacher
from bertjax.parallel.mesh import make_mesh

B, L, P, V = 16, 8, 2, 64
CFG = tiny_encoder(V, L)
DEEP = dataclasses.replace(CFG, num_hidden_layers=2)
NAME = "mlm+distil"
GOLDEN = np.load(ROOT / "tests/testdata/distil_golden.npz")


def make_batch(seed=0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, L + 1, B)[:, None]
    return {
        "input_ids": draw.integers(0, V, (B, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < lengths).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, (B, L)).astype(np.int32),
        "mlm_positions": draw.integers(0, 3, (B, P)).astype(np.int32),
        "mlm_ids": draw.integers(0, V, (B, P)).astype(np.int32),
        "mlm_weights": draw.integers(0, 2, (B, P)).astype(np.float32),
    }


@functools.cache
def make(name=NAME, cfg=CFG, teacher=DEEP):
    """Return (objective, parameters of student and teacher)."""
    objective, _ = make_objective(name, cfg, teacher=teacher and Teacher(teacher))
    params = jax.jit(objective.init)(jax.random.key(0))
    if teacher:
        params["teacher"] = jax.jit(objective.init_teacher)(jax.random.key(5))
    return objective, params


def means(objective, params, batch):
    sums = jax.jit(lambda p, b: objective.sums(p, b, None))(params, batch)
    weights = objective.weights(batch)
    return {term: float(sums[term].value / w) for term, w in weights.items()}


# ---------------------------------------------------------------- the losses
@pytest.mark.parametrize("name", ["kl", "cosine"])
def test_what_torch_has_of_the_same_arrays(name):
    names = (
        ("student", "teacher")
        if name == "kl"
        else (
            "student_hidden",
            "teacher_hidden",
        )
    )
    mine, theirs = (jnp.asarray(GOLDEN[n]) for n in names)
    weights = jnp.asarray(GOLDEN["mask"], jnp.float32)

    def loss(x):
        args = x, theirs, weights
        total = kl_divergence(*args, 2.0) if name == "kl" else cosine_distance(*args)
        return total.value / total.weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(mine)
    assert value == pytest.approx(float(GOLDEN[name]), rel=1e-6)
    np.testing.assert_allclose(gradient, GOLDEN[f"{name}_gradient"], atol=1e-7)


def test_temperature_leaves_gradients_their_size():
    """At large T, T^2 KL has the gradient of the squared differences of logits."""
    draw = np.random.default_rng(0)
    mine, theirs = (jnp.asarray(draw.normal(size=(4, 9)), jnp.float32) for _ in "ab")

    def gradient(t):
        return jax.grad(lambda x: kl_divergence(x, theirs, jnp.ones(4), t).value)(mine)

    centred = [x - x.mean(1, keepdims=True) for x in (mine, theirs)]
    limit = (centred[0] - centred[1]) / 9
    np.testing.assert_allclose(gradient(300.0), limit, rtol=0.02, atol=1e-3)
    sizes = [float(jnp.linalg.norm(gradient(t))) for t in (1.0, 2.0, 8.0)]
    assert max(sizes) / min(sizes) < 2


# ---------------------------------------------------------------- the objective
@pytest.mark.parametrize("limit", [0, 1])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(limit, monkeypatch):
    monkeypatch.setattr("bertjax.objectives.distil.count_chunks", lambda *a: 3)
    cfg = dataclasses.replace(DEEP, max_logits_mb=limit)
    objective, params = make("distil", cfg, cfg)
    twin = {k: v for k, v in params.items() if k != "teacher"}
    batch = make_batch()

    @jax.jit
    @jax.value_and_grad
    def loss(own):
        found = objective.sums({**own, "teacher": twin}, batch, None)
        return sum(found[term].value for term in ("kl_loss", "cosine_loss"))

    value, gradient = loss(twin)
    assert abs(value) < 1e-4
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradient)) < 2e-5
    other = jax.tree.map(
        lambda x: x + np.sin(np.arange(x.size, dtype="f4")).reshape(x.shape) / 10,
        jax.device_get(twin),
    )
    assert loss(other)[0] > 1


def test_teachers_have_no_gradient():
    objective, params = make()
    batch = make_batch()

    def loss(tree):
        return sum(s.value for s in objective.sums(tree, batch, None).values())

    gradient = jax.jit(jax.grad(loss))(params)
    assert not any(jnp.any(g) for g in jax.tree.leaves(gradient["teacher"]["mlm"]))
    assert any(jnp.any(g) for g in jax.tree.leaves(gradient["encoder"]))


def test_padding_counts_for_nothing():
    objective, params = make()
    batch = make_batch()
    padding = batch["attention_mask"] == 0
    other = {**batch, "input_ids": np.where(padding, 9, batch["input_ids"])}
    assert means(objective, params, other) == pytest.approx(
        means(objective, params, batch), rel=1e-6
    )
    weight = objective.weights(batch)["kl_loss"]
    assert weight == objective.weights(batch)["cosine_loss"] == (~padding).sum()
    half = {**batch, "example_weights": np.arange(B) % 2 * np.float32(1)}
    rest = {k: v[1::2] for k, v in batch.items()}
    found, asked = (means(objective, params, b) for b in (half, rest))
    for term in ("kl_loss", "cosine_loss"):
        assert found[term] == pytest.approx(asked[term], rel=1e-5)


def test_pieces_are_the_whole(monkeypatch):
    """Logits computed a few tokens at a time give the same losses and gradients."""
    objective, params = make()
    batch = make_batch()
    batch["mlm_weights"][:] = 0

    def run():
        def loss(own):
            found = objective.sums({**params, **own}, batch, None)
            return found["kl_loss"].value / B

        own = {k: v for k, v in params.items() if k != "teacher"}
        return jax.jit(jax.value_and_grad(loss))(own)

    whole = run()
    monkeypatch.setattr("bertjax.objectives.distil.count_chunks", lambda *a: 3)
    parts = run()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, parts, whole)


def test_padded_vocabularies_are_compared_where_both_have_pieces():
    padded = dataclasses.replace(CFG, vocab_size=V + 8, pieces=V)
    objective, params = make(NAME, padded, DEEP)
    found = means(objective, params, make_batch())
    assert np.isfinite(list(found.values())).all() and 0 < found["kl_loss"] < 10


def test_options_and_widths():
    wide = dataclasses.replace(DEEP, hidden_size=32)
    objective, params = make("mlm+distil:cosine=0", CFG, wide)
    assert set(means(objective, params, make_batch())) == {"mlm_loss", "kl_loss"}
    objective, params = make(NAME, CFG, wide)
    with pytest.raises(UserError, match="32 wide"):
        jax.eval_shape(objective.sums, params, make_batch(), None)
    for wrong in ("temperature=0", "kl=-1", "kl=0,cosine=0"):
        with pytest.raises(UserError, match="distil's"):
            make_objective(f"mlm+distil:{wrong}", CFG)


def test_without_a_teacher_it_is_a_masked_lm():
    """This is the case of trained models: evaluate, fill_mask and others open no
    teacher."""
    bare, params = make(NAME, CFG, None)
    alone, _ = make_objective("mlm", CFG)
    batch = make_batch()
    assert bare.needs_teacher and bare.init_teacher is None
    assert means(bare, params, batch) == means(alone, params, batch)
    assert not alone.needs_teacher


def test_flops_are_the_students_and_a_forward_pass():
    specs = {
        k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in make_batch().items()
    }
    taught, alone = (
        make_objective(n, CFG, teacher=Teacher(DEEP))[0] for n in (NAME, "mlm")
    )
    teacher, _ = make_objective("mlm", DEEP)
    everywhere = 6 * (16 * 16 + 16 * V)
    head = everywhere * P / L
    ours = alone.flops(specs) - head
    theirs = (teacher.flops(specs) - head + everywhere) / 3
    # The last layer is read everywhere; a masked LM reads it only at predictions.
    assert taught.flops(specs) >= ours + head + everywhere + theirs
    assert taught.flops(specs) < 1.5 * (ours + head + everywhere + theirs)


# ---------------------------------------------------------------- on devices
def test_any_mesh_and_micro_batches():
    objective, params = make()
    teacher = jax.device_get(params["teacher"])
    batches = [make_batch(i % 2) for i in range(4)]
    one = make_mesh(devices=jax.devices()[:1])
    rows, last = train_steps(objective, one, batches, teacher=teacher)
    assert rows[3]["train/loss"] < rows[1]["train/loss"]
    jax.tree.map(np.testing.assert_array_equal, last["teacher"], teacher)
    eight = train_steps(objective, make_mesh(2, 2, 2), batches, teacher=teacher)
    parted = train_steps(objective, one, batches, accumulate=4, teacher=teacher)
    for other, found in (eight, parted):
        for a, b in zip(other, rows, strict=True):
            for term in ("loss", "kl_loss", "cosine_loss", "mlm_loss"):
                term = f"train/{term}"
                assert a[term] == pytest.approx(b[term], 2e-5, 1e-6), term
        jax.tree.map(np.testing.assert_array_equal, found["teacher"], teacher)

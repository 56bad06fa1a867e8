# SPDX-License-Identifier: Apache-2.0
"""Heads on an encoder: MLM and NSP, and batches without predictions."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from conftest import tiny_encoder
from made_up import fake_tokenizer

from bertjax import UserError
from bertjax.data.masking.masker import mask_tokens
from bertjax.data.masking.presets import make_masking
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.models import encoder, heads
from bertjax.objectives import mlm, nsp
from bertjax.objectives.base import Head
from bertjax.objectives.combine import combine
from bertjax.objectives.make_objective import make_objective
from bertjax.training.state import make_state
from bertjax.training.step import make_train_step

V, B, L, P = 400, 4, 16, 3
CFG = tiny_encoder(V, L, hidden_size=32, intermediate_size=64)
TOKENIZER = fake_tokenizer(V)


def make_batch(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "input_ids": draw.integers(5, V, (B, L)).astype(np.int32),
        "attention_mask": np.ones((B, L), np.int32),
        "token_type_ids": draw.integers(0, 2, (B, L)).astype(np.int32),
        "mlm_positions": draw.integers(0, L, (B, P)).astype(np.int32),
        "mlm_ids": draw.integers(5, V, (B, P)).astype(np.int32),
        "mlm_weights": np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], "f4"),
        "nsp_labels": draw.integers(0, 2, B).astype(np.int32),
    }


@pytest.fixture(scope="module")
def made():
    objective, cfg = make_objective("mlm+nsp", CFG)
    assert cfg.pooler
    params = jax.jit(objective.init)(jax.random.key(0))
    sums = jax.jit(lambda p, b: objective.sums(p, b, None))
    return SimpleNamespace(objective=objective, cfg=cfg, params=params, sums=sums)


def test_terms_and_weights(made):
    batch = make_batch()
    assert made.objective.needs == {"mlm", "nsp"}
    weights = made.objective.weights(batch)
    assert {k: float(v) for k, v in weights.items()} == {"mlm_loss": 6, "nsp_loss": 4}
    sums = made.sums(made.params, batch)
    assert set(sums) == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    for term, weight in weights.items():
        assert float(sums[term].weight) == float(weight)


def test_untrained_loss_is_that_of_guessing(made):
    sums = made.sums(made.params, make_batch())
    assert float(sums["mlm_loss"].value / 6) == pytest.approx(math.log(V), rel=0.05)
    assert float(sums["nsp_loss"].value / 4) == pytest.approx(math.log(2), rel=0.05)


def test_heads_read_where_they_say(made):
    """A head that reads everywhere does not change what the others read."""
    seen = {}

    def watch(name, reads):
        def sums(params, cfg, encoded, batch, rng):
            seen[name] = getattr(encoded, "pooled" if reads == "nowhere" else "hidden")
            return {}

        return Head(name, lambda rng, cfg: {}, lambda batch: {}, sums, reads)

    batch = make_batch()
    heads = [mlm.make_head(), nsp.make_head()]
    heads += [watch("some", "mlm_positions"), watch("none", "nowhere")]
    few = combine(heads, made.cfg)
    many = combine([*heads, watch("all", "everywhere")], made.cfg)
    assert many.everywhere and not few.everywhere and not made.objective.everywhere
    expected = made.sums(made.params, batch)
    for objective in (few, many):
        found = jax.jit(lambda p, o=objective: (o.sums(p, batch, None), dict(seen)))
        sums, read = found(made.params)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, 1e-5), sums, expected
        )
        assert read["some"].shape == (B, P, 32) and read["none"].shape == (B, 32)
    assert read["all"].shape == (B, L, 32)
    at = batch["mlm_positions"][..., None]
    chosen = np.take_along_axis(np.asarray(read["all"]), at, axis=1)
    np.testing.assert_array_equal(read["some"], chosen)


def test_a_masked_lm_that_reads_everywhere_is_refused(made):
    head = dataclasses.replace(mlm.make_head(), reads="everywhere")
    objective = combine([head], dataclasses.replace(CFG, pooler=False))
    with pytest.raises(ValueError, match='reads="mlm_positions"'):
        jax.eval_shape(objective.sums, made.params, make_batch(), None)


@pytest.mark.parametrize(
    "fields", [{}, {"at": ""}, {"at": "mlm_positions"}, {"reads": frozenset({"mlm"})}]
)
def test_a_head_says_where_it_reads(fields):
    """Heads of version 0.1 have `at`; without `reads`, a head is refused."""
    with pytest.raises(UserError, match="the head own does not say where") as e:
        Head("own", lambda rng, cfg: {}, lambda batch: {}, lambda *_: {}, **fields)
    assert 'reads="nowhere" (at="" before)' in str(e.value) and "\n" not in str(e.value)


def test_sums_add_up_over_rows(made):
    """The sums of a batch are those of its rows; none of them is a mean."""
    batch = make_batch()
    whole = made.sums(made.params, batch)
    rows = [
        made.sums(made.params, {k: v[i : i + 1] for k, v in batch.items()})
        for i in range(B)
    ]
    for term, (value, weight) in whole.items():
        parts = [row[term] for row in rows]
        assert float(value) == pytest.approx(sum(float(p.value) for p in parts), 1e-5)
        assert float(weight) == sum(float(p.weight) for p in parts)


def test_padding_rows_of_evaluation_count_for_nothing(made):
    batch = make_batch()
    batch["example_weights"] = np.array([1, 0, 1, 1], np.float32)
    batch["mlm_weights"] *= batch["example_weights"][:, None]
    other = {k: v.copy() for k, v in batch.items()}
    other["input_ids"][1], other["nsp_labels"][1] = 7, 1 - other["nsp_labels"][1]
    a, b = made.sums(made.params, batch), made.sums(made.params, other)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(x == y), a, b))
    assert float(a["nsp_loss"].weight) == 3


def test_nothing_selected_gives_zero_and_no_gradient():
    objective, cfg = make_objective("mlm", CFG)
    assert not cfg.pooler
    batch = make_batch() | {"mlm_weights": np.zeros((B, P), np.float32)}
    step = make_train_step(
        objective.sums,
        objective.weights,
        objective.coefficients,
        optax.sgd(1.0),
        lambda step: 0.1,
        seed=0,
    )
    state = make_state(objective.init(jax.random.key(0)), optax.sgd(1.0))
    after, metrics = jax.jit(step)(state, batch)
    assert float(metrics["train/loss"]) == float(metrics["train/mlm_loss"]) == 0
    assert float(metrics["optim/grad_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)


def test_the_hidden_token_leaks_into_no_logit(made):
    """Another original token under [MASK] changes only the label."""
    masking = make_masking("bert")
    tables = make_tables(TOKENIZER)
    ids = make_batch()["input_ids"]
    real = np.ones((B, L), np.int32)
    keys = np.arange(B, dtype=np.uint64)
    before = mask_tokens(ids, real, keys, masking, tables, P)._asdict()
    row, slot = np.argwhere(
        (np.take_along_axis(before["input_ids"], before["mlm_positions"], 1) == 4)
        & (before["mlm_weights"] > 0)
    )[0]
    at = before["mlm_positions"][row, slot]
    other = ids.copy()
    other[row, at] = 5 + (ids[row, at] - 4) % (V - 5)
    after = mask_tokens(other, real, keys, masking, tables, P)._asdict()
    assert after["mlm_ids"][row, slot] == other[row, at] != ids[row, at]

    @jax.jit
    def logits(masked):
        batch = dict(make_batch(), **masked)
        params = made.params
        where = batch["mlm_positions"]
        hidden, pooled = encoder.apply(params["encoder"], made.cfg, batch, at=where)
        word = params["encoder"]["embeddings"]["word"]
        return (
            heads.mlm_logits(params["mlm"], word, made.cfg, hidden),
            heads.class_logits(params["nsp"], pooled),
        )

    for a, b in zip(logits(before), logits(after), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name, word",
    [
        ("mlmn", "did you mean 'mlm'"),
        ("mlm+nsq", "did you mean 'nsp'"),
        ("losses", "unknown"),
        ("mlm+mlm", "twice"),
        ("nosuch.module", "no module"),
        ("", "unknown"),
    ],
)
def test_unknown_objectives(name, word):
    with pytest.raises(UserError, match=word):
        make_objective(name, CFG)


def test_tied_embeddings_learn_from_both_ends(made):
    batch = make_batch()

    def loss(params):
        return made.objective.sums(params, batch, None)["mlm_loss"].value

    grads = jax.jit(jax.grad(loss))(made.params)["encoder"]["embeddings"]["word"]
    unseen = np.setdiff1d(np.arange(V), batch["input_ids"])
    # Tokens that do not occur get a gradient from the softmax.
    assert np.abs(np.asarray(grads)[unseen]).min(axis=0).max() > 0


def test_the_key_reaches_the_encoder(made):
    batch = make_batch()
    cfg = dataclasses.replace(CFG, hidden_dropout_prob=0.5)
    sums = jax.jit(make_objective("mlm+nsp", cfg)[0].sums)
    plain = made.sums(made.params, batch)["mlm_loss"].value
    dropped = sums(made.params, batch, jax.random.key(1))["mlm_loss"].value
    assert float(dropped) != pytest.approx(float(plain), rel=1e-6)

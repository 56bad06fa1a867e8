# SPDX-License-Identifier: Apache-2.0
"""Passages found within a step are those that numpy finds, on one and eight devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps

from bertjax import UserError
from bertjax.assembly.train_step import fill_up
from bertjax.models import encoder, nearest
from bertjax.objectives import find_passages
from bertjax.objectives.find_passages import Finder, join_rows
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.feed import place_rows
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding

V, N, P, K, B = 40, 21, 4, 3, 8
Q, R, T = 6, 6, 3
CFG = tiny_encoder(V, 32, initializer_range=0.3)
SIZES = N, 16, P


def make_tables(seed=0):
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(N, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tokens = draw.integers(5, V, (N, P)).astype(np.int32)
    tokens[np.arange(P) >= draw.integers(1, P + 1, N)[:, None]] = -1
    return {"index": vectors, "passages": tokens}


def make_batch(seed=0, rows=B):
    draw = np.random.default_rng(100 + seed)
    size = draw.integers(1, 5, rows)[:, None]
    ids = draw.integers(5, V, (rows, Q))
    at = np.arange(Q)
    ids = np.where(
        at == 0, 2, np.where(at <= size, ids, np.where(at == size + 1, 3, 0))
    )
    mask = at < size + 2
    target = draw.integers(5, V, (rows, T))
    target[:, -1] = 3
    ones = np.ones((rows, T), np.int32)
    end = np.concatenate([np.full((rows, 1), 3), target], axis=1)
    batch = {
        "input_ids": ids, "attention_mask": mask,
        "question_ids": ids, "question_mask": mask,
        "end_ids": end, "end_mask": np.ones_like(end), "lm_ids": target,
    }  # fmt: skip
    batch = {k: v.astype(np.int32) for k, v in batch.items()}
    return batch | {"lm_weights": ones.astype(np.float32)}


@functools.cache
def made(marginal="sequence", n=N, k=K):
    name = f"rag:passages={k},marginal={marginal}"
    objective, cfg = make_objective(name, CFG, candidates=(n, 16, P))
    return objective, cfg, jax.jit(objective.init)(jax.random.key(0))


def vectors_of(params, batch):
    """Return the vectors of questions, computed with the encoder directly."""
    ids, mask = batch["question_ids"], batch["question_mask"]
    own = {"input_ids": ids, "attention_mask": mask}
    cfg = dataclasses.replace(CFG, pooler=False)
    hidden = np.asarray(encoder.apply(params["encoder"], cfg, own).hidden)
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def on_mesh(devices, run, params, tables, batch):
    """Run a function of (params, batch) with tables sharded over devices."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    shapes = fill_up({k: jnp.asarray(v) for k, v in tables.items()}, devices)
    where = batch_sharding(mesh)
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        for name, x in shapes.items()
    }
    placed = place_rows(wanted, tables)
    with jax.set_mesh(mesh):
        fed = next(feed.to_devices(iter([batch]), mesh, [len(batch["input_ids"])]))
        return jax.device_get(jax.jit(run)({**params, "tables": placed}, fed))


# ---------------------------------------------------------------- what is found
@pytest.mark.parametrize("devices", [1, 8])
def test_as_numpy_finds_them(devices, monkeypatch):
    """Search in tiles of two rows. The table's padding is never found, although all
    scores are below 0."""
    monkeypatch.setattr(nearest, "TILE", 2)
    objective, _, params = made()
    batch, tables = make_batch(), make_tables()
    question = vectors_of(params, batch)
    tables["index"] -= 3 * question.mean(0)
    found = on_mesh(devices, objective.find, params, tables, batch)
    scores = question @ tables["index"].T
    assert scores.max() < 0
    best = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    np.testing.assert_array_equal(found["passage_numbers"], best)
    wanted = np.take_along_axis(scores, best, axis=1)
    np.testing.assert_allclose(found["passage_scores"], wanted, atol=1e-5)
    assert found["passage_weights"].min() == 1
    for row in range(B):
        for slot in range(K):
            begin = batch["input_ids"][row][batch["attention_mask"][row] > 0]
            text = tables["passages"][best[row, slot]]
            ids = [*begin, *text[text >= 0], *batch["end_ids"][row]]
            mask = found["attention_mask"][row, slot]
            assert found["input_ids"][row, slot][mask > 0].tolist() == ids
            assert mask.sum() == len(ids) and (mask[: len(ids)] == 1).all()
            at = found["lm_positions"][row, slot]
            after = found["input_ids"][row, slot][at + 1]
            assert after.tolist() == batch["lm_ids"][row].tolist()
            steps = found["attention_steps"][row, slot]
            assert steps[at + 1].tolist() == [1, 2, 3] and steps.sum() == 6


def test_fewer_passages_than_are_asked_for():
    objective, _, params = made(n=2)
    tables = {name: values[:2] for name, values in make_tables().items()}
    found = on_mesh(8, objective.find, params, tables, make_batch())
    assert (found["passage_weights"] == [1, 1, 0]).all()
    assert np.isfinite(found["passage_scores"]).all()
    np.testing.assert_array_equal(
        np.sort(found["passage_numbers"][:, :2]), [[0, 1]] * B
    )
    sums = on_mesh(
        8, lambda p, b: objective.sums(p, b, None), params, tables, make_batch()
    )
    assert np.isfinite(sums["rag_loss"].value)


def test_the_example_of_joined_rows():
    batch = {
        "input_ids": [[1, 7, 2]], "attention_mask": [[1, 1, 1]],
        "end_ids": [[2, 5, 2]], "end_mask": [[1, 1, 1]],
    }  # fmt: skip
    batch = {name: jnp.array(rows) for name, rows in batch.items()}
    found = join_rows(batch, jnp.array([[[8, 9], [6, -1]]]))
    assert found["input_ids"].tolist() == [
        [[1, 7, 2, 8, 9, 2, 5, 2], [1, 7, 2, 6, 2, 5, 2, 0]]
    ]
    assert found["attention_steps"].tolist() == [
        [[0, 0, 0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 1, 2, 0]]
    ]
    assert found["lm_positions"].tolist() == [[[5, 6], [4, 5]]]


# ---------------------------------------------------------------- losses, gradients
@pytest.mark.parametrize(
    "marginal", ["sequence", pytest.param("token", marks=pytest.mark.slow)]
)
def test_the_loss_is_that_of_rows_which_have_their_passages(marginal):
    objective, cfg, params = made(marginal)
    plain, _ = make_objective(f"rag:passages={K},marginal={marginal}", CFG)
    batch, tables = make_batch(), make_tables()
    found = on_mesh(1, objective.find, params, tables, batch)

    def scored(params, batch):  # with given passages and scores
        return plain.sums(params, batch, None)["rag_loss"].value

    def searched(params, batch):
        return objective.sums(params, batch, None)["rag_loss"].value

    own = {k: jnp.array(v) for k, v in found.items() if k != "passage_numbers"}
    want = float(jax.jit(scored)(params, own))
    assert float(on_mesh(8, searched, params, tables, batch)) == pytest.approx(
        want, 1e-5
    )

    # The gradient is the sum of that through the rows and that through the scores.
    def through(params, batch):
        question = find_passages.question_vectors(
            params, cfg, batch, Finder(K, *SIZES, False, True), None
        )
        vectors = tables["index"][found["passage_numbers"]]
        scores = jnp.einsum("bd,bkd->bk", question, vectors)
        return scored(params, {**own, "passage_scores": scores})

    def gradient(params, batch):
        rest = {k: v for k, v in params.items() if k != "tables"}
        fixed = {k: v for k, v in params.items() if k == "tables"}
        return jax.grad(lambda p: searched({**p, **fixed}, batch))(rest)

    wanted = jax.jit(jax.grad(through))(params, batch)
    got = on_mesh(8, gradient, params, tables, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got, wanted)
    frozen = jax.jit(jax.grad(scored))(params, own)
    word = [x["encoder"]["embeddings"]["word"] for x in (wanted, frozen)]
    assert np.abs(word[0] - word[1]).max() > 1e-2  # the scores contribute


def test_training_through_tables_and_other_tables():
    """The target of a question is in one passage: retriever and generator are trained
    together. Other tables give other answers."""
    objective, _, params = made()
    tables = make_tables()
    mesh = make_mesh()
    batches = [make_batch(seed % 2) for seed in range(12)]
    rows, params = train_steps(objective, mesh, batches, tables=tables)
    alone = make_mesh(devices=jax.devices()[:1])
    other, _ = train_steps(objective, alone, batches, tables=tables)
    for a, b in zip(rows, other, strict=True):
        assert a["train/rag_loss"] == pytest.approx(b["train/rag_loss"], rel=1e-4)
    assert rows[-1]["train/rag_loss"] < rows[0]["train/rag_loss"]
    params.pop("tables")
    run = lambda p, b: objective.evaluate(p, b)[1]  # noqa: E731
    one, two = (on_mesh(1, run, params, make_tables(s), make_batch()) for s in (0, 1))
    assert (one["passage_numbers"] != two["passage_numbers"]).any()
    assert (one["nats"] != two["nats"]).all()


def test_a_causal_model_is_refused():
    with pytest.raises(UserError, match="needs an encoder for the questions"):
        make_objective(
            "rag", dataclasses.replace(CFG, is_decoder=True), candidates=SIZES
        )


def test_no_device_gets_the_whole_table():
    """Devices exchange only questions and the passages that were found."""
    mesh, n = make_mesh(), 4096
    shapes = {"index": ((n, 16), "float32"), "passages": ((n, P), "int32")}
    tables = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh))
        for name, (shape, dtype) in shapes.items()
    }
    objective, _, params = made(n=n)
    with jax.set_mesh(mesh):
        run = jax.jit(objective.find)
        text = run.lower({**params, "tables": tables}, make_batch()).compile().as_text()
    told = [
        x for x in text.splitlines() if re.search(r"= \S+ all-(gather|reduce)\(", x)
    ]
    sizes = [re.search(r"\[([\d,]*)\]", line)[1].split(",") for line in told]
    assert told and max(int(size[0] or 1) for size in sizes) < n / 8

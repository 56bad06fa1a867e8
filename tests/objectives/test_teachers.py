# SPDX-License-Identifier: Apache-2.0
"""Tasks with a finetuned teacher, and the relations of MiniLM."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ENCODERS, ROOT, tiny_encoder, train_steps

from bertjax import UserError
from bertjax.models.config import SKIPS
from bertjax.objectives import minilm
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.teacher import Teacher
from bertjax.parallel.mesh import make_mesh

B, L, V, S = 8, 8, 32, 3
CFG = tiny_encoder(V, L)
WIDE = dataclasses.replace(
    CFG, num_hidden_layers=2, hidden_size=24, num_attention_heads=4
)
TASKS = {
    "classify:classes=3": "BC",
    "tag:classes=3": "BLC",
    "span": "BL",
    "retrieve": 0,
}
GOLDEN = np.load(ROOT / "tests/testdata/distil_golden.npz")


def make_batch(name):
    """Make rows of a task; rows of retrieve have a query and two passages each."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(4, L + 1, B)[:, None]
    real = (np.arange(L) < lengths).astype(np.int32)
    batch = {
        "input_ids": draw.integers(0, V, (B, L)).astype(np.int32),
        "attention_mask": real,
        "token_type_ids": draw.integers(0, 2, (B, L)).astype(np.int32),
    }
    kind = name.partition(":")[0]
    if kind == "classify":
        batch["labels"] = draw.integers(0, 3, B).astype(np.int32)
    if kind == "tag":
        batch["labels"] = draw.integers(0, 3, (B, L)).astype(np.int32)
        words = real * draw.integers(0, 2, (B, L))
        batch["label_weights"] = words.astype(np.float32)
    if kind == "span":
        for end in ("start_positions", "end_positions"):
            batch[end] = draw.integers(0, 4, B).astype(np.int32)
    if kind == "retrieve":
        batch["segment_ids"] = real * np.array([1, 1, 2, 2, 3, 3, 3, 3], np.int32)
        batch["position_ids"] = np.tile(
            np.array([0, 1, 0, 1, 0, 1, 2, 3], np.int32), (B, 1)
        )
        batch["cls_positions"] = np.tile(np.array([0, 2, 4], np.int32), (B, 1))
        batch["passage_numbers"] = np.arange(2 * B, dtype=np.int32).reshape(B, 2) % 13
        batch["relevant_numbers"] = batch["passage_numbers"][:, :1]
    return batch


@functools.cache
def make(name, cfg=CFG, teacher=WIDE):
    """Return (objective, parameters of student and teacher)."""
    objective, _ = make_objective(name, cfg, teacher=teacher and Teacher(teacher))
    init = jax.jit(objective.init)
    params = init(jax.random.key(0))
    if teacher:
        params["teacher"] = jax.jit(objective.init_teacher)(jax.random.key(5))
    return objective, params


def values(objective, params, batch):
    sums = jax.jit(lambda p, b: objective.sums(p, b, None))(params, batch)
    return {k: float(sums[k].value / w) for k, w in objective.weights(batch).items()}


def twin(name, cfg):
    """Return an objective whose teacher has the student's config, and the student's
    parameters."""
    objective, params = make(name, cfg, cfg)
    own = {k: v for k, v in params.items() if k != "teacher"}
    return objective, own


# ---------------------------------------------------------------- tasks
@pytest.mark.parametrize("name", TASKS)
def test_a_task_learns_of_its_labels_and_its_teacher(name):
    objective, params = make(name)
    kind, batch = name.partition(":")[0], make_batch(name)
    found = values(objective, params, batch)
    assert set(found) == {f"{kind}_loss", f"{kind}_kl_loss"}
    assert objective.coefficients == {f"{kind}_loss": 0.5, f"{kind}_kl_loss": 0.5}
    alone, bare = make(name, CFG, None)
    assert values(alone, bare, batch)[f"{kind}_loss"] == found[f"{kind}_loss"]
    assert not alone.coefficients and alone.init_teacher is None
    # The outputs of an evaluation are the student's.
    outputs = jax.jit(objective.evaluate)(params, batch)[1]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5),
        outputs,
        jax.jit(alone.evaluate)(bare, batch)[1],
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_twin_of_the_teacher_has_only_labels_to_learn(name):
    objective, own = twin(name, CFG)
    kind, batch = name.partition(":")[0], make_batch(name)

    @jax.jit
    @jax.value_and_grad
    def loss(tree):
        found = objective.sums({**tree, "teacher": own}, batch, None)
        return found[f"{kind}_kl_loss"].value

    value, gradient = loss(own)
    assert abs(value) < 1e-5
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-4


def test_options_of_soft_labels():
    name = "classify:classes=3,teacher_weight=0.9,teacher_temperature=1"
    assert make(name)[0].coefficients["classify_kl_loss"] == 0.9
    batch = make_batch("classify")
    cold, hot = (
        values(*make(f"classify:classes=3,teacher_temperature={t}"), batch)
        for t in (1, 4)
    )
    assert cold["classify_loss"] == hot["classify_loss"]
    assert cold["classify_kl_loss"] != hot["classify_kl_loss"]
    with pytest.raises(UserError, match="teacher_weight=2"):
        make_objective("span:teacher_weight=2", CFG)


# ---------------------------------------------------------------- MiniLM
def test_relations_of_the_papers():
    mine, theirs = (jnp.asarray(GOLDEN[f"{n}_vectors"]) for n in ("student", "teacher"))
    batch = {"attention_mask": jnp.asarray(GOLDEN["mask"], jnp.int32)}
    batch["input_ids"] = batch["attention_mask"]
    found = minilm.relation_divergence([mine] * 2, [theirs] * 2, 2, batch)
    mean = found.value / found.weight
    assert float(mean) == pytest.approx(float(GOLDEN["relation"]), rel=1e-5)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_twin_has_the_teachers_relations(kind):
    cfg = dataclasses.replace(CFG, num_hidden_layers=2, **ENCODERS[kind])
    name = "minilm:attention=1"
    objective, own = twin(name, cfg)
    batch = make_batch("minilm")

    @jax.jit
    @jax.value_and_grad
    def loss(tree):
        found = objective.sums({**tree, "teacher": own}, batch, None)
        return sum(term.value for term in found.values())

    value, gradient = loss(own)
    assert abs(value) < 1e-5
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-4
    assert len(objective.weights(batch)) == 4


@pytest.mark.parametrize("layer", [3, 4])
@pytest.mark.parametrize("skip", SKIPS)
def test_relations_have_what_a_layer_reads_of_earlier_ones(skip, layer):
    cfg = dataclasses.replace(CFG, num_hidden_layers=4, **{skip: True})
    objective, own = twin(f"minilm:layer={layer}", cfg)
    batch = make_batch("minilm")

    def relations(teacher):
        return sum(values(objective, {**own, "teacher": teacher}, batch).values())

    layers = own["encoder"]["layers"]
    name = "early" if skip == "unet_skips" else "first"
    scalars = layers[skip][name].at[layer - 5].add(1.0)  # only this layer's
    layers = {**layers, skip: {**layers[skip], name: scalars}}
    other = {"encoder": {**own["encoder"], "layers": layers}}
    assert abs(relations(other) - relations(own)) > 1e-5


def test_relations_by_the_layers_own_products():
    """Compute the first layer's relations by hand, from the embeddings."""
    from bertjax.models.embeddings import embed

    objective, params = make("minilm:keys=0,values=0,layer=1,heads=4")
    # Drawn weights give relations that hardly differ, and f32 rounds that difference.
    params = jax.tree.map(lambda leaf: 5 * leaf, params)
    batch = make_batch("minilm")
    models = (params["encoder"], CFG), (params["teacher"]["encoder"], WIDE)
    logs = []
    for tree, cfg in models:
        x = jax.jit(embed, static_argnums=1)(tree["embeddings"], cfg, batch)
        x = np.asarray(x, np.float64)
        query = jax.tree.map(lambda leaf: leaf[0], tree["layers"]["attention"]["query"])
        q = x @ np.reshape(query["kernel"], (x.shape[-1], -1)) + np.ravel(query["bias"])
        q = q.reshape(B, L, 4, -1)
        scores = np.einsum("bqhd,bkhd->bhqk", q, q) / q.shape[-1] ** 0.5
        scores -= 1e9 * (1 - batch["attention_mask"][:, None, None])
        scores -= scores.max(-1, keepdims=True)
        logs.append(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
    each = (np.exp(logs[1]) * (logs[1] - logs[0])).sum(-1).mean(1)
    real = batch["attention_mask"]
    expected = (each * real).sum() / real.sum()
    found = values(objective, params, batch)
    assert found == {"query_relation_loss": pytest.approx(expected, rel=1e-5)}


def test_padding_and_neighbours_count_for_nothing():
    objective, params = make("minilm")
    batch = make_batch("retrieve")
    found = values(objective, params, batch)
    number = batch["segment_ids"]
    for changed, is_same in ((number == 0, True), (number == 3, False)):
        ids = np.where(changed, 7, batch["input_ids"])
        other = values(objective, params, {**batch, "input_ids": ids})
        assert (other == pytest.approx(found, rel=1e-6)) == is_same
    # A sequence alone is the same as packed with others.
    third = number == 3
    alone = {**batch, "attention_mask": third.astype(np.int32)}
    alone["segment_ids"] = np.where(third, 1, 0).astype(np.int32)
    beside = {**batch, "input_ids": np.where(third, batch["input_ids"], 9)}
    beside["attention_mask"] = alone["attention_mask"]
    beside["segment_ids"] = np.where(third, 3, 0).astype(np.int32)
    one, two = (values(objective, params, b) for b in (alone, beside))
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    "name, words",
    [
        ("minilm:layer=3", "the teacher has 2 layers"),
        ("minilm:queries=0,keys=0,values=0", "some weight more"),
        ("minilm:keys=-1", "0 or more"),
    ],
)
def test_what_minilm_cannot_be(name, words):
    with pytest.raises(UserError, match=words):
        make_objective(name, CFG, teacher=Teacher(WIDE))


def test_heads_divide_both_widths():
    objective, params = make("minilm:heads=6")
    with pytest.raises(UserError, match="heads=6 does not divide vectors of 16"):
        jax.eval_shape(objective.sums, params, make_batch("minilm"), None)


def test_it_goes_beside_a_masked_lm():
    """A masked LM computes its last layer only at predictions; minilm reads that
    layer's input."""
    objective, params = make("mlm+minilm")
    batch = make_batch("minilm")
    batch |= {
        "mlm_positions": np.ones((B, 2), np.int32),
        "mlm_ids": np.ones((B, 2), np.int32),
        "mlm_weights": np.ones((B, 2), np.float32),
    }
    both = values(objective, params, batch)
    own, alone = make("minilm")
    rest = {**alone, "encoder": params["encoder"], "teacher": params["teacher"]}
    for term, value in values(own, rest, batch).items():
        assert both[term] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "classify:classes=3"])
def test_any_mesh_and_micro_batches(name):
    objective, params = make(name)
    teacher, batches = jax.device_get(params["teacher"]), [make_batch(name)] * 3
    one = make_mesh(devices=jax.devices()[:1])
    rows, _ = train_steps(objective, one, batches, teacher=teacher)
    eight = train_steps(objective, make_mesh(4, 1, 2), batches, teacher=teacher)
    parted = train_steps(objective, one, batches, accumulate=2, teacher=teacher)
    for other, found in (eight, parted):
        for a, b in zip(other, rows, strict=True):
            assert a["train/loss"] == pytest.approx(b["train/loss"], 1e-4, 1e-6)
        jax.tree.map(np.testing.assert_array_equal, found["teacher"], teacher)

# SPDX-License-Identifier: Apache-2.0
"""Masked words and regions in one encoder: what they see, and how losses add up."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps
from region_data import V, make_batches, make_rows, read, write

from bertjax import UserError
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh
from bertjax.tasks.types.regions import head_options

L, R, B = 12, 8, 32
CFG = tiny_encoder(V, L, num_hidden_layers=2, initializer_range=0.2, pooler=False)
NAME = f"regions:regions={R},masked=2,features=5,classes=4"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("regions") / "rows.jsonl", make_rows(100))


def batch_of(table, step=0, batch_size=B, **keys):
    keys = {"max_regions": R, "region_mask_rate": 0.25} | keys
    return make_batches(*read(table, **keys), batch_size=batch_size).batch(step)


@pytest.fixture(scope="module")
def batch(table):
    return batch_of(table)


@functools.lru_cache(maxsize=4)
def model(name=NAME, **change):
    """Return (parameters, evaluate): once for the tests of this file."""
    objective, _ = make_objective(name, dataclasses.replace(CFG, **change))
    params = jax.jit(objective.init)(jax.random.key(0))
    return params, jax.jit(objective.evaluate), objective


def means(batch, **how):
    params, evaluate, objective = model(**how)
    terms, _ = evaluate(params, batch)
    losses = objective.weights(batch)
    return {k: float(v.value / losses.get(k, v.weight)) for k, v in terms.items()}


def hidden_of(params, batch):
    """Return the hidden states of masked regions, which the region head reads."""
    from bertjax.objectives import regions

    at = L + batch["region_positions"]
    return regions.encode(params, CFG, batch, None, at)


def test_the_arrays_of_a_batch_are_those_that_are_made_up(batch):
    text = {"input_ids", "attention_mask", "token_type_ids"}
    text |= {"mlm_positions", "mlm_ids", "mlm_weights"}
    made = model()[2].labels(B, L)
    assert made.keys() == batch.keys() - text
    for name, spec in made.items():
        assert (spec.shape, spec.dtype) == (batch[name].shape, batch[name].dtype), name


def test_nothing_tells_a_masked_region(table, batch):
    """Another feature and class of a masked region in the file change no prediction."""
    batches = make_batches(
        *read(table, max_regions=R, region_mask_rate=0.25), batch_size=B
    )
    gathered = batches.gathered(0)
    arrays = {name: x.copy() for name, x in gathered.arrays.items()}
    row, slot = np.nonzero(batch["region_weights"])
    assert len(row) >= 5
    at = batch["region_positions"][row, slot]
    arrays["region_features"][row, at] += 3.0
    arrays["region_classes"][row, at] = (arrays["region_classes"][row, at] + 1) % 4
    other = batches.features.make(gathered._replace(arrays=arrays))
    changed = {k for k in batch if not np.array_equal(batch[k], other[k])}
    assert changed == {"region_targets", "region_classes"}
    params, evaluate, _ = model()
    hide = jax.jit(hidden_of)
    assert (hide(params, batch) == hide(params, other)).all()
    first, again = evaluate(params, batch)[1], evaluate(params, other)[1]
    assert all((first[name] == again[name]).all() for name in first)
    # Boxes and features of visible regions do change predictions.
    for name in ("region_boxes", "region_features"):
        moved = batch[name].copy()
        moved[batch["region_mask"] > 0] += 0.3
        assert (hide(params, {**batch, name: moved}) != hide(params, batch)).any()
    ids = np.where(batch["input_ids"] > 4, 5, batch["input_ids"])
    found = hide(params, {**batch, "input_ids": ids}) != hide(params, batch)
    assert np.asarray(found)[row, slot].any(axis=-1).all()


def test_words_see_regions_unless_they_are_hidden(table, batch):
    params, evaluate, _ = model()
    moved = {**batch, "region_features": batch["region_features"] + 1.0}
    is_word = batch["mlm_weights"] > 0

    def nats(rows):
        return np.asarray(evaluate(params, rows)[1]["word_nats"])[is_word]

    assert (nats(batch) != nats(moved)).mean() > 0.9
    blind = batch_of(table, hide_regions=True)
    moved = {**blind, "region_features": blind["region_features"] + 1.0}
    assert (blind["mlm_weights"] == batch["mlm_weights"]).all()
    assert (nats(blind) == nats(moved)).all()


def test_all_padding_is_at_the_end_of_a_row(batch, monkeypatch):
    """cuDNN's attention needs it; and a region is seen by its own row alone."""
    from bertjax.models import encoder

    params, evaluate, objective = model()
    masks, apply = [], encoder.apply

    def spy(params, cfg, rows, *others):
        masks.append(rows["attention_mask"])
        return apply(params, cfg, rows, *others)

    monkeypatch.setattr(encoder, "apply", spy)
    objective.evaluate(params, batch)
    (mask,) = np.asarray(masks)
    texts, regions = batch["attention_mask"].sum(1), batch["region_mask"].sum(1)
    assert texts.min() < L and regions.min() < R
    assert (mask == (np.arange(L + R) < (texts + regions)[:, None])).all()
    first = evaluate(params, batch)[1]["alignment_logits"]
    for name in ("region_features", "region_boxes"):
        moved = batch[name].copy()
        moved[3, 0] += 0.3
        again = evaluate(params, {**batch, name: moved})[1]["alignment_logits"]
        changed = np.asarray(first != again).any(axis=1)
        assert changed.nonzero()[0].tolist() == [3]


def test_room_for_more_regions_changes_no_loss(table, batch):
    wide = batch_of(table, max_regions=3 * R)
    assert wide["region_features"].shape[1] == 3 * R
    few, many = means(batch), means(wide)
    assert few.keys() == many.keys() and len(few) == 7
    for name in few:
        assert few[name] == pytest.approx(many[name], rel=2e-5), name
    # Features in padding have no effect.
    filled = {**batch, "region_features": batch["region_features"].copy()}
    filled["region_features"][batch["region_mask"] == 0] = 9.0
    for name, value in means(filled).items():
        assert value == pytest.approx(few[name], rel=2e-5), name


def test_losses_are_means_over_what_is_masked(batch):
    params, evaluate, _ = model()
    terms, outputs = evaluate(params, batch)
    weights, nats = (
        np.asarray(outputs["word_weights"]),
        np.asarray(outputs["word_nats"]),
    )
    assert terms["mlm_loss"].value == pytest.approx((weights * nats).sum(), rel=1e-5)
    hidden = hidden_of(params, batch)
    found = means(batch)
    x = np.asarray(hidden, np.float64)
    own = jax.tree.map(np.asarray, params["regions"])
    x = x @ own["transform"]["kernel"] + own["transform"]["bias"]
    x = np.asarray(jax.nn.gelu(x, approximate=False), np.float64)
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + CFG.layer_norm_eps)
    guess = x @ own["to_features"]["kernel"] + own["to_features"]["bias"]
    weights = batch["region_weights"]
    square = ((guess - batch["region_targets"]) ** 2).mean(-1)
    mean = (weights * square).sum() / weights.sum()
    assert found["region_feature_loss"] == pytest.approx(mean, rel=1e-4)
    logits = x @ own["to_classes"]["kernel"] + own["to_classes"]["bias"]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    true = np.take_along_axis(log_p, batch["region_classes"][..., None], -1)[..., 0]
    mean = -(weights * true).sum() / weights.sum()
    assert found["region_class_loss"] == pytest.approx(mean, rel=1e-4)
    # One-hot probabilities give the same loss, by the KL divergence.
    soft = np.eye(4, dtype=np.float32)[batch["region_classes"]]
    for name, value in means({**batch, "region_classes": soft}).items():
        assert value == pytest.approx(found[name], rel=1e-4), name


def test_nothing_masked_has_no_loss_and_no_gradient(table):
    blind = batch_of(table, hide_regions=True)
    blind["mlm_weights"] *= 0
    params, _, objective = model()
    weights = objective.weights(blind)
    assert not any(float(weight) for weight in weights.values())

    def total(params):
        terms = objective.sums(params, blind, None)
        return sum(terms[name].value for name in weights)

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert value == 0 and not any(x.any() for x in jax.tree.leaves(gradient))


def test_terms_are_of_what_rows_are_about(table):
    keys = dict(region_mixture="words=1", region_mask_rate=0.25, max_regions=R)
    config, _ = read(table, **keys)
    kinds = head_options(config.task, ())["kinds"]
    of_words = batch_of(table, **keys)
    terms = means(of_words, name=f"{NAME},kinds={kinds}")
    assert terms.keys() == {"mlm_loss", "mlm_accuracy"}
    objective = model(f"{NAME},kinds=regions/pairs")[2]
    wanted = {"region_feature_loss", "region_class_loss", "alignment_loss"}
    assert objective.weights(of_words).keys() == wanted


@pytest.fixture(scope="module")
def steps(table):
    """Return a function that trains two steps: (mesh, micro-batches) -> (rows of
    metrics, parameters)."""
    batches = [batch_of(table, step, 16) for step in range(2)]
    return functools.partial(train_steps, model()[2], batches=batches)


@pytest.fixture(scope="module")
def one_device(steps):
    return steps(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    "mesh, parts", [((2, 2, 2), 1), pytest.param((1, 1, 1), 4, marks=pytest.mark.slow)]
)
def test_eight_devices_and_micro_batches_are_one_device(steps, one_device, mesh, parts):
    devices = jax.devices()[: int(np.prod(mesh))]
    got = steps(make_mesh(*mesh, devices=devices), accumulate=parts)
    for row, expected in zip(got[0], one_device[0], strict=True):
        for name, value in expected.items():
            if name.startswith("train/"):
                assert row[name] == pytest.approx(value, rel=2e-5), name
    flat = [
        np.concatenate([x.ravel() for x in jax.tree.leaves(run[1])])
        for run in (got, one_device)
    ]
    assert np.linalg.norm(flat[0] - flat[1]) < 2e-5 * np.linalg.norm(flat[1])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(is_decoder=True), "objective=regions is of encoders"),
        (dict(type_vocab_size=1), "model.type_vocab_size=1 leaves words and regions"),
    ],
)
def test_encoders_that_cannot(change, message):
    with pytest.raises(UserError, match=message):
        make_objective(NAME, dataclasses.replace(CFG, **change))


def test_flops_grow_with_the_regions(table):
    specs = make_batches(*read(table, max_regions=R, region_mask_rate=0.25)).specs
    wide = make_batches(*read(table, max_regions=3 * R, region_mask_rate=0.25)).specs
    count = model()[2].flops
    assert 1.4 < count(wide) / count(specs) < 3

# SPDX-License-Identifier: Apache-2.0
"""Only targets are trained on, and no prediction sees later tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from text_pairs import (
    CFG,
    L,
    Specials,
    T,
    V,
    batch_of,
    model_of,
    rows,
)

from bertjax.models import encoder, heads
from bertjax.objectives import denoise
from bertjax.objectives.make_objective import make_objective

IN_ROW = "prefix", "causal"
places = pytest.mark.parametrize("place", IN_ROW)


@places
def test_the_loss_is_that_of_targets(place):
    """Compute by hand, from logits everywhere, the loss of the targets' tokens."""
    model, batch = model_of(place), batch_of(place)
    params, cfg = model.params, model.cfg

    @jax.jit
    def run(params):
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        word = params["encoder"]["embeddings"]["word"]
        return heads.mlm_logits(params["mlm"], word, cfg, hidden)

    logits = np.asarray(run(params), np.float64)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    texts, targets = rows(place).texts[0], rows(place).targets
    costs, right = [], []
    for i in range(4):
        at = len(texts[i]) + 1
        for k, token in enumerate([*targets[i], Specials.sep_id]):
            costs.append((i, -likely[i, at + k, token]))
            right.append(likely[i, at + k].argmax() == token)
    sums, outputs = model.evaluate(params, batch)
    total = sum(cost for _, cost in costs)
    np.testing.assert_allclose(sums["lm_loss"].value, total, rtol=1e-5)
    assert sums["lm_loss"].weight == len(costs) == 4 + 2 + 1 + 5 + 4
    assert model.objective.weights(batch)["lm_loss"] == len(costs)
    np.testing.assert_allclose(sums["lm_accuracy"].value, sum(right))
    each = [sum(c for i, c in costs if i == row) for row in range(4)]
    np.testing.assert_allclose(outputs["nats"], each, rtol=1e-5)
    assert outputs["right"].sum() == sum(right)


@places
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_token_changes_no_earlier_prediction(place, dtype):
    model = model_of(place, dataclasses.replace(CFG, dtype=dtype))
    params, batch, log_p = model.params, batch_of(place), model.log_p
    before = log_p(params, batch)
    # The third token of row 0's target, which predicts the fourth.
    at = int(batch["lm_positions"][0, 3])
    ids = batch["input_ids"].copy()
    ids[0, at] = 5 + (ids[0, at] - 4) % (V - 5)
    after = log_p(params, {**batch, "input_ids": ids})
    assert (before[0, :3] == after[0, :3]).all() and (before[1:] == after[1:]).all()
    assert (before[0, 3:5] != after[0, 3:5]).all()
    # Every token of the text affects all of its target.
    ids = batch["input_ids"].copy()
    ids[0, 2] = 5 + (ids[0, 2] - 4) % (V - 5)
    after = log_p(params, {**batch, "input_ids": ids})
    assert (before[0, :5] != after[0, :5]).all() and (before[1:] == after[1:]).all()


def test_the_text_sees_all_of_itself_unless_it_is_causal():
    moved = {}
    for place in IN_ROW:
        batch = batch_of(place)
        model = model_of(place)
        ids = batch["input_ids"].copy()
        ids[0, 3] = 5 + (ids[0, 3] - 4) % (V - 5)  # the last token of the text
        run = jax.jit(
            functools.partial(encoder.apply, model.params["encoder"], model.cfg)
        )
        pair = (
            run({**batch, "input_ids": x}).hidden[0, 0]
            for x in (batch["input_ids"], ids)
        )
        moved[place] = not np.array_equal(*pair)
    assert moved == {"prefix": True, "causal": False}


def test_rows_that_fill_up_count_nothing():
    model, batch = model_of("prefix"), batch_of()
    params, objective = model.params, model.objective
    batch["example_weights"] = np.float32([1, 1, 0, 0])
    sums, _ = model.evaluate(params, batch)
    two = {name: values[:2] for name, values in batch.items()}
    alone, _ = model.evaluate(params, two)
    assert sums["lm_loss"].weight == 8
    assert objective.weights(batch)["lm_loss"] == 8
    np.testing.assert_allclose(sums["lm_loss"].value, alone["lm_loss"].value, rtol=1e-5)


def test_made_up_batches_have_the_arrays_of_rows():
    for place in IN_ROW:
        batch = batch_of(place)
        name, cfg = f"seq2seq:target_length={T}", model_of(place).cfg
        made = make_objective(name, cfg)[0].labels(4, L)
        tokens = {"input_ids", "attention_mask"}
        assert made.keys() == batch.keys() - tokens
        for name, spec in made.items():
            assert (spec.shape, spec.dtype) == (batch[name].shape, batch[name].dtype)


def test_a_decoder_learns_targets_as_it_denoises():
    model, batch = model_of("decoder"), batch_of("decoder")
    params, log_p = model.params, model.log_p
    sums, outputs = model.evaluate(params, batch)
    theirs = jax.jit(lambda p, b: denoise.sums(model.cfg, 0, p, b, None))(params, batch)
    np.testing.assert_allclose(sums["lm_loss"], theirs["denoise_loss"], rtol=1e-6)
    assert sums["lm_loss"].weight == 4 + 2 + 1 + 5 + 2 * 4
    np.testing.assert_allclose(outputs["nats"].sum(), sums["lm_loss"].value, rtol=1e-5)
    before = log_p(params, batch)
    ids = batch["decoder_input_ids"].copy()
    ids[0, 3] = 20
    after = log_p(params, {**batch, "decoder_input_ids": ids})
    assert (before[0, :3] == after[0, :3]).all() and (before[1:] == after[1:]).all()
    assert (before[0, 3:5] != after[0, 3:5]).all()
    ids = batch["input_ids"].copy()
    ids[0, 3] = 20 + (ids[0, 3] == 20)
    after = log_p(params, {**batch, "input_ids": ids})
    assert (before[0, :5] != after[0, :5]).all() and (before[1:] == after[1:]).all()
    made = model.objective.labels(4, L)
    assert {"decoder_input_ids", "lm_ids", "lm_weights"} == made.keys()

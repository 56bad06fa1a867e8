# SPDX-License-Identifier: Apache-2.0
"""Targets alone are learnt, and nothing is told of what comes later."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.tasks.task_rows import Form, Ragged, Targets
from bertjax.tasks.types.seq2seq import Sequences

V, L, T = 40, 16, 5
CFG = EncoderConfig(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=L,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
PLACES = "prefix", "causal"
places = pytest.mark.parametrize("place", PLACES)


class Specials:
    pad_id, cls_id, sep_id = 0, 2, 3


def rows(place="prefix", labelled=True):
    """4 examples of texts and targets of unlike lengths."""
    draw = np.random.default_rng(0)
    texts, targets = (
        Ragged.of([draw.integers(5, V, n).tolist() for n in sizes])
        for sizes in ((3, 8, 5, 1), (4, 2, 1, 5))
    )
    form = Form(("a",), "b", (), 1, ("perplexity",), targets=Targets(T, place))
    more = dict(targets=targets, first=np.arange(5)) if labelled else {}
    return Sequences(form, np.zeros(V, np.int64), (texts,), **more).plan(L)


def batch_of(place="prefix", **changes):
    return rows(place).gather(np.arange(4), None, Specials) | changes


def objective_of(place, cfg=CFG):
    cfg = dataclasses.replace(cfg, is_decoder=place == "causal")
    return make_objective("seq2seq", cfg)[0]


def parameters(objective):
    """Larger than they are drawn, so that what is seen is felt."""
    params = objective.init(jax.random.key(0))
    return jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)


def log_p(objective, params, batch):
    """ln p of every target token, f32 [B, T + 1], by the gradient of its weight."""

    def loss(weights):
        terms = objective.sums(params, {**batch, "lm_weights": weights}, None)
        return -terms["lm_loss"].value

    return np.asarray(jax.grad(loss)(jnp.ones_like(batch["lm_weights"])))


@places
def test_the_loss_is_that_of_targets(place):
    """By hand: the logits everywhere, and the targets' tokens taken from them."""
    from bertjax.models import encoder, heads

    objective, batch = objective_of(place), batch_of(place)
    params = parameters(objective)
    cfg = dataclasses.replace(CFG, is_decoder=place == "causal", pooler=False)
    hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    word = params["encoder"]["embeddings"]["word"]
    logits = np.asarray(heads.mlm_logits(params["mlm"], word, cfg, hidden), np.float64)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    texts, targets = rows(place).texts[0], rows(place).targets
    costs, right = [], []
    for i in range(4):
        at = len(texts[i]) + 1
        for k, token in enumerate([*targets[i], Specials.sep_id]):
            costs.append((i, -likely[i, at + k, token]))
            right.append(likely[i, at + k].argmax() == token)
    sums, outputs = objective.evaluate(params, batch)
    total = sum(cost for _, cost in costs)
    np.testing.assert_allclose(sums["lm_loss"].value, total, rtol=1e-5)
    assert sums["lm_loss"].weight == len(costs) == 4 + 2 + 1 + 5 + 4
    assert objective.weights(batch)["lm_loss"] == len(costs)
    np.testing.assert_allclose(sums["lm_accuracy"].value, sum(right))
    each = [sum(c for i, c in costs if i == row) for row in range(4)]
    np.testing.assert_allclose(outputs["nats"], each, rtol=1e-5)
    assert outputs["right"].sum() == sum(right)


@places
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_token_changes_no_earlier_prediction(place, dtype):
    objective = objective_of(place, dataclasses.replace(CFG, dtype=dtype))
    params, batch = parameters(objective), batch_of(place)
    before = log_p(objective, params, batch)
    # The third token of row 0's target, which predicts the fourth.
    at = int(batch["lm_positions"][0, 3])
    ids = batch["input_ids"].copy()
    ids[0, at] = 5 + (ids[0, at] - 4) % (V - 5)
    after = log_p(objective, params, {**batch, "input_ids": ids})
    assert (before[0, :3] == after[0, :3]).all() and (before[1:] == after[1:]).all()
    assert (before[0, 3:5] != after[0, 3:5]).all()
    # Of a text every token is felt by all of its target, and in a prefix by [CLS].
    ids = batch["input_ids"].copy()
    ids[0, 2] = 5 + (ids[0, 2] - 4) % (V - 5)
    after = log_p(objective, params, {**batch, "input_ids": ids})
    assert (before[0, :5] != after[0, :5]).all() and (before[1:] == after[1:]).all()


def test_the_text_sees_all_of_itself_unless_it_is_causal():
    from bertjax.models import encoder

    moved = {}
    for place in PLACES:
        batch = batch_of(place)
        cfg = dataclasses.replace(CFG, is_decoder=place == "causal", pooler=False)
        params = parameters(objective_of(place))["encoder"]
        ids = batch["input_ids"].copy()
        ids[0, 3] = 5 + (ids[0, 3] - 4) % (V - 5)  # the last one of the text
        pair = (encoder.apply(params, cfg, {**batch, "input_ids": x}).hidden[0, 0]
                for x in (batch["input_ids"], ids))  # fmt: skip
        moved[place] = not np.array_equal(*pair)
    assert moved == {"prefix": True, "causal": False}


def test_rows_that_fill_up_count_nothing():
    objective, batch = objective_of("prefix"), batch_of()
    params = parameters(objective)
    batch["example_weights"] = np.float32([1, 1, 0, 0])
    sums, _ = objective.evaluate(params, batch)
    two = {name: values[:2] for name, values in batch.items()}
    alone, _ = objective.evaluate(params, two)
    assert sums["lm_loss"].weight == objective.weights(batch)["lm_loss"] == 8
    np.testing.assert_allclose(sums["lm_loss"].value, alone["lm_loss"].value, rtol=1e-5)


def test_made_up_batches_have_the_arrays_of_rows():
    for place in PLACES:
        batch = batch_of(place)
        cfg = dataclasses.replace(CFG, is_decoder=place == "causal")
        made = make_objective(f"seq2seq:target_length={T}", cfg)[0].labels(4, L)
        tokens = {"input_ids", "attention_mask"}
        assert made.keys() == batch.keys() - tokens
        for name, spec in made.items():
            assert (spec.shape, spec.dtype) == (batch[name].shape, batch[name].dtype)


def test_chunks_of_logits_change_nothing():
    whole = objective_of("prefix")
    params, batch = parameters(whole), batch_of()
    # Of 4 x 6 x 20,000 logits 1 MB at a time: two pieces.
    wide = dataclasses.replace(CFG, vocab_size=20_000)
    one, some = (
        objective_of("prefix", dataclasses.replace(wide, max_logits_mb=mb))
        for mb in (0, 1)
    )
    params = parameters(one)
    (a, x), (b, y) = one.evaluate(params, batch), some.evaluate(params, batch)
    for name in ("lm_loss", "lm_accuracy"):
        np.testing.assert_allclose(a[name].value, b[name].value, rtol=1e-5)
    np.testing.assert_allclose(x["nats"], y["nats"], rtol=1e-5)

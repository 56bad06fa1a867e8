# SPDX-License-Identifier: Apache-2.0
"""Dialogue: attention, predictions, packed rows, and decoding with a cache."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import train_steps
from host_half import make_half
from made_up import fake_tokenizer

from bertjax.data.batches import Batches
from bertjax.data.features.base import GatheredRows
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan
from bertjax.models import encoder, heads, incremental
from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh

V, L, TARGET = 60, 32, 10
TOKENIZER = fake_tokenizer(V, sentinel_ids=np.zeros(0), files={})
CFG = EncoderConfig(
    vocab_size=V, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, unroll=1,
    intermediate_size=24, max_position_embeddings=L + TARGET, type_vocab_size=3,
    id_streams="role:4,turn:6", initializer_range=0.3, norm_position="pre",
    final_norm=True, embedding_norm=False, pooler=False,
    hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)  # fmt: skip


def make_batches(packed=False, streams="role:4,turn:6", speakers=4):
    rng = np.random.default_rng(0)
    turns = rng.integers(2, 7, 12)
    sizes = rng.integers(1, 6, turns.sum())
    store = SimpleNamespace(
        tokens=rng.integers(5, V, sizes.sum()),
        sentences=np.cumsum([0, *sizes]),
        documents=np.cumsum([0, *turns]),
        streams={"speaker": ("sentence", rng.integers(1, speakers + 1, len(sizes)))},
    )
    half = make_half(
        frozenset({"dialogue"}), TOKENIZER, L, plan="turns", packed=packed,
        target_length=TARGET, id_streams=streams,
    )  # fmt: skip
    plan = make_plan(store, "turns", L, 0, packed=packed, limits=half.limits)
    return Batches((plan,), make_mixture({"x": plan.n}), half, TOKENIZER, 8, 0)


@pytest.fixture(scope="module")
def model():
    objective, cfg = make_objective("dialogue", CFG)
    return objective, cfg, objective.init(jax.random.key(0))


def test_the_worked_example():
    half = make_half(
        frozenset({"dialogue"}), TOKENIZER, 12, plan="turns", target_length=6,
        id_streams="role:4,turn:6",
    )  # fmt: skip
    rows = {
        "input_ids": [2, 17, 25, 3, 46, 3, 2, 31, 48, 3, 0, 0],
        "token_type_ids": [0] * 6 + [1] * 4 + [0, 0],
        "role_ids": [0] * 4 + [1, 1] + [0] * 6,
        "turn_ids": [2] * 4 + [1, 1] + [0] * 6,
        "attention_mask": [1] * 10 + [0, 0],
    }
    arrays = {name: np.array([row], np.int32) for name, row in rows.items()}
    zero = np.zeros(1, np.uint64)
    made = half.make(GatheredRows(arrays, zero, zero, zero))
    assert made["position_ids"][0].tolist() == [11, 10, 9, 8, 7, 6, 0, 1, 2, 3, 0, 0]
    assert made["attention_steps"][0].tolist() == [0] * 6 + [7, 8, 9, 10, 0, 0]
    weights = made["dialogue_weights"][0]
    assert weights.tolist() == [1, 1, 1, 0, 0]
    assert made["dialogue_ids"][0][weights > 0].tolist() == [31, 48, 3]
    assert made["dialogue_positions"][0][weights > 0].tolist() == [6, 7, 8]
    assert made["role_ids"].tolist() == arrays["role_ids"].tolist()


def test_answers_alone_are_predicted_in_packed_rows_too():
    counts = []
    for packed in (False, True):
        made, answers, predicted = make_batches(packed), 0, 0
        for batch in made.eval_batches(8):
            real = batch["example_weights"] > 0
            types, ids = batch["token_type_ids"], batch["input_ids"]
            row, slot = np.nonzero(batch["dialogue_weights"])
            at = batch["dialogue_positions"][row, slot]
            assert (types[row, at] == 1).all() and (types[row, at + 1] == 1).all()
            assert (batch["dialogue_ids"][row, slot] == ids[row, at + 1]).all()
            assert batch["position_ids"].max() < L + TARGET
            answers += int(((types == 1) & (ids != 2))[real].sum())
            predicted += len(row)
        assert answers == predicted
        counts.append(predicted)
    assert counts[0] == counts[1]


def test_roles_and_turns_that_the_model_does_not_embed_are_in_no_batch():
    batch = make_batches(streams="turn:2").batch(0)
    assert "role_ids" not in batch and batch["turn_ids"].max() == 1
    assert not {"role_ids", "turn_ids"} & make_batches(streams="").batch(0).keys()


@functools.partial(jax.jit, static_argnums=1)
def encode(params, cfg, batch):
    return encoder.apply(params, cfg, batch).hidden


def hidden_of(model, batch):
    _, cfg, params = model
    return np.asarray(encode(params["encoder"], cfg, batch))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_leaks(model, packed):
    """With three layers, only an answer's token itself and later ones see it."""
    batch = make_batches(packed).batch(1)
    before = hidden_of(model, batch)
    segments = batch.get("segment_ids", batch["attention_mask"])
    row, column = np.argwhere((batch["token_type_ids"] == 1) & (segments > 0))[3]
    ids = batch["input_ids"].copy()
    ids[row, column] = (ids[row, column] - 5 + 7) % (V - 5) + 5
    change = np.abs(hidden_of(model, {**batch, "input_ids": ids}) - before).max(-1)
    behind = (segments[row] == segments[row, column]) & (np.arange(L) >= column)
    may = np.zeros(ids.shape, bool)
    may[row] = behind & (batch["token_type_ids"][row] == 1)
    assert change[~may].max() == 0 and change[may].min() > 1e-5
    # All tokens of a sequence see a token of its context.
    row, column = np.argwhere((batch["turn_ids"] == 1) & (segments > 0))[0]
    ids = batch["input_ids"].copy()
    ids[row, column] = (ids[row, column] - 5 + 7) % (V - 5) + 5
    change = np.abs(hidden_of(model, {**batch, "input_ids": ids}) - before).max(-1)
    assert change[row][segments[row] == segments[row, column]].min() > 1e-5


def test_roles_act_through_their_table_alone(model):
    objective, cfg, params = model
    batch = make_batches().batch(0)
    other = {**batch, "role_ids": (batch["role_ids"] + 1) % 4}
    assert np.abs(hidden_of(model, batch) - hidden_of(model, other)).max() > 1e-3
    tables = params["encoder"]["embeddings"]["streams"]
    assert tables["role"].shape == (4, 16) and tables["turn"].shape == (6, 16)
    rolled = {**tables, "role": jnp.roll(tables["role"], 1, 0)}
    embeddings = {**params["encoder"]["embeddings"], "streams": rolled}
    moved = {"encoder": {**params["encoder"], "embeddings": embeddings}}
    same = hidden_of((objective, cfg, moved), other)
    np.testing.assert_allclose(same, hidden_of(model, batch), atol=1e-6)


def test_packed_rows_lose_what_single_ones_do(model):
    objective, _, params = model
    totals = []
    sums = jax.jit(lambda batch: objective.sums(params, batch, None))
    for packed in (False, True):
        total = np.zeros(2)
        for batch in make_batches(packed).eval_batches(8):
            one = sums(batch)["dialogue_loss"]
            total += float(one.value), float(one.weight)
        totals.append(total)
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-5)


def test_a_cache_goes_on_as_the_whole_row_does(model):
    """Prefill the context and the answer's first token, then feed token by token."""
    _, cfg, params = model
    batch = make_batches().batch(0)
    logits = heads.token_logits(params, cfg, hidden_of(model, batch))
    size = (batch["turn_ids"] > 0).sum(1) + 1  # with the answer's [CLS]
    width = int(size.max())
    real = np.arange(width) < size[:, None]
    names = "input_ids", "token_type_ids", "position_ids", "attention_steps"
    names += "role_ids", "turn_ids"
    prompt = {n: np.where(real, batch[n][:, :width], 0) for n in names}
    prompt["attention_mask"] = real.astype(np.int32)
    decoder = incremental.make_decoder(cfg)
    cache, first = jax.jit(decoder.prefill, static_argnums=2)(params, prompt, L)
    extend = jax.jit(decoder.extend)
    rows = np.arange(len(size))
    np.testing.assert_allclose(first, logits[rows, size - 1], atol=2e-4)
    for step in range(2):
        at = np.minimum(size + step, L - 1)
        ids = batch["input_ids"][rows, at][:, None]
        cache, more = extend(params, cache, ids)
        alive = (batch["token_type_ids"][rows, at] == 1) & (size + step < L)
        assert alive.sum() > 3
        np.testing.assert_allclose(more[alive, 0], logits[rows, at][alive], atol=2e-4)


def test_training_on_any_mesh():
    cfg = dataclasses.replace(CFG, num_hidden_layers=1)
    objective = make_objective("dialogue", cfg)[0]
    rows = [make_batches(packed=True).batch(step) for step in range(2)]
    one = train_steps(objective, make_mesh(devices=jax.devices()[:1]), rows)
    other = train_steps(objective, make_mesh(data=4, fsdp=2), rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), one, other
    )

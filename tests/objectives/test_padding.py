# SPDX-License-Identifier: Apache-2.0
"""Padding rows of the embeddings, beyond the vocabulary, have no effect."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder

from bertjax import UserError
from bertjax.assembly import command_line, resolve
from bertjax.interop.resize_embeddings import drop_rows
from bertjax.models import heads
from bertjax.objectives import electra
from bertjax.objectives.make_objective import make_objective

PIECES, V, B, L, P = 40, 64, 4, 12, 3
PADDED = tiny_encoder(
    V,
    L,
    pieces=PIECES,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=64,
    initializer_range=0.2,
)
BARE = dataclasses.replace(PADDED, vocab_size=PIECES, pieces=0)
SHAPES = [
    {},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": False, "decoder_bias": False},
]


def make_batch():
    draw = np.random.default_rng(0)
    return {
        "input_ids": draw.integers(5, PIECES, (B, L)).astype(np.int32),
        "attention_mask": np.ones((B, L), np.int32),
        "token_type_ids": np.zeros((B, L), np.int32),
        "mlm_positions": np.tile(np.arange(1, P + 1, dtype=np.int32), (B, 1)),
        "mlm_ids": draw.integers(5, PIECES, (B, P)).astype(np.int32),
        "mlm_weights": np.ones((B, P), np.float32),
    }


def make(name, cfg):
    """Make an objective, and parameters in which padding pieces would be likely."""
    objective, cfg = make_objective(name, cfg)
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    if "bias" in params["mlm"]:
        params["mlm"]["bias"] = np.where(np.arange(V) < PIECES, 0, 9).astype("f4")
    return objective, cfg, params


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_those_without_padding(shape):
    given = dataclasses.replace(PADDED, **shape)
    objective, _, params = make("mlm", given)
    bare = make_objective("mlm", dataclasses.replace(BARE, **shape))[0]

    def loss(objective):
        def total(params):
            sums = objective.sums(params, make_batch(), None)
            return sums["mlm_loss"].value, sums["mlm_accuracy"].value

        return jax.jit(jax.value_and_grad(total, has_aux=True))

    (found, right), grads = loss(objective)(params)
    (wanted, rightly), known = loss(bare)(drop_rows(params, PIECES))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert right == rightly
    grads = jax.device_get(grads)
    rows = [grads["encoder"]["embeddings"]["word"]]
    rows += [grads["mlm"][k] for k in ("bias", "decoder") if k in grads["mlm"]]
    assert all(not leaf[PIECES:].any() and leaf[:PIECES].any() for leaf in rows)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        drop_rows(grads, PIECES),
        jax.device_get(known),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probabilities(dtype):
    given = dataclasses.replace(PADDED, dtype=dtype)
    _, cfg, params = make("mlm", given)
    hidden = jax.random.normal(jax.random.key(1), (1, P, 32), dtype)
    word = jnp.asarray(params["encoder"]["embeddings"]["word"])
    logits = heads.mlm_logits(params["mlm"], word, cfg, hidden)[0]
    likely = np.asarray(jax.nn.softmax(logits))
    assert not likely[:, PIECES:].any()
    few = drop_rows(params, PIECES)
    bare = dataclasses.replace(BARE, dtype=dtype)
    logits = heads.mlm_logits(few["mlm"], word[:PIECES], bare, hidden)[0]
    np.testing.assert_allclose(likely[:, :PIECES], jax.nn.softmax(logits), 1e-5)
    ids = np.arange(P)
    found = heads.log_likelihoods(params["mlm"], word, cfg, hidden[0], ids)
    np.testing.assert_allclose(np.exp(found), likely[ids, ids], rtol=1e-2)


def test_a_generator_draws_no_padding():
    objective, _, params = make("electra:generator=0.5", PADDED)
    batch, seen = make_batch(), []
    whole = electra.replace_tokens

    def watch(batch, sampled):
        seen.append(sampled)
        return whole(batch, sampled)

    @jax.jit
    def draw(ids):
        objective.sums(params, {**batch, "input_ids": ids}, None)
        return seen.pop()

    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(electra, "replace_tokens", watch)
        for seed in range(20):
            ids = batch["input_ids"].copy()
            ids[:, 0] = seed  # changes the row's key, and so the draws
            drawn.append(np.ravel(draw(ids)))
    drawn = np.concatenate(drawn)
    assert drawn.max() < PIECES and len(set(drawn.tolist())) > PIECES // 2


def test_pieces_are_the_tokenizers_unless_all_are_predicted():
    def pieces(*given, size=1000):
        made = command_line.parse(["--config=bert.py:tiny", *given]).config
        return resolve.encoder_config(made, size).pieces

    padded = "--config.model.vocab_size=1024"
    assert pieces() == pieces("--config.model.vocab_size=1000") == 0
    assert pieces(padded) == 1000
    assert pieces(padded, "--config.model.pieces=0") == 0
    with pytest.raises(UserError, match=r"model\.pieces=999 is smaller.*1000"):
        pieces(padded, "--config.model.pieces=999")

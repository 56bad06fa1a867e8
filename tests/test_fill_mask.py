# SPDX-License-Identifier: Apache-2.0
"""Filling blanks in texts of all lengths, with few compiled programs."""

import types

import jax
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax import UserError
from bertjax.assembly import models
from bertjax.data.tokenizers.tokenizer import train_tokenizer
from bertjax.inference import fill_blanks, forward
from bertjax.models import encoder, heads, stacked_layers
from bertjax.models.config import EncoderConfig

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
)


def model(name):
    cfg = EncoderConfig(**SIZES, **ENCODERS[name], initializer_range=0.5)
    a, b = jax.random.split(jax.random.key(3))
    return cfg, {"encoder": encoder.init(a, cfg), "mlm": heads.init_mlm(b, cfg)}


def test_few_lengths_cover_all():
    for most in range(1, 9000, 7):
        lengths = forward.bucket_lengths(most)
        assert len(lengths) <= 5
        assert lengths[-1] == most


@pytest.mark.parametrize("name", ENCODERS)
def test_unstacked_layers_compute_the_same(name):
    cfg, params = model(name)
    ids = np.arange(24).reshape(2, 12) % 40
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32)}
    apply = jax.jit(lambda params: encoder.apply(params, cfg, batch).hidden)
    want = apply(params["encoder"])
    got = apply(stacked_layers.unstack(params["encoder"], cfg))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_broken_model_is_named():
    """A model that returns NaN is an error; NaN would not be valid JSON."""
    cfg, params = model(next(iter(ENCODERS)))
    params = jax.tree.map(lambda x: x * np.nan, params)
    tokenizer = types.SimpleNamespace(mask_id=4, pad_id=0, vocab_size=40)
    fill = fill_blanks.make_filler(cfg, params, tokenizer, 3)
    with pytest.raises(UserError, match="not finite numbers"):
        fill([2, 9, 4, 3])


@pytest.mark.parametrize("name", ENCODERS)
def test_many_blanks_and_the_padding_of_the_vocabulary(name):
    cfg, params = model(name)
    pieces = [f"w{i}" for i in range(33)]
    known = types.SimpleNamespace(mask_id=4, pad_id=0, pieces=pieces, vocab_size=33)
    fill = fill_blanks.make_filler(cfg, params, known, 33)
    ids = [2, *[4, 7] * 10, 3]
    blanks = fill(ids)
    assert len(blanks) == 10
    batch = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, len(ids)), np.int32),
    }
    apply = jax.jit(lambda batch: encoder.apply(params["encoder"], cfg, batch).hidden)
    hidden = apply(batch)
    at = np.array([i for i, t in enumerate(ids) if t == 4])
    word = params["encoder"]["embeddings"]["word"]
    logits = heads.mlm_logits(params["mlm"], word, cfg, hidden[:, at])
    likely = np.asarray(jax.nn.softmax(logits[0], axis=-1))
    for guesses, row in zip(blanks, likely, strict=True):
        assert {g["token"] for g in guesses} == set(pieces)  # none of ids 33 to 39
        for guess in guesses:
            want = row[int(guess["token"][1:])]
            assert guess["probability"] == pytest.approx(want, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe", "unigram", "bpe"])
def test_guesses_can_be_read_and_fill_the_text(kind):
    """`token` is the vocabulary's piece; the readable word has no mark of a space."""
    lines = ["a small dog sees a cat", "the dog and the cat sleep in a house"] * 20
    known = train_tokenizer(lines, kind, 300 if kind == "byte_bpe" else 60, False)
    marked = "" if kind == "wordpiece" else {"byte_bpe": "Ġ"}.get(kind, "▁")
    words = {f"{marked}{word}": word for word in ("the", "and", "cat", "dog")}
    dog = next(i for i, piece in enumerate(known.pieces) if piece in words)
    word = words[known.pieces[dog]]
    inner = next(i for i, p in enumerate(known.pieces) if p in ("##o", "o"))
    assert fill_blanks.readable_piece(known, dog) == word
    assert fill_blanks.readable_piece(known, inner) == "##o"
    mask = known.mask_token
    ids = fill_blanks.encode(known, f"the {mask} sees a {mask}", 64)
    guess = {"token": known.pieces[dog], "id": dog, "probability": 0.5}
    masks = [[dict(guess)], [dict(guess)]]
    fill_blanks.add_sequences(known, ids, masks)
    assert [blank[0]["sequence"] for blank in masks] == [
        f"the {word} sees a {mask}",
        f"the {mask} sees a {word}",
    ]


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (
            "splade",
            "its masked-LM head was trained for term weights, not for predictions",
        ),
        ("colbert", "has no masked-LM head"),
    ],
)
def test_models_of_vectors_fill_no_blanks(objective, why):
    config = types.SimpleNamespace(objective=objective)
    opened = models.LoadedModel(config, None, None, {"task": {}})
    with pytest.raises(UserError, match=rf"^m was .* and {why}; bertjax.embed uses"):
        models.check_masked_lm(opened, "m")

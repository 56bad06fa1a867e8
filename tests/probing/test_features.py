# SPDX-License-Identifier: Apache-2.0
"""Features of every depth: the encoder's own numbers, at any padding."""

import hashlib

import jax
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax import UserError
from bertjax.models import encoder, stacks
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import linear
from bertjax.probing import features
from bertjax.tasks.texts import Form, Texts, make_ragged

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=48,
    initializer_range=0.5,
)
REAL = (np.arange(8) < np.array([[8], [3]])).astype(np.int32)
BATCH = {
    "input_ids": np.random.default_rng(0).integers(1, 40, (2, 8)).astype(np.int32),
    "attention_mask": REAL,
}


class Specials:
    cls_id, sep_id, pad_id = 1, 2, 0


@pytest.fixture(
    scope="module",
    params=[
        "bert",
        pytest.param("shared", marks=pytest.mark.slow),
        pytest.param("local", marks=pytest.mark.slow),
    ],
)
def model(request):
    cfg = EncoderConfig(**SIZES, **ENCODERS[request.param])
    return cfg, encoder.init(jax.random.key(0), cfg)


@pytest.mark.parametrize("unstacked", [False, True])
def test_ends_are_the_embeddings_and_the_hidden_states(model, unstacked):
    cfg, params = model
    held = stacks.unstack(params, cfg) if unstacked else params

    @jax.jit
    def first(params, batch):
        x = encoder.embed(params["embeddings"], cfg, batch)
        return (
            linear(params["embeddings"]["projection"], x) if cfg.embedding_size else x
        )

    kept = jax.jit(lambda p, b: encoder.apply_layers(p, cfg, b, lambda x: x))
    layers = kept(held, BATCH)
    assert layers.shape == (4, 2, 8, 16)
    np.testing.assert_array_equal(layers[0], first(held, BATCH))
    hidden = jax.jit(lambda p, b: encoder.apply(p, cfg, b).hidden)(held, BATCH)
    np.testing.assert_array_equal(layers[-1], hidden)
    differs = np.abs(np.diff(layers, axis=0)).max(axis=(1, 2, 3))
    assert (differs > 1e-3).all()


def test_layers_between_are_those_of_a_shallower_encoder():
    """The second of three layers is what an encoder of two gives."""
    cfg = EncoderConfig(**SIZES)
    params = encoder.init(jax.random.key(0), cfg)
    layers = encoder.apply_layers(params, cfg, BATCH, lambda x: x)
    small = EncoderConfig(**{**SIZES, "num_hidden_layers": 2})
    cut = {**params, "layers": jax.tree.map(lambda x: x[:2], params["layers"])}
    hidden = encoder.apply(cut, small, BATCH).hidden
    np.testing.assert_allclose(layers[2], hidden, atol=1e-6)


def make_texts():
    draw = np.random.default_rng(1)
    rows = [draw.integers(3, 40, n).tolist() for n in (4, 30, 1, 9, 38, 2, 17)]
    form = Form(("text",), "label", ("a", "b"), 1, ("accuracy",))
    return Texts(form, (make_ragged(rows),), np.zeros(7, np.int32), np.zeros(40, int))


def checksum(params):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def test_features_are_pooled_by_hand(model):
    """A row as it is alone, without padding; the encoder stays as it is."""
    cfg, params = model
    texts, before, row = make_texts(), checksum(params), 5
    batch = {"input_ids": np.array([[1, *texts.texts[0][row], 2]], np.int32)}
    batch["attention_mask"] = np.ones_like(batch["input_ids"])
    kept = jax.jit(lambda p, b: encoder.apply_layers(p, cfg, b, lambda x: x[0]))
    alone = np.asarray(kept(params, batch))
    for pooling, wanted in (("cls", alone[:, 0]), ("mean", alone.mean(1))):
        read = features.make_reader(cfg, params, pooling)
        found = features.read_texts(read, texts, Specials, 4, 16, 3, 40)
        assert found.shape == (4, 7, 16) and found.dtype == np.float32
        np.testing.assert_allclose(found[:, row], wanted, rtol=1e-4, atol=1e-5)
    assert checksum(params) == before


def test_memory_is_told_and_refused():
    told = features.check_memory(1000, 13, 768, free=2**30)
    assert told == "1,000 rows x 13 layers x 768: 0.08 GB of memory"
    with pytest.raises(UserError, match=r"0\.80 GB .* 0\.10 GB are free: give fewer"):
        features.check_memory(10_000, 13, 768, free=10**8)
    assert features.free_memory() > 0

# SPDX-License-Identifier: Apache-2.0
"""Features of every layer equal the encoder's own states, with any padding."""

import jax
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax import UserError
from bertjax.models import encoder, stacked_layers
from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import embed
from bertjax.probing import layer_features, layer_scores, probes
from bertjax.tasks.metrics import accuracy
from bertjax.tasks.text_rows import Form, Ragged, Texts

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=48,
    initializer_range=0.5,
    unroll=1,
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
    return cfg, jax.device_get(encoder.init(jax.random.key(0), cfg))


@pytest.mark.parametrize("unstacked", [False, True])
def test_ends_are_the_embeddings_and_the_hidden_states(model, unstacked):
    cfg, params = model
    held = stacked_layers.unstack(params, cfg) if unstacked else params

    @jax.jit
    def first(params, batch):
        return embed(params["embeddings"], cfg, batch)

    kept = jax.jit(lambda p, b: encoder.apply_layers(p, cfg, b, lambda x: x))
    layers = kept(held, BATCH)
    assert layers.shape == (4, 2, 8, 16)
    np.testing.assert_array_equal(layers[0], first(held, BATCH))
    hidden = jax.jit(lambda p, b: encoder.apply(p, cfg, b).hidden)(held, BATCH)
    np.testing.assert_array_equal(layers[-1], hidden)
    differs = np.abs(np.diff(layers, axis=0)).max(axis=(1, 2, 3))
    assert (differs > 1e-3).all()


def test_layers_between_are_those_of_a_shallower_encoder():
    """The second of three layers has the output of an encoder of two layers."""
    cfg = EncoderConfig(**SIZES)
    params = jax.device_get(encoder.init(jax.random.key(0), cfg))
    kept = jax.jit(lambda p, b: encoder.apply_layers(p, cfg, b, lambda x: x))
    layers = np.asarray(kept(params, BATCH))
    small = EncoderConfig(**{**SIZES, "num_hidden_layers": 2})
    cut = {**params, "layers": jax.tree.map(lambda x: x[:2], params["layers"])}
    hidden = jax.jit(encoder.apply, static_argnums=1)(cut, small, BATCH).hidden
    np.testing.assert_allclose(layers[2], hidden, atol=1e-6)


def make_texts():
    draw = np.random.default_rng(1)
    rows = [draw.integers(3, 40, n).tolist() for n in (4, 30, 1, 9, 38, 2, 17)]
    form = Form(("text",), "label", ("a", "b"), 1, ("accuracy",))
    return Texts(
        form, np.zeros(40, int), (Ragged.of(rows),), labels=np.zeros(7, np.int32)
    )


def test_features_are_pooled_by_hand(model):
    """A row has the features that it has alone, without padding."""
    cfg, params = model
    texts, row = make_texts(), 5
    batch = {"input_ids": np.array([[1, *texts.texts[0][row], 2]], np.int32)}
    batch["attention_mask"] = np.ones_like(batch["input_ids"])
    kept = jax.jit(lambda p, b: encoder.apply_layers(p, cfg, b, lambda x: x[0]))
    alone = np.asarray(kept(params, batch))
    for pooling, wanted in (("cls", alone[:, 0]), ("mean", alone.mean(1))):
        read = layer_features.make_reader(cfg, params, pooling)
        found = layer_features.read_texts(read, texts, Specials, cfg, 3)
        assert found.shape == (4, 7, 16) and found.dtype == np.float32
        np.testing.assert_allclose(found[:, row], wanted, rtol=1e-4, atol=1e-5)


def test_probes_alone_are_trained(model, monkeypatch):
    """The optimizer has only the probe's parameters. The encoder's, in writable memory,
    do not change."""
    cfg, params = model
    params, trained = jax.tree.map(np.array, params), []
    before = jax.tree.map(np.copy, params)
    adam = probes.optax.adam

    def spy(rate):
        def init(params):
            trained.append(jax.tree.map(np.shape, params))
            return adam(rate).init(params)

        return adam(rate)._replace(init=init)

    monkeypatch.setattr(probes.optax, "adam", spy)
    probes.run.clear_cache()  # probes of other encoders have the same shapes
    reader = layer_features.make_reader(cfg, params, "mean")

    def read():
        return layer_features.read_texts(reader, make_texts(), Specials, cfg, 3)

    train, labels = read(), np.array([0, 1, 0, 1, 1, 0, 1], np.int32)
    data = layer_scores.Data(train.copy(), labels, train.copy(), labels, 2, accuracy)
    probes.standardize(data.train, data.valid)
    settings = probes.Settings(steps=3, batch_size=4, lr=0.1, weight_decay=0.1)
    none, told = np.zeros((1, 0), np.int32), (0, settings)
    layer_scores.probe_layers("linear", data, none, *told)
    layer_scores.probe_mix("linear", data, 1, *told)
    own = {"kernel": (16, 2), "bias": (2,)}
    assert trained == [{"out": own}, {"out": own, "mix": (4,), "scale": ()}]
    np.testing.assert_array_equal(read(), train)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_memory_is_told_and_refused(monkeypatch):
    assert layer_features.free_memory() > 0
    monkeypatch.setattr(layer_features, "free_memory", lambda: 10**8)
    told = layer_features.check_memory(1000, 13, 768)
    assert told == "1,000 examples x 13 layers x 768: 0.08 GB of memory"
    with pytest.raises(UserError, match=r"0\.80 GB .* 0\.10 GB are free: give fewer"):
        layer_features.check_memory(10_000, 13, 768)

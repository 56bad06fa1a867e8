# SPDX-License-Identifier: Apache-2.0
"""Decoders, also against transformers (see testdata/make_decoder_golden.py)."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.interop.tensor_layout import unflatten
from bertjax.models import (
    attention,
    decoder,
    embeddings,
    encoder,
    heads,
    stacked_layers,
    transformer_layer,
)
from bertjax.models.config import EncoderConfig, decoder_config
from bertjax.models.families import FAMILIES
from bertjax.models.flops import decoder_flops, encoder_flops
from bertjax.models.incremental import make_decoder
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import (
    PARAM_AXES,
    axes_of,
    gather_params,
    param_shardings,
    path_name,
)

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/decoder_golden.npz")
NAMES = ("t5", "t5_v1_1", "bart")


def read(name):
    """Return (config, parameters, batch) of a golden model."""
    cfg = EncoderConfig(**json.loads(str(GOLDEN[f"{name}/config"])))
    prefix = f"{name}/params/"
    params = {"mlm": {}} | unflatten(
        (key.removeprefix(prefix), np.asarray(GOLDEN[key], np.float32) / 64)
        for key in GOLDEN
        if key.startswith(prefix)
    )
    arrays = "input_ids attention_mask decoder_input_ids decoder_attention_mask"
    batch = {key: jnp.asarray(GOLDEN[f"{name}/{key}"]) for key in arrays.split()}
    return cfg, params, batch


def hidden_of(params, cfg, batch, rng=None):
    memory = decoder.encode(params, cfg, batch, rng)
    return decoder.apply(params, cfg, batch, memory, rng)


def logits_of(params, cfg, batch):
    word = params["encoder"]["embeddings"]["word"]
    return heads.mlm_logits(params["mlm"], word, cfg, hidden_of(params, cfg, batch))


run = jax.jit(logits_of, static_argnums=1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    cfg, params, batch = read(name)
    real = np.asarray(batch["decoder_attention_mask"]) > 0
    found, wanted = np.asarray(run(params, cfg, batch)), GOLDEN[f"{name}/logits"]
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(found[real], wanted[real], rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_choice_is_that_of_transformers(name):
    """The end-of-text id is never chosen: transformers' min_new_tokens forbids it."""
    cfg, params, batch = read(name)
    wanted = GOLDEN[f"{name}/greedy"]
    prompt = {k: batch[k] for k in ("input_ids", "attention_mask")}
    prompt["decoder_input_ids"] = jnp.zeros((3, 1), jnp.int32)
    model = make_decoder(cfg)
    extend = jax.jit(model.extend)
    prefill = jax.jit(model.prefill, static_argnums=2)
    cache, logits = prefill(params, prompt, 1 + wanted.shape[1])
    found = []
    for _ in range(wanted.shape[1]):
        found.append(np.asarray(logits.at[:, 2].set(-jnp.inf).argmax(-1)))
        cache, logits = extend(params, cache, found[-1][:, None].astype(np.int32))
        logits = logits[:, 0]
    np.testing.assert_array_equal(np.stack(found, axis=1), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_still_compute_what_is_stored(name, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "testdata")
    import make_decoder_golden

    for key, value in make_decoder_golden.make_case(name).items():
        if key == "logits":
            np.testing.assert_allclose(value, GOLDEN[f"{name}/{key}"], atol=1e-4)
        else:
            np.testing.assert_array_equal(value, GOLDEN[f"{name}/{key}"])


# ---------------------------------------------------------------- who sees whom
@functools.cache
def compiled():
    return jax.jit(hidden_of, static_argnums=1)


def changed(name, key, at, other=7):
    """Return where hidden states differ, [B, T], after one id of the batch changes."""
    cfg, params, batch = read(name)
    before = compiled()(params, cfg, batch)
    assert int(batch[key][at]) != other
    after = compiled()(params, cfg, {**batch, key: batch[key].at[at].set(other)})
    return np.abs(np.asarray(after - before)).max(-1) > 0


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_token_sees_what_is_before_it(name):
    differs = changed(name, "decoder_input_ids", (1, 6))
    wanted = np.zeros((3, 14), bool)
    wanted[1, 6:] = True
    np.testing.assert_array_equal(differs, wanted)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_of_the_memory_is_not_seen(name):
    assert not changed(name, "input_ids", (1, 5)).any()
    differs = changed(name, "input_ids", (1, 4))
    assert differs[1].all() and not differs[[0, 2]].any()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_packed_rows_are_those_of_one_sequence_each(name):
    """A row packs two pairs of texts, with padding after both sources and targets."""
    cfg, params, batch = read(name)
    plain = compiled()(params, cfg, batch)
    sizes = {"": np.array([12, 5]), "decoder_": np.array([9, 14])}

    def pack(start, length):
        first, second = sizes[start]
        ids = np.zeros((3, length), np.int32)
        segments, places = ids.copy(), ids.copy()
        whole = np.asarray(batch[f"{start}input_ids"])
        ids[:, : first + second] = np.r_[whole[0, :first], whole[1, :second]]
        segments[:, :first], segments[:, first : first + second] = 1, 2
        places[:, : first + second] = np.r_[np.arange(first), np.arange(second)]
        return {
            f"{start}input_ids": ids,
            f"{start}attention_mask": (segments > 0).astype(np.int32),
            f"{start}segment_ids": segments,
            f"{start}position_ids": places,
        }

    packed = compiled()(params, cfg, pack("", 19) | pack("decoder_", 26))
    np.testing.assert_allclose(packed[2, :9], plain[0, :9], atol=2e-5)
    np.testing.assert_allclose(packed[2, 9:23], plain[1], atol=2e-5)
    assert np.isfinite(packed).all()


# ---------------------------------------------------------------- training
def loss(params, cfg, batch, rng=None):
    hidden = hidden_of(params, cfg, batch, rng)
    real = batch["decoder_attention_mask"][..., None]
    return jnp.sum(jnp.where(real > 0, jnp.sin(hidden), 0))


def gradient(cfg, params, batch, rng=None):
    return jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, cfg, batch, rng)


def compare(found, wanted):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        # Compare on one device, as a mesh may have left them on several. The true
        # gradient of a key bias is 0; the computed one is rounding of large terms.
        a, b = np.asarray(a), np.asarray(b)
        near = max(5e-5, 1e-5 * np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=near)


@functools.cache
def looped(name):
    """Return (config with a loop over layers, parameters, batch of 12, gradient)."""
    cfg, params, batch = read(name)
    cfg = dataclasses.replace(cfg, unroll=1, remat="dots")
    batch = {k: jnp.tile(v, (4, 1)) for k, v in batch.items()}
    return cfg, params, batch, gradient(cfg, params, batch)


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_loops_and_remat_change_nothing(name):
    cfg, params, batch, found = looped(name)
    cfg = dataclasses.replace(cfg, unroll=0, remat="none")
    compare(found, gradient(cfg, params, batch))


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_eight_devices_are_one(name):
    cfg, params, batch, wanted = looped(name)
    mesh = make_mesh(2, 2, 2)

    def sharded(params, batch):
        return loss(gather_params(params, cfg.dtype), cfg, batch)

    with jax.set_mesh(mesh):
        where = param_shardings(params, mesh)
        placed = jax.device_put(params, where)
        rows = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(("data", "fsdp"))
        )
        found = jax.jit(jax.value_and_grad(sharded), out_shardings=(None, where))(
            placed, jax.device_put(batch, rows)
        )
    compare(found, wanted)


def test_dropout_has_keys_of_its_own():
    """A decoder draws masks other than the encoder's from the same key."""
    cfg, params, batch = read("bart")
    key, drawn = jax.random.key(0), []

    def record(hidden, rate, rng, rows=None):
        drawn.extend(
            () if rng is None else [np.asarray(jax.random.key_data(rng)).tobytes()]
        )
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        for module in (embeddings, transformer_layer, attention):
            patch.setattr(module, "dropout", record)
        # Run without jit, layer by layer, so that keys are concrete numbers.
        apart = {
            side: stacked_layers.unstack(params[side], own)
            for side, own in (("encoder", cfg), ("decoder", decoder_config(cfg)))
        }
        hidden_of({**params, **apart}, cfg, batch, key)
    # One each for both embeddings, 2 encoder layers x 3, 3 decoder layers x 5.
    assert len(drawn) == 2 + 2 * 3 + 3 * 5 and len({*drawn}) == len(drawn)


def test_each_leaf_has_one_row():
    mesh = make_mesh(2, 2, 2)
    for family in ("t5", "bart"):
        known = FAMILIES[family]
        options = {**known.fixed, "intermediate_size": 512, **known.sizes["tiny"]}
        cfg = EncoderConfig(vocab_size=64, **options)
        made = jax.eval_shape(lambda c=cfg: decoder.init(jax.random.key(0), c))
        for path, leaf in jax.tree_util.tree_leaves_with_path({"decoder": made}):
            axes = axes_of(path_name(path), PARAM_AXES)
            assert len(axes.split()) == leaf.ndim
        where = param_shardings({"decoder": made}, mesh)
        cross = where["decoder"]["layers"]["cross"]["query"]["kernel"]
        assert cross.shard_shape((2, 128, 2, 64)) == (2, 64, 1, 64)
    assert made["embeddings"].keys() == {"position", "norm"}


# ---------------------------------------------------------------- configs
SMALL = dict(vocab_size=20, hidden_size=8, num_hidden_layers=2, intermediate_size=8)
SMALL |= dict(num_attention_heads=2, pooler=False)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(is_decoder=True), "an encoder's tokens see both sides"),
        (dict(embedding_size=4), r"model\.embedding_size=4: a decoder has no such"),
        (dict(num_hidden_groups=1), r"model\.num_hidden_groups=1: a decoder has no"),
        (dict(unet_skips=True), r"model\.unet_skips=True: a decoder has no such"),
        (
            dict(first_attention_norm=False, norm_position="pre"),
            r"model\.first_attention_norm=False: a decoder has all norms",
        ),
        (
            dict(relative_attention_num_buckets=32, relative_attention_max_distance=16),
            "the first 16 distances have a bucket each",
        ),
        (dict(num_decoder_layers=-1), r"model\.num_decoder_layers=-1 is not in"),
        (dict(attention_scale=-1.0), r"model\.attention_scale=-1\.0 is not in"),
        (dict(logit_scale=-1.0), r"model\.logit_scale=-1\.0 is not in"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        EncoderConfig(**{**SMALL, "num_decoder_layers": 2, **options})


def test_an_encoder_is_made_as_without_a_decoder():
    one, both = EncoderConfig(**SMALL), EncoderConfig(**SMALL, num_decoder_layers=1)
    key = jax.random.key(3)
    jax.tree.map(
        np.testing.assert_array_equal, encoder.init(key, one), encoder.init(key, both)
    )
    own = decoder_config(both)
    assert (own.num_hidden_layers, own.num_decoder_layers) == (1, 0)
    assert own.is_decoder and not own.type_vocab_size
    zero = dataclasses.replace(both, zero_init_outputs=True)
    layers = decoder.init(key, zero)["layers"]
    assert not layers["cross"]["output"]["kernel"].any()
    assert layers["cross"]["query"]["kernel"].any()


def test_flops_count_both_attentions():
    cfg = EncoderConfig(**SMALL, num_decoder_layers=3)
    d, m, t, s = 8, 8, 10, 30
    own = 4 * d * d + 2 * d * m + 2 * d * (t + 1) / 2
    cross = 2 * d * d + 2 * d * d * s / t + 2 * d * s
    assert decoder_flops(cfg, t, s) == pytest.approx(6 * 3 * (own + cross))
    without = dataclasses.replace(cfg, num_decoder_layers=0)
    assert encoder_flops(cfg, s, 0) == encoder_flops(without, s, 0)


@pytest.mark.parametrize(
    "family, size, vocab, published",
    [
        ("t5", "small", 32_128, 60_506_624),
        ("t5", "base", 32_128, 222_903_552),
        ("t5", "large", 32_128, 737_668_096),
        ("t5", "v1_1_base", 32_128, 247_577_856),
        ("t5", "v1_1_large", 32_128, 783_150_080),
        ("bart", "base", 50_265, 139_420_416),
        ("bart", "large", 50_265, 406_291_456),
    ],
)
def test_parameter_counts(family, size, vocab, published):
    """BART's logit bias is a buffer in transformers, so it does not count."""
    known = FAMILIES[family]
    options = {**known.fixed, **known.sizes[size]}
    options.setdefault("intermediate_size", 4 * options["hidden_size"])
    cfg = EncoderConfig(vocab_size=vocab, **options)
    key = jax.random.key(0)
    parts = encoder.init, decoder.init, heads.init_mlm
    made = jax.eval_shape(lambda: [make(key, cfg) for make in parts])
    made[2].pop("bias", None)
    assert encoder.count_params(made) == published

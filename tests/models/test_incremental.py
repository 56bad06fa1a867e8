# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache returns the same logits as whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models import decoder, encoder, heads, incremental
from bertjax.models.config import EncoderConfig

SIZES = np.array([6, 3, 1])  # of the prompts
B, T, PROMPT = len(SIZES), 12, 6
SMALL = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=24,
    type_vocab_size=0,
    initializer_range=0.4,
    pooler=False,
)
OPTIONS = {
    "absolute": dict(position_offset=2),
    "windows": dict(
        position_embedding_type="rope",
        local_rope_theta=100.0,
        local_attention=6,
        global_attn_every_n_layers=2,
        first_attention_norm=False,
        norm_position="pre",
    ),
    "relative": dict(
        position_embedding_type="none",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        norm_position="pre",
        norm_type="rms_norm",
        norm_bias=False,
        final_norm=True,
        attention_scale=1.0,
        mlp_type="glu",
    ),
    "skips": dict(
        num_hidden_layers=3, embedding_skip=True, value_skip=True, unet_skips=True
    ),
    "shared": dict(num_hidden_groups=1, embedding_size=8, num_hidden_layers=3),
    "scale": dict(attention_scale=0.7, logit_scale=0.5, qk_norm=True),
}
KINDS = {
    "causal": dict(is_decoder=True),
    "prefix": {},
    "memory": dict(num_decoder_layers=2),
}


@functools.cache
def make(options, kind):
    """Return (config, parameters) of a model."""
    cfg = EncoderConfig(**{**SMALL, **OPTIONS[options], **KINDS[kind]})
    parts = {"encoder": encoder.init, "mlm": heads.init_mlm}
    if kind == "memory":
        parts["decoder"] = decoder.init
    keys = jax.random.split(jax.random.key(0), len(parts))
    made = zip(parts.items(), keys, strict=True)
    return cfg, {name: init(key, cfg) for (name, init), key in made}


def make_rows(kind):
    """Return (batch of whole rows, their ids [B, T], batch of their prompts)."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 40, (B, T)).astype(np.int32)
    real = (np.arange(PROMPT) < SIZES[:, None]).astype(np.int32)
    whole = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    prompt = {"input_ids": ids[:, :PROMPT] * real, "attention_mask": real}
    if kind == "prefix":
        at = np.arange(T)
        steps = np.where(at < SIZES[:, None], 0, at + 1)
        whole["attention_steps"] = steps.astype(np.int32)
        prompt["attention_steps"] = np.zeros((B, PROMPT), np.int32)
    if kind == "memory":
        read = {"input_ids": draw.integers(0, 40, (B, 9)).astype(np.int32)}
        sizes = np.array([[9], [5], [2]])
        read["attention_mask"] = (np.arange(9) < sizes).astype(np.int32)
        whole, prompt = (
            {**{f"decoder_{k}": v for k, v in x.items()}, **read}
            for x in (whole, prompt)
        )
    return whole, ids, prompt


def logits_of(params, cfg, batch):
    if cfg.num_decoder_layers:
        memory = decoder.encode(params, cfg, batch)
        hidden = decoder.apply(params, cfg, batch, memory)
    else:
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    word = params["encoder"]["embeddings"]["word"]
    return heads.mlm_logits(params["mlm"], word, cfg, hidden)


@functools.cache
def programs(options, kind):
    cfg, _ = make(options, kind)
    model = incremental.make_decoder(cfg)
    return jax.jit(model.prefill, static_argnums=2), jax.jit(model.extend)


@pytest.mark.parametrize(
    "options, kind",
    [
        ("absolute", "causal"),
        ("windows", "causal"),
        ("relative", "causal"),
        ("relative", "prefix"),
        ("relative", "memory"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("scale", "causal"),
                ("shared", "causal"),
                ("skips", "causal"),
                ("absolute", "prefix"),
                ("windows", "prefix"),
                ("skips", "prefix"),
                ("absolute", "memory"),
                ("scale", "memory"),
            ]
        ),
    ],
)
def test_equal_to_whole_rows(options, kind):
    """Logits are equal for prompts of various lengths, then for one token or three."""
    cfg, params = make(options, kind)
    whole, ids, prompt = make_rows(kind)
    wanted = np.asarray(jax.jit(logits_of, static_argnums=1)(params, cfg, whole))
    prefill, extend = programs(options, kind)
    cache, logits = prefill(params, prompt, T)
    rows = np.arange(B)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    near(logits, wanted[rows, SIZES - 1])
    at = SIZES[:, None]
    for n in (1, 3, 1, 1):
        at = at[:, -1:] + np.arange(n)
        cache, logits = extend(params, cache, ids[rows[:, None], at])
        near(logits, wanted[rows[:, None], at])
        at = at + 1
    np.testing.assert_array_equal(cache.index, SIZES + 6)
    np.testing.assert_array_equal(cache.segments, np.arange(T) < SIZES[:, None] + 6)


def test_half_precision():
    """On a CPU the cache is f32; logits are those of the whole rows within bfloat16."""
    cfg, params = make("relative", "memory")
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    whole, ids, prompt = make_rows("memory")
    wanted = np.asarray(jax.jit(logits_of, static_argnums=1)(params, cfg, whole))
    model = incremental.make_decoder(cfg)
    cache, logits = jax.jit(model.prefill, static_argnums=2)(params, prompt, T)
    assert {x.dtype.name for layer in cache.layers for x in layer} == {"float32"}
    rows = np.arange(B)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=0.05)
    near(logits, wanted[rows, SIZES - 1])
    cache, logits = jax.jit(model.extend)(params, cache, ids[rows, SIZES][:, None])
    near(logits[:, 0], wanted[rows, SIZES])
    assert {x.dtype.name for layer in cache.layers for x in layer} == {"float32"}


def test_rows_of_a_cache_go_their_own_ways():
    """Rows can be repeated and dropped, as for beams; layers may be unstacked."""
    cfg, params = make("relative", "memory")
    _, ids, prompt = make_rows("memory")
    prefill, extend = programs("relative", "memory")
    cache, _ = prefill(params, prompt, T)
    rows = jnp.array([2, 0, 2])
    moved = jax.tree.map(lambda x: x[rows], cache)
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, cache)
    _, wanted = extend(params, cache, ids[:, 7:8])
    apart = incremental.unstack_layers(params, cfg)
    _, found = extend(apart, moved, jnp.asarray(ids)[rows, 7:8])
    np.testing.assert_allclose(found, wanted[rows], atol=1e-5)


def test_a_prompt_needs_no_tokens_behind_it():
    """The cache may have room for the prompt only, with the same logits."""
    _, params = make("absolute", "causal")
    _, _, prompt = make_rows("causal")
    prefill, _ = programs("absolute", "causal")
    cache, logits = prefill(params, prompt, PROMPT)
    assert cache.room == PROMPT and logits.shape == (B, 40)
    _, wide = prefill(params, prompt, T)
    np.testing.assert_allclose(logits, wide, atol=1e-5)


def test_what_is_refused():
    cfg, params = make("absolute", "causal")
    _, _, prompt = make_rows("causal")
    prefill = incremental.make_decoder(cfg).prefill
    with pytest.raises(ValueError, match="room=5 does not hold prompts of 6 tokens"):
        prefill(params, prompt, 5)
    with pytest.raises(ValueError, match="no packed rows"):
        prefill(params, {**prompt, "segment_ids": prompt["attention_mask"]}, T)
    cfg, params = make("absolute", "prefix")
    with pytest.raises(ValueError, match="with attention_steps alone"):
        incremental.make_decoder(cfg).prefill(params, prompt, T)

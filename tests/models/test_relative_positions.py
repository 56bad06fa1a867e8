# SPDX-License-Identifier: Apache-2.0
"""Relative positions: T5's buckets, and one table of biases for all layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fetched

from bertjax import UserError
from bertjax.models import attention_maps, encoder
from bertjax.models.attention import attend, choose_backend, describe_backend
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig, generator_config
from bertjax.models.embeddings import relative_bias, relative_buckets

L = 14
CFG = EncoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=L,
    type_vocab_size=0,
    initializer_range=0.4,
    pooler=False,
    position_embedding_type="none",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
)
# Distances at which buckets begin, with 32 buckets and a maximum distance of 128, by
# T5Attention._relative_position_bucket (memory - query) of transformers 5.23.
BEHIND = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]  # encoder, one side
DECODER = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def with_buckets(buckets, distance, is_decoder=False):
    return dataclasses.replace(
        CFG,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_decoder=is_decoder,
    )


def test_buckets_are_those_of_t5():
    away = np.arange(129)
    side = np.searchsorted(BEHIND, away, side="right") - 1
    found = relative_buckets(with_buckets(32, 128))
    np.testing.assert_array_equal(found[128::-1], side)
    np.testing.assert_array_equal(found[129:], 16 + side[1:])
    side = np.searchsorted(DECODER, away, side="right") - 1
    found = relative_buckets(with_buckets(32, 128, is_decoder=True))
    np.testing.assert_array_equal(found[128::-1], side)
    assert not found[129:].any()


@pytest.mark.slow
@pytest.mark.parametrize("is_decoder", [False, True])
def test_buckets_of_other_sizes_are_those_of_t5(is_decoder):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for buckets in (4, 8, 16, 32, 33, 64):
        for most in (40, 64, 100, 128, 200, 256, 512):
            cfg = with_buckets(buckets, most, is_decoder)
            away = np.arange(-2 * most, 2 * most + 1)
            wanted = t5.T5Attention._relative_position_bucket(
                torch.tensor(away), not is_decoder, buckets, most
            )
            found = relative_buckets(cfg)[np.clip(away, -most, most) + most]
            np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("positions", [None, "jumping"])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_bias_stands_by_each_pair(is_decoder, positions):
    cfg = dataclasses.replace(CFG, is_decoder=is_decoder)
    table = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    batch, place = {}, np.tile(np.arange(L), (3, 1))
    if positions:
        place = np.random.default_rng(1).integers(0, 20, (3, L)).astype(np.int32)
        batch = {"position_ids": jnp.asarray(place)}
    found = np.asarray(relative_bias(jnp.asarray(table), cfg, batch, L))
    assert found.shape == (3 if positions else 1, 2, L, L)
    buckets = relative_buckets(cfg)
    for b, q, k in np.ndindex(len(found), L, L):
        away = np.clip(place[b, k] - place[b, q], -6, 6)
        np.testing.assert_array_equal(found[b, :, q, k], table[buckets[away + 6]])


@pytest.mark.parametrize("rows", [1, 3])
def test_scores_take_it_before_the_softmax(rows):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (3, L, 2, 4)) for key in keys[:3])
    bias = 3 * jax.random.normal(keys[3], (rows, 2, L, L))
    real = jnp.asarray((np.arange(L) < np.array([[L], [9], [3]])).astype(np.int32))
    mask = AttentionMask(real, causal=True, bias=bias)
    scores = jnp.einsum("BQHK,BTHK->BHQT", q, k) / 2 + bias
    weights = jax.nn.softmax(jnp.where(mask.boolean, scores, -jnp.inf), axis=-1)
    wanted = jnp.einsum("BHQT,BTHK->BQHK", weights, v)
    np.testing.assert_allclose(attend(q, k, v, mask, 0.0, None), wanted, atol=1e-5)
    at = jnp.array([[2, 0], [8, 5], [1, 13]])
    some = jnp.take_along_axis(q, at[:, :, None, None], axis=1)
    few = attend(some, k, v, mask._replace(query_positions=at), 0.0, None)
    wanted = jnp.take_along_axis(wanted, at[:, :, None, None], axis=1)
    np.testing.assert_allclose(few, wanted, atol=1e-5)


apply = fetched(encoder.apply, static_argnums=1)
PARAMS = encoder.init(jax.random.key(0), CFG)
IDS = np.random.default_rng(2).integers(0, 40, (2, L)).astype(np.int32)
REAL = np.ones((2, L), np.int32)


def test_tokens_may_lie_anywhere_in_memory():
    """With position_ids and steps, the order of tokens in the row does not matter."""
    steps = np.array([[0] * 9 + [-1, -1, 1, 1, -2]] * 2, np.int32)
    places = np.array([[*range(9), 3, 4, 3, 4, 7]] * 2, np.int32)
    batch = {"input_ids": IDS, "attention_mask": REAL, "attention_steps": steps}
    batch["position_ids"] = places
    wanted = np.asarray(apply(PARAMS, CFG, batch).hidden)
    order = np.random.default_rng(3).permutation(L)
    moved = apply(PARAMS, CFG, {k: v[:, order] for k, v in batch.items()}).hidden
    np.testing.assert_allclose(moved, wanted[:, order], atol=2e-5)
    near = {**batch, "position_ids": places // 2}  # positions matter
    assert np.abs(np.asarray(apply(PARAMS, CFG, near).hidden) - wanted).max() > 0.1


@pytest.mark.parametrize("unroll", [0, 1])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_at_some_positions_and_in_a_loop(is_decoder, unroll):
    """Values and the gradient of the table, which all layers share, are the same."""
    cfg = dataclasses.replace(CFG, is_decoder=is_decoder, unroll=unroll, remat="full")
    plain = dataclasses.replace(CFG, is_decoder=is_decoder)
    at = np.array([[3, 0, 13], [13, 7, 7]], np.int32)
    batch = {"input_ids": IDS, "attention_mask": REAL}
    pull = np.random.default_rng(4).normal(size=(2, 3, 16))

    def loss(table, cfg, at):
        embeddings = {**PARAMS["embeddings"], "relative": table}
        params = {**PARAMS, "embeddings": embeddings}
        hidden = encoder.apply(params, cfg, batch, at=at).hidden
        if at is None:
            hidden = jnp.take_along_axis(hidden, AT[:, :, None], axis=1)
        return jnp.sum(hidden * pull)

    AT = at
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    table = PARAMS["embeddings"]["relative"]
    assert table.shape == (8, 2)
    found, wanted = gradient(table, cfg, at), gradient(table, plain, None)
    assert np.abs(wanted[1]).max() > 0.1
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_attention_maps_have_it():
    batch = {"input_ids": IDS, "attention_mask": REAL}
    params = jax.tree.map(jnp.asarray, PARAMS)
    # Bucket 1, for the key one position before the query, outweighs all others.
    table = jnp.zeros((8, 2)).at[1].set(50.0)
    params = {**params, "embeddings": {**params["embeddings"], "relative": table}}
    found = jax.jit(attention_maps.attention_maps, static_argnums=1)
    maps = np.asarray(found(params, CFG, batch))
    q = np.arange(1, L)
    np.testing.assert_allclose(maps[..., q, q - 1], 1.0, atol=1e-3)


def test_what_is_refused():
    cfg = dataclasses.replace(CFG, attention="tpu", attention_probs_dropout_prob=0.0)
    adds = "it has no position bias: model.relative_attention_num_buckets"
    said = describe_backend(cfg, [128])
    assert said == f"xla (not fused: {adds}; not splash: {adds})"
    kind = AttentionMask(jnp.ones((1, 8)), bias=jnp.zeros((1, 1, 8, 8))).kind
    for backend in ("fused", "splash", "cudnn", "lab.softmax"):
        with pytest.raises(
            UserError, match=f"attention={backend}: it has no position bias"
        ):
            choose_backend(backend, (1, 128, 2, 64), 0.0, kind=kind)
    for buckets, distance, is_decoder, words in (
        (3, 128, False, "there must be 4 buckets or more, or 0"),
        (1, 128, True, "there must be 2 buckets or more, or 0"),
        (32, 8, False, "the first 8 distances have a bucket each"),
        (32, 16, True, "the first 16 distances have a bucket each"),
    ):
        with pytest.raises(UserError, match=words):
            with_buckets(buckets, distance, is_decoder)
    with pytest.raises(UserError, match="electra's generator reads"):
        generator_config(CFG, 8)

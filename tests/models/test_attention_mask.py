# SPDX-License-Identifier: Apache-2.0
"""Attention masks: the rule of steps against tables by hand, and no leaks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fetched

from bertjax import UserError
from bertjax.models import encoder, stacked_layers
from bertjax.models.attention_mask import (
    AttentionMask,
    is_visible,
    make_attention_mask,
)
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import flops_per_token, keys_seen

Layout = tuple[np.ndarray, np.ndarray]  # steps [n], visibility [n, n] (query, key)


# ---------------------------------------------------------------- tables by hand
def causal(draw) -> Layout:
    n = draw.integers(1, 7)
    return np.arange(1, n + 1), np.tril(np.ones((n, n), bool))


def prefix_lm(draw) -> Layout:
    """A prefix visible to all tokens, then a causal response (Raffel et al. 2020)."""
    p, n = draw.integers(0, 4), draw.integers(1, 5)
    table = np.tril(np.ones((p + n, p + n), bool))
    table[:, :p] = True
    return np.r_[np.zeros(p, int), 1 : n + 1], table


def pseudo_masked(draw) -> Layout:
    """Context, then the [P] and the original tokens of each block (Bao et al. 2020)."""
    kinds = [("context", 0)] * draw.integers(1, 4)
    for block in range(1, draw.integers(2, 4)):
        size = draw.integers(1, 3)
        kinds += [("pseudo", block)] * size + [("original", block)] * size

    def sees(row, column) -> bool:
        (kind, i), (other, j) = row, column
        if other == "context":
            return True
        if other == "original":
            return {"context": False, "original": j <= i, "pseudo": j < i}[kind]
        return kind == "pseudo" and i == j

    table = np.array([[sees(row, column) for column in kinds] for row in kinds])
    return np.array([-b if kind == "pseudo" else b for kind, b in kinds]), table


def block_diffusion(draw) -> Layout:
    """[noised; clean], with the mask of three parts of Arriola et al. 2025."""
    blocks, size = draw.integers(1, 4), draw.integers(1, 3)
    n = blocks * size
    is_clean = np.arange(2 * n) >= n
    block = np.arange(2 * n) % n // size
    query, key = block[:, None], block[None]
    clean_query, clean_key = is_clean[:, None], is_clean[None]
    diagonal = (query == key) & (clean_query == clean_key)
    offset = (query > key) & clean_key & ~clean_query
    block_causal = (query >= key) & clean_key & clean_query
    return np.where(is_clean, 1 + block, -1 - block), diagonal | offset | block_causal


def two_streams(draw) -> Layout:
    """The content stream in a random order, then the query stream (Yang et al. 2019).

    A query may see itself, because it contains only its position.
    """
    n = draw.integers(1, 6)
    order = draw.permutation(n)
    content = order[:, None] >= order[None]
    query = order[:, None] > order[None]
    table = np.block(
        [[content, np.zeros_like(content)], [query, np.eye(n, dtype=bool)]]
    )
    return np.r_[1 + order, -1 - order], table


SYSTEMS = (causal, prefix_lm, pseudo_masked, block_diffusion, two_streams)


def lay_out(draw, system, length=30, packed=True, shuffled=True):
    """Put sequences of a system into a row: (segments [L], steps [L], table [L, L])."""
    segments, steps = np.zeros(length, np.int32), np.zeros(length, np.int32)
    table = np.zeros((length, length), bool)
    begin, number = 0, 0
    while number < (3 if packed else 1):
        own, mine = system(draw)
        end = begin + len(own)
        if end > length:
            break
        number += 1
        segments[begin:end], steps[begin:end] = number, own
        table[begin:end, begin:end] = mine
        begin = end
    table[begin:, begin:] = True  # padding sees padding
    where = draw.permutation(length) if shuffled else np.arange(length)
    return segments[where], steps[where], table[np.ix_(where, where)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_are_the_tables(system, packed):
    draw = np.random.default_rng(3)
    rows = [lay_out(draw, system, packed=packed) for _ in range(200)]
    segments, steps, tables = map(np.stack, zip(*rows, strict=True))
    name = "segment_ids" if packed else "attention_mask"
    mask = make_attention_mask({name: segments, "attention_steps": steps})
    found = np.asarray(mask.boolean)
    np.testing.assert_array_equal(found[:, 0], tables)
    assert found[:, 0, range(30), range(30)].all()  # each token sees itself
    plain = is_visible(steps[:, :, None], steps[:, None])
    assert plain.dtype == bool  # for numpy arrays too
    real = segments[:, :, None] == segments[:, None]
    np.testing.assert_array_equal(plain & real, tables)
    some = draw.integers(0, 30, (200, 5)).astype(np.int32)
    taken = np.take_along_axis(tables, some[:, :, None], axis=1)
    few = mask._replace(query_positions=jnp.asarray(some)).boolean
    np.testing.assert_array_equal(np.asarray(few)[:, 0], taken)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_a_causal_mask_is_its_table(packed, window):
    draw = np.random.default_rng(4)
    segments = np.sort(draw.integers(0, 4 if packed else 2, (20, 12)), axis=1)
    segments = np.where(draw.random((20, 1)) < 0.5, segments, segments[:, ::-1])
    batch = {"segment_ids" if packed else "attention_mask": segments}
    found = np.asarray(make_attention_mask(batch, window, causal=True).boolean)[:, 0]
    for row, table in zip(segments, found, strict=True):
        for q in range(12):
            for k in range(12):
                near = not window or q - k <= window // 2
                assert table[q, k] == (k <= q and near and row[q] == row[k])


def test_a_window_over_steps_is_measured_by_positions():
    """In [noised; clean], the clean copy of a neighbor is far away in the row."""
    n, near = 8, 2
    batch = {
        "attention_mask": np.ones((1, 2 * n), np.int32),
        "attention_steps": np.r_[-1 - np.arange(n), 1 + np.arange(n)][None],
        "position_ids": np.tile(np.arange(n), 2)[None],
    }
    found = np.asarray(make_attention_mask(batch, 2 * near).boolean)[0, 0]
    place = np.arange(n)
    close = abs(place[:, None] - place) <= near
    np.testing.assert_array_equal(found[:n, :n], np.eye(n, dtype=bool))
    np.testing.assert_array_equal(found[:n, n:], close & (place[:, None] > place))
    np.testing.assert_array_equal(found[n:, n:], close & (place[:, None] >= place))
    assert not found[n:, :n].any()
    at = jnp.array([[3, 12]])
    few = make_attention_mask(batch, 2 * near)._replace(query_positions=at).boolean
    np.testing.assert_array_equal(few[0, 0], found[np.array([3, 12])])


def test_what_is_refused():
    batch = {"attention_mask": np.ones((2, 4), np.int32)}
    steps = {**batch, "attention_steps": np.zeros((2, 4), np.int32)}
    with pytest.raises(ValueError, match=r"attention_steps and model\.is_decoder=True"):
        make_attention_mask(steps, causal=True)
    with pytest.raises(ValueError, match=r"attention_steps has shape \(2, 3\), not"):
        make_attention_mask({**batch, "attention_steps": np.zeros((2, 3), np.int32)})


# ---------------------------------------------------------------- in an encoder
L = 24
CFG = EncoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    unroll=1,  # one body: quick to compile
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=L,
    type_vocab_size=0,
    initializer_range=0.4,
    pooler=False,
)
DECODER = dataclasses.replace(CFG, is_decoder=True)


@functools.cache
def params_of(cfg: EncoderConfig):
    return encoder.init(jax.random.key(0), cfg)


apply = fetched(encoder.apply, static_argnums=1)


def hidden(cfg, batch, at=None) -> np.ndarray:
    found = apply(params_of(cfg), cfg, batch, None, at).hidden
    return np.asarray(found.astype(jnp.float32))


def check_leaks(cfg: EncoderConfig, row: dict[str, np.ndarray], table: np.ndarray):
    """Change each token in turn: hidden states change only where the table allows."""
    ids = np.random.default_rng(5).integers(0, 40, L).astype(np.int32)
    changed = (ids + np.eye(L, dtype=np.int32) * 7) % 40
    rows = {k: np.tile(v, (L + 1, 1)) for k, v in row.items()}
    found = hidden(cfg, {"input_ids": np.concatenate([ids[None], changed]), **rows})
    moved = (found[1:] != found[0]).any(axis=-1).T  # [hidden state, changed token]
    paths = table.astype(int)
    may = (paths @ paths @ paths) > 0  # a path through three layers
    assert not (moved & ~may).any()
    if cfg.dtype == "float32":
        assert moved[may].all()
    else:  # the effect of a distant token may round to 0
        assert moved[table].mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_leaks_through_steps(system, dtype):
    cfg = dataclasses.replace(CFG, dtype=dtype)
    draw = np.random.default_rng(6)
    for packed in (False, True):
        segments, steps, table = lay_out(draw, system, L, packed)
        row = {"attention_mask": (segments > 0).astype(np.int32)}
        # Unpacked rows are packed rows of one sequence, so both run one program.
        row |= {"attention_steps": steps, "segment_ids": segments}
        check_leaks(cfg, row, table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 4])
def test_nothing_leaks_through_a_decoder(window, dtype):
    cfg = dataclasses.replace(DECODER, dtype=dtype, local_attention=window)
    segments = np.repeat([1, 2, 0], [9, 10, 5]).astype(np.int32)
    place = np.arange(L)
    behind = place[:, None] - place
    table = (behind >= 0) & (segments[:, None] == segments)
    if window:
        table &= behind <= window // 2
    row = {"attention_mask": (segments > 0).astype(np.int32), "segment_ids": segments}
    check_leaks(cfg, row, table)


@pytest.mark.parametrize("positions", ["absolute", "rope"])
def test_padding_on_either_side_changes_no_decoder(positions):
    cfg = dataclasses.replace(DECODER, position_embedding_type=positions)
    lengths, draw = np.array([L, 9, 1]), np.random.default_rng(7)
    right = (np.arange(L) < lengths[:, None]).astype(np.int32)
    left = right[:, ::-1]
    ids = draw.integers(0, 40, (3, L)).astype(np.int32)
    shifted = np.zeros_like(ids)
    shifted[left > 0] = ids[right > 0]
    places = np.maximum(np.cumsum(left, axis=1) - 1, 0).astype(np.int32)
    batch = {"input_ids": shifted, "attention_mask": left}
    if positions == "absolute":  # rotary positions are relative
        batch["position_ids"] = places
    a = hidden(cfg, {"input_ids": ids, "attention_mask": right})[right > 0]
    np.testing.assert_allclose(hidden(cfg, batch)[left > 0], a, atol=2e-5)
    alone = hidden(cfg, {"input_ids": ids[1:2, :9], "attention_mask": right[1:2, :9]})
    np.testing.assert_allclose(a[L : L + 9], alone[0], atol=2e-5)


def half_padding() -> tuple[np.ndarray, np.ndarray]:
    """Return attention_mask and steps [4, L]: rows with the second half padding, with
    the first half padding, with one token, and full."""
    real = np.zeros((4, L), np.int32)
    real[0, : L // 2], real[1, L // 2 :], real[2, 5], real[3] = 1, 1, 1, 1
    return real, (real * np.arange(1, L + 1) * np.array([1, -1, -1, 1])[:, None])


@pytest.mark.parametrize(
    ("is_decoder", "dtype"), [(False, "bfloat16"), (True, "float32")]
)
def test_rows_of_padding_are_finite(is_decoder, dtype):
    cfg = dataclasses.replace(CFG, is_decoder=is_decoder, dtype=dtype)
    real, steps = half_padding()
    batch = {"input_ids": np.ones((4, L), np.int32), "attention_mask": real}
    if not is_decoder:
        batch["attention_steps"] = steps.astype(np.int32)

    def loss(params):
        out = encoder.apply(params, cfg, batch, jax.random.key(1)).hidden
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    value, grads = jax.jit(jax.value_and_grad(loss))(params_of(cfg))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(("is_decoder", "unroll"), [(False, 0), (True, 1)])
def test_the_last_layer_at_some_positions(is_decoder, unroll):
    cfg = dataclasses.replace(CFG, is_decoder=is_decoder, unroll=unroll)
    draw = np.random.default_rng(8)
    segments, steps, _ = lay_out(draw, pseudo_masked, L, shuffled=False)
    batch = {
        "input_ids": draw.integers(0, 40, (1, L)).astype(np.int32),
        "attention_mask": (segments > 0).astype(np.int32)[None],
        "segment_ids": segments[None],
    }
    if not is_decoder:
        batch["attention_steps"] = steps[None]
    at = np.array([[7, 0, 23, 7, 11]], np.int32)
    wanted = hidden(cfg, batch)[:, at[0]]
    np.testing.assert_allclose(hidden(cfg, batch, at), wanted, atol=1e-6)


def test_a_causal_mask_is_steps_that_count_up():
    ids = np.random.default_rng(9).integers(0, 40, (2, L)).astype(np.int32)
    real = (np.arange(L) < np.array([[L], [11]])).astype(np.int32)
    batch = {"input_ids": ids, "attention_mask": real}
    steps = {**batch, "attention_steps": real * np.arange(1, L + 1, dtype=np.int32)}
    a, b = hidden(DECODER, batch), hidden(CFG, steps)
    np.testing.assert_allclose(a[real > 0], b[real > 0], atol=1e-6)


def test_embeddings_in_the_place_of_ids():
    """Given word embeddings have the effect of their ids; positions are added too."""
    real = np.ones((2, L), np.int32)
    ids = np.random.default_rng(10).integers(0, 40, (2, L)).astype(np.int32)
    for changes in ({}, dict(embedding_size=8, position_embedding_type="rope")):
        cfg = dataclasses.replace(DECODER, **changes)
        params = params_of(cfg)
        wanted = encoder.apply(params, cfg, {"input_ids": ids, "attention_mask": real})
        words = params["embeddings"]["word"][ids]
        assert words.shape == (2, L, cfg.embedding_width)
        batch = {"attention_mask": real}
        found = encoder.apply(params, cfg, batch, inputs=words)
        np.testing.assert_array_equal(found.hidden, wanted.hidden)


# ---------------------------------------------------------------- the last token
@pytest.mark.parametrize("packed", [False, True])
def test_the_last_token_is_pooled(packed):
    """It is also pooled if the last layer is computed only at some other positions."""
    cfg = dataclasses.replace(DECODER, pooler=True, classifier_pooling="last")
    real = np.ones((2, L), np.int32)
    real[0, 9:] = 0  # padding at the end
    real[1, :4] = 0  # and at the beginning
    last = np.array([[8], [L - 1]])
    batch = {
        "input_ids": np.random.default_rng(11).integers(0, 40, (2, L)).astype(np.int32),
        "attention_mask": real,
    }
    if packed:
        batch["segment_ids"] = np.where(np.arange(L) < 7, 1, 2) * real
        batch["cls_positions"] = np.array([[0, 7], [4, 7]], np.int32)
        last = np.array([[6, 8], [6, L - 1]])
    out = apply(params_of(cfg), cfg, batch)
    taken = np.take_along_axis(np.asarray(out.hidden), last[..., None], axis=1)
    dense = params_of(cfg)["pooler"]
    wanted = np.tanh(taken @ dense["kernel"] + dense["bias"])
    wanted = wanted if packed else wanted[:, 0]
    np.testing.assert_allclose(out.pooled, wanted, atol=1e-5)
    at = np.array([[3], [5]], np.int32)
    few = apply(params_of(cfg), cfg, batch, None, at)
    np.testing.assert_allclose(few.pooled, wanted, atol=1e-5)
    np.testing.assert_allclose(
        few.hidden[:, 0], np.asarray(out.hidden)[[0, 1], at[:, 0]], atol=1e-6
    )


def test_the_first_token_of_a_decoder_says_nothing():
    cfg = dataclasses.replace(DECODER, pooler=True)
    batch = {k: np.ones((1, L), np.int32) for k in ("input_ids", "attention_mask")}
    with pytest.raises(UserError, match=r"^model\.classifier_pooling=cls: .*alone"):
        encoder.apply(params_of(cfg), cfg, batch)
    encoder.apply(params_of(cfg), encoder.without_pooler(cfg), batch)


def test_layers_apart_are_causal_too():
    batch = {k: np.ones((1, L), np.int32) for k in ("input_ids", "attention_mask")}
    apart = stacked_layers.unstack(params_of(DECODER), DECODER)
    found = encoder.apply(apart, DECODER, batch).hidden
    np.testing.assert_allclose(found, hidden(DECODER, batch), atol=1e-5)


def test_flops_count_the_keys_that_a_causal_query_sees():
    cfg = dataclasses.replace(DECODER, local_attention=9, global_attn_every_n_layers=3)
    behind = [min(i, 4) + 1 for i in range(20)]
    wanted = np.mean(np.arange(20) + 1), np.mean(behind), np.mean(behind)
    assert keys_seen(cfg, 20) == pytest.approx(wanted)
    assert keys_seen(cfg, 3) == pytest.approx((2, 2, 2))
    whole, half = (flops_per_token(c, 20, 20) for c in (CFG, DECODER))
    assert whole - half == pytest.approx(12 * 16 * 3 * (20 - 10.5))
    bare = dataclasses.replace(DECODER, classifier_transform=False)
    assert half - flops_per_token(bare, 20, 20) == pytest.approx(6 * 16 * 16)


def test_masks_that_say_nothing_new_are_as_they_were():
    keys = jnp.array([[1, 1, 0]])
    assert AttentionMask(keys).boolean.shape == (1, 1, 1, 3)
    assert AttentionMask(keys).kind == (False, False, False, False, False)

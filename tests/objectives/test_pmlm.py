# SPDX-License-Identifier: Apache-2.0
"""A pseudo-masked LM in one pass computes the same as in several passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder
from host_half import make_half

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.measuring.synthetic_data import synthetic_tokenizer
from bertjax.models import encoder, heads
from bertjax.models.attention_mask import make_attention_mask
from bertjax.objectives.make_objective import make_objective

V, L, B = 50, 40, 6
CFG = tiny_encoder(
    V, L, hidden_size=32, num_hidden_layers=3, intermediate_size=64, pooler=False
)
BIASED = dataclasses.replace(CFG, relative_attention_num_buckets=8)
TOKENIZER = synthetic_tokenizer(V)
# Tolerances for rounding; relative: float32 with relative position biases.
KINDS = {"float32": 2e-6, "bfloat16": 0.05, "relative": 2e-6}
cases = pytest.mark.parametrize("packed", [False, True])
kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def rows(packed, options=""):
    """Make rows of up to 24 tokens with at most 8 predictions."""
    half = make_half(f"pmlm{options}", TOKENIZER, L, rate=0.3, corruption="0.6,0.3,0.1")
    R = half.raw
    assert (R, half.predictions) == (24, 8)
    used = np.array([R, R, R - 1, 17, 9, 3])[:, None]
    real = np.arange(R) < used
    draw = counter_rng.fold(3, np.arange(B))[:, None]
    ids = 5 + counter_rng.below(draw, np.arange(R), V - 5)
    ids = np.where(real, ids, 0)
    ids[:, 0] = 2
    np.put_along_axis(ids, used - 1, 3, 1)
    arrays = {"attention_mask": real, "token_type_ids": (ids % 2) * real}
    if packed:
        first = used // 2
        np.put_along_axis(ids, first, 2, 1)
        second = np.arange(R) >= first
        arrays["segment_ids"] = (1 + second) * real
        arrays["position_ids"] = (np.arange(R) - first * second) * real
    arrays = {k: v.astype(np.int32) for k, v in (arrays | {"input_ids": ids}).items()}
    batch = half.make(GatheredRows(arrays, draw[:, 0], np.arange(B), np.arange(B)))
    assert (batch["attention_steps"].max(axis=1)[:5] > 1).all()
    return batch


@functools.cache
def parameters():
    """Make enlarged parameters, so that visible tokens have an effect."""
    objective, _ = make_objective("pmlm", BIASED)

    def enlarge(path, x):
        name = jax.tree_util.keystr(path)
        return x * (5 if "kernel" in name else 50 if "relative" in name else 1)

    params = objective.init(jax.random.key(0))
    return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache
def program(kind):
    cfg = BIASED if kind == "relative" else dataclasses.replace(CFG, dtype=kind)
    return jax.jit(lambda params, batch: encoder.apply(params, cfg, batch).hidden)


READ = "input_ids attention_mask token_type_ids segment_ids position_ids"
READ = (*READ.split(), "attention_steps")


def encode(batch, kind="float32"):
    """Return the hidden states of numpy arrays, f32 [B, L, D]."""
    batch = {name: batch[name] for name in READ if name in batch}
    hidden = program(kind)(parameters()["encoder"], batch)
    return np.asarray(hidden.astype(jnp.float32))


def with_ids(batch, where):
    """Return the batch with other ids at `where`, bool [B, L]."""
    ids = batch["input_ids"]
    return batch | {"input_ids": np.where(where, (ids + 11) % V, ids)}


def roles(batch):
    """Return which slots are text, pseudo masks and originals, and the blocks."""
    slots, steps = np.arange(L), batch["attention_steps"]
    real = batch["attention_mask"] > 0
    assert (np.sign(steps) == [0] * 24 + [-1] * 8 + [1] * 8)[real].all()
    kinds = (slots < 24, (slots >= 24) & (slots < 32), slots >= 32)
    return (*(kind & real for kind in kinds), np.abs(steps))


def same(a, b, where, tolerance=0.0):
    assert where.any()
    np.testing.assert_allclose(a[where], b[where], rtol=0, atol=tolerance)


# ---------------------------------------------------------------- who sees whom
@cases
@pytest.mark.parametrize("options", ["", ":blocks=0.0"])
def test_the_table_of_the_paper(packed, options):
    """Compare the mask with a table written out for each pair of slots."""
    batch = rows(packed, options)
    mask = np.asarray(make_attention_mask(batch).boolean)[:, 0]
    text, pseudo, original, block = roles(batch)
    sequence = batch["segment_ids"] if packed else batch["attention_mask"]
    for r in range(B):
        for q in np.flatnonzero(batch["attention_mask"][r]):
            for k in np.flatnonzero(batch["attention_mask"][r]):
                i, j = block[r, q], block[r, k]
                if text[r, k]:
                    seen = True
                elif text[r, q]:
                    seen = False
                elif original[r, k]:
                    seen = j <= i if original[r, q] else j < i
                else:
                    seen = bool(pseudo[r, q]) and j == i
                seen &= sequence[r, q] == sequence[r, k]
                assert mask[r, q, k] == seen, (r, q, k)
    if options:  # blocks of one token: an autoregressive model in the blocks' order
        for r in range(B):
            steps = block[r, pseudo[r]]
            assert sorted(steps) == [*range(1, len(steps) + 1)]


# ---------------------------------------------------------------- four properties
@cases
@kinds
def test_masks_see_what_a_masked_lm_sees(packed, kind):
    batch = rows(packed)
    own = {n: v[:, :24] for n, v in batch.items() if n in READ[:-1]}
    alone = encode(own, kind)
    text = roles(batch)[0][:, :24]
    same(encode(batch, kind)[:, :24], alone, text, KINDS[kind])


@cases
@kinds
def test_one_pass_is_step_by_step(packed, kind):
    """Step i of a row has its text, the originals of the blocks before i, and the
    pseudo masks of block i; all other slots are padding with any ids."""
    batch = rows(packed)
    whole = encode(batch, kind)
    _, pseudo, original, block = roles(batch)
    for step in range(1, block.max() + 1):
        later = (original & (block >= step)) | (pseudo & (block != step))
        now = {
            name: np.where(later, 0, batch[name])
            for name in ("attention_mask", "segment_ids", "attention_steps")
            if name in batch
        }
        alone = encode(with_ids(batch | now, later), kind)
        same(alone, whole, pseudo & (block == step), KINDS[kind])


@cases
@kinds
def test_originals_are_seen_by_later_blocks_alone(packed, kind):
    """Earlier blocks do not change in a single bit: hidden tokens have weight 0."""
    batch = rows(packed)
    whole = encode(batch, kind)
    text, pseudo, original, block = roles(batch)
    sequence = batch["segment_ids"] if packed else batch["attention_mask"]
    for step in range(1, block.max() + 1):
        changed = original & (block == step)
        other = encode(with_ids(batch, changed), kind)
        same(other, whole, text)
        same(other, whole, pseudo & (block <= step))
        if step > 1:
            same(other, whole, original & (block < step))
        touched = (sequence[:, :, None] == sequence[:, None]) & changed[:, None]
        later = pseudo & (block > step) & touched.any(axis=2)
        moved = np.abs(other - whole).max(axis=2)
        assert (moved[later] > 1e-3).all() and (moved[changed] > 1e-3).all()


@cases
@kinds
def test_pseudo_masks_are_seen_by_their_own_block_alone(packed, kind):
    batch = rows(packed)
    whole = encode(batch, kind)
    text, pseudo, original, block = roles(batch)
    for step in range(1, block.max() + 1):
        changed = pseudo & (block == step)
        other = encode(with_ids(batch, changed), kind)
        same(other, whole, (text | original | pseudo) & ~changed)
        assert (np.abs(other - whole).max(axis=2)[changed] > 1e-3).all()


def test_a_single_block_sees_no_original():
    batch = rows(False)
    batch = batch | {"attention_steps": np.sign(batch["attention_steps"])}
    text, pseudo, original, _ = roles(batch)
    other = encode(with_ids(batch, original))
    same(other, encode(batch), text | pseudo)


# ---------------------------------------------------------------- losses
@functools.cache
def measure(name):
    objective, _ = make_objective(name, CFG)
    return jax.jit(lambda batch: objective.sums(parameters(), batch, None))


@cases
def test_the_loss_is_the_sum_of_two(packed):
    objective, cfg = make_objective("pmlm", CFG)
    assert not cfg.pooler and not objective.everywhere and not objective.coefficients
    assert objective.needs == {"pmlm:blocks=0.4,longest=6"}
    batch = rows(packed)
    assert [*objective.weights(batch)] == ["mlm_loss", "par_loss"]
    params, hidden = parameters(), encode(batch)
    head = params["mlm"]
    assert params.keys() == {"encoder", "mlm"}
    x = np.take_along_axis(hidden, batch["par_positions"][..., None], 1)
    word = params["encoder"]["embeddings"]["word"]
    logits = heads.mlm_logits(head, word, CFG, jnp.asarray(x))
    likely = np.asarray(jax.nn.log_softmax(logits))
    true = np.take_along_axis(likely, batch["par_ids"][..., None], -1)[..., 0]
    sums = measure("pmlm")(batch)
    want = -(true * batch["par_weights"]).sum()
    np.testing.assert_allclose(sums["par_loss"].value, want, rtol=1e-5)
    right = (likely.argmax(-1) == batch["par_ids"]) * batch["par_weights"]
    assert sums["par_accuracy"].value == right.sum()
    assert sums.keys() == {"mlm_loss", "mlm_accuracy", "par_loss", "par_accuracy"}


@cases
def test_autoencoding_is_a_masked_lm(packed):
    """Compare with the masked LM of the same text, without copies."""
    batch = rows(packed)
    own = {n: v[:, :24] for n, v in batch.items() if n in READ[:-1]}
    own |= {n: v for n, v in batch.items() if n.startswith("mlm")}
    both, alone = measure("pmlm")(batch), measure("mlm")(own)
    for term in ("mlm_loss", "mlm_accuracy"):
        np.testing.assert_allclose(both[term].value, alone[term].value, rtol=1e-5)


def test_rows_without_predictions_weigh_nothing():
    batch = rows(False)
    none = {n: 0 * batch[n] for n in ("mlm_weights", "par_weights")}
    sums = measure("pmlm")(batch | none)
    assert all(total.value == total.weight == 0 for total in sums.values())


def test_decoders_and_other_heads_are_refused():
    decoder = dataclasses.replace(CFG, is_decoder=True)
    with pytest.raises(UserError, match="is_decoder=True: a pseudo"):
        make_objective("pmlm", decoder)
    with pytest.raises(UserError, match="stands alone"):
        make_objective("pmlm+nsp", CFG)

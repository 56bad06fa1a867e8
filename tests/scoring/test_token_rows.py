# SPDX-License-Identifier: Apache-2.0
"""Causal rows and windows against one run per prefix."""

import dataclasses

import jax
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.scoring.token_rows import (
    Row,
    Window,
    causal_row,
    cut_windows,
    make_row_scorer,
)

ENCODER = EncoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
    initializer_range=0.5,
    pooler=False,
)
DECODER = dataclasses.replace(ENCODER, is_decoder=True)
# GPT's head: the word embeddings, without parameters of its own.
BARE = dataclasses.replace(DECODER, classifier_transform=False, decoder_bias=False)
BEGIN, PAD = 2, 0
TEXT = np.random.default_rng(1).integers(5, 40, 20)


def model(cfg):
    a, b = jax.random.split(jax.random.key(3))
    params = {"encoder": encoder.init(a, cfg), "mlm": heads.init_mlm(b, cfg)}
    return {name: part for name, part in params.items() if part}


@jax.jit  # shared by all tests
def logits_of(params, ids, mask, positions):
    """Return ln p of all tokens of rows, by the model without the scorer's code."""
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    cfg = BARE if "mlm" not in params else DECODER
    hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    word = params["encoder"]["embeddings"]["word"]
    return jax.nn.log_softmax(
        heads.mlm_logits(params.get("mlm", {}), word, cfg, hidden)
    )


def one_by_one(params, tokens):
    """Return ln p of each token after the first, f64, with one row per prefix."""
    width = len(TEXT) + 1  # the same for all, to compile once
    before = width - np.arange(1, width)[:, None]  # the prefix ends the row
    column = np.arange(width)[None]
    mask = column >= before
    ids = np.zeros((width - 1, width), np.int32)
    for j in range(1, len(tokens)):
        ids[j - 1, width - j :] = tokens[:j]
    positions = np.maximum(column - before, 0)
    found = logits_of(params, ids, mask.astype(np.int32), positions)
    each = [found[j - 1, -1, tokens[j]] for j in range(1, len(tokens))]
    return np.array(each, np.float64)


def score(cfg, rows, **more):
    run = make_row_scorer(cfg, model(cfg), PAD, **more)
    sizes = np.array([len(row.ids) for row in rows])
    counts = np.array([len(row.truth) for row in rows])
    return run(sizes, counts, lambda i: rows[i])


def whole(n, begin=BEGIN):
    return causal_row(TEXT, Window(0, 0, n), begin)


@pytest.mark.parametrize(
    "cfg, steps", [(ENCODER, True), (DECODER, False), (BARE, False)]
)
def test_sums_are_those_of_a_run_step_by_step(cfg, steps):
    """Encoders with steps, and decoders, have the sums of one run per prefix."""
    want = one_by_one(model(cfg), np.append(BEGIN, TEXT))
    parts = [1, 7, 12, 20]
    got = score(cfg, [whole(n) for n in parts], steps=steps)
    assert got == pytest.approx([want[:n].sum() for n in parts], rel=1e-5)
    # The scores of a prefix and of the rest after it add up to the whole.
    rest = causal_row(TEXT, Window(0, 12, 20), BEGIN)
    assert got[2] + score(cfg, [rest], steps=steps) == pytest.approx(got[3], rel=1e-5)
    # Without a begin token the first is not scored, as in transformers.
    bare = score(cfg, [whole(20, None)], steps=steps)
    assert bare == pytest.approx(one_by_one(model(cfg), TEXT).sum(), rel=1e-5)


@pytest.mark.parametrize("cfg, steps", [(ENCODER, True), (DECODER, False)])
def test_what_follows_changes_nothing(cfg, steps):
    row = whole(20)
    first = Row(row.ids, row.positions[:9], row.truth[:9])
    other = Row(np.append(row.ids[:9], [7] * 11), *first[1:])
    one, two = score(cfg, [first, other], steps=steps)
    assert one == two
    seen = make_row_scorer(ENCODER, model(ENCODER), PAD)  # with full attention
    sizes, counts = np.array([20, 20]), np.array([9, 9])
    one, two = seen(sizes, counts, lambda i: (first, other)[i])
    assert abs(one - two) > 1e-3


def test_batches_do_not_matter():
    rows = [whole(n) for n in (3, 20, 1, 11, 20, 6)]
    want = score(DECODER, rows)
    assert want[1] == want[4]
    assert score(DECODER, rows, batch_size=4) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("begin", [BEGIN, None])
@pytest.mark.parametrize("room, stride", [(8, 4), (8, 8), (9, 2), (32, 16)])
def test_windows_equal_a_direct_computation(begin, room, stride):
    """The direct computation is that of transformers' guide to perplexity of
    fixed-length models."""
    if begin is None:
        stride = min(stride, room - 1)
    params, want, told = model(DECODER), 0.0, 0
    for start in range(0, len(TEXT), stride):
        end = min(start + room, len(TEXT))
        tokens = TEXT[start:end]
        if begin is not None:
            tokens = np.append(begin, tokens)
        costs = one_by_one(params, tokens)
        new = costs[-min(end - told, len(costs)) :]
        want, told = want + new.sum(), end
        if end == len(TEXT):
            break
    windows = cut_windows(len(TEXT), room, stride)
    covered = [i for w in windows for i in range(w.first, w.end)]
    assert covered == list(range(len(TEXT))), "each token once"
    rows = [causal_row(TEXT, window, begin) for window in windows]
    assert score(DECODER, rows).sum() == pytest.approx(want, rel=1e-5)


def test_the_row_of_the_worked_example():
    row = causal_row(np.array([17, 25, 31, 3]), Window(0, 2, 4), 2)
    assert [part.tolist() for part in row] == [[2, 17, 25, 31], [2, 3], [31, 3]]
    row = causal_row(np.array([17, 25, 31]), Window(0, 0, 3), None)
    assert [part.tolist() for part in row] == [[17, 25], [0, 1], [25, 31]]


def test_a_broken_model_is_said():
    params = jax.tree.map(lambda x: x * np.nan, model(DECODER))
    run = make_row_scorer(DECODER, params, PAD)
    with pytest.raises(UserError, match="not finite"):
        run(np.array([5]), np.array([5]), lambda i: whole(5))

# SPDX-License-Identifier: Apache-2.0
"""RetroMAE: what its decoder sees of a text, and that it learns from the vector."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps
from host_half import make_half

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.measuring.synthetic_data import synthetic_tokenizer
from bertjax.objectives import retromae
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh

V, L, B = 60, 20, 8
TOKENIZER = synthetic_tokenizer(V)  # pieces 8, 12, 16, ... continue a word
CFG = tiny_encoder(V, L, num_hidden_layers=2, initializer_range=0.3)
SHAPES = {
    "bert": {},
    "pre": {"norm_position": "pre", "final_norm": True},
    "albert": {"embedding_size": 8, "num_hidden_groups": 1},
    "windows": {"local_attention": 4, "global_attn_every_n_layers": 2},
    "rope": {"position_embedding_type": "rope"},
    "modernbert": {
        "position_embedding_type": "rope",
        "rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "norm_position": "pre",
        "first_attention_norm": False,
        "final_norm": True,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_type": "glu",
    },
}
cases = pytest.mark.parametrize("packed", [False, True])


def make_rows(packed=False, seed=0, n=B):
    """Gather rows of text, some short; packed ones have two sequences."""
    used = np.maximum(L - 3 * (np.arange(n) % 4), 4)[:, None]
    real = np.arange(L) < used
    draw = counter_rng.fold(seed, np.arange(n))
    ids = 5 + counter_rng.below(draw[:, None], np.arange(L), V - 5)
    ids = np.where(real, ids, 0)
    ids[:, 0] = 2
    np.put_along_axis(ids, used - 1, 3, 1)
    arrays = {"attention_mask": real, "token_type_ids": 0 * ids}
    if packed:
        first = used // 2
        np.put_along_axis(ids, first, 2, 1)
        second = np.arange(L) >= first
        arrays["segment_ids"] = (1 + second) * real
        arrays["position_ids"] = (np.arange(L) - first * second) * real
    arrays = {k: v.astype(np.int32) for k, v in (arrays | {"input_ids": ids}).items()}
    return GatheredRows(arrays, draw, np.arange(n), np.arange(n))


def make_batch(packed=False, seed=0, n=B):
    half = make_half("retromae", TOKENIZER, L, rate=0.3, mask_unit="word")
    return half.make(make_rows(packed, seed, n))


@functools.cache
def made(shape="bert", **options):
    cfg = dataclasses.replace(CFG, **SHAPES[shape])
    objective, cfg = make_objective("retromae", cfg)
    params = jax.jit(objective.init)(jax.random.key(0))
    return objective, retromae.decoder_config(cfg), params


@functools.cache
def decoder(shape="bert"):
    """Return decode(batch, vectors, visible): hidden states of the decoder."""
    _, own, params = made(shape)
    run = jax.jit(lambda *args: retromae.decode(params, own, *args, None))
    return lambda *args: np.asarray(run(*args))


def vectors_of(batch):
    each = np.random.default_rng(1).normal(size=(B, 2, 16)).astype(np.float32)
    if "segment_ids" not in batch:
        return each[:, :1]
    number = np.maximum(batch["segment_ids"] - 1, 0)
    return np.take_along_axis(each, number[..., None], axis=1)


def visible_of(batch, rate=0.5):
    args = batch["retromae_keys"], batch["retromae_words"], rate
    return np.asarray(retromae.draw_visible(*args))


# ---------------------------------------------------------------- the host half
@cases
def test_rows_hold_their_originals_and_words(packed):
    rows = make_rows(packed)
    batch = make_batch(packed)
    own = rows.arrays["input_ids"]
    np.testing.assert_array_equal(batch["retromae_ids"], own)
    assert (batch["input_ids"] != own).any()
    text = own > 4
    np.testing.assert_array_equal(batch["retromae_weights"], text)
    words = batch["retromae_words"]
    np.testing.assert_array_equal(words > 0, text)
    for ids, numbers in zip(own, words, strict=True):
        wanted, number, inside = [], 0, False
        for token in ids:
            number += token > 4 and (token % 4 > 0 or not inside)
            inside = token > 4
            wanted.append(number * inside)
        assert numbers.tolist() == wanted
    specs = make_half("retromae", TOKENIZER, L, rate=0.3).specs({})
    for name, spec in specs.items():
        assert batch[name].dtype == spec.dtype, name


def test_rows_depend_on_their_keys_alone():
    rows, half = make_rows(), make_half("retromae", TOKENIZER, L, rate=0.3)
    whole = half.make(rows)
    part = GatheredRows(
        {k: v[3:5] for k, v in rows.arrays.items()}, *(x[3:5] for x in rows[1:4])
    )
    for name, values in half.make(part).items():
        np.testing.assert_array_equal(values, whole[name][3:5])


# ---------------------------------------------------------------- what is drawn
def test_the_law_of_what_is_seen():
    n = 400
    batch = make_batch(n=n)
    words, text = batch["retromae_words"], batch["retromae_words"] > 0
    same = words[:, :, None] == words[:, None]
    diagonal = np.eye(L, dtype=bool)
    shares = []
    for rate in (0.5, 0.7):
        seen = visible_of(batch, rate)
        # No token of text sees itself; all tokens see special tokens and the first.
        assert not seen[:, diagonal][text].any()
        assert seen.swapaxes(1, 2)[~text].all() and seen[:, :, 0].all()
        # The pieces of a word are visible together, except at the query's position.
        for q in (5, 9):
            a, b = seen[:, q, 1:-1], seen[:, q, 2:]
            pair = same[:, range(1, L - 1), range(2, L)] & text[:, 1:-1]
            pair[:, [q - 2, q - 1]] = False
            assert pair.sum() > 100 and (a == b)[pair].all()
        other = text[:, :, None] & text[:, None] & ~same
        shares.append(1 - seen[other].mean())
        # The queries of a row draw independently.
        both = other[:, 4] & other[:, 5]
        alike = np.mean((seen[:, 4] == seen[:, 5])[both])
        assert alike == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.03)
    assert shares == pytest.approx([0.5, 0.7], abs=0.01)
    assert visible_of(batch, 1.0)[text[:, :, None] & text[:, None]].sum() == 0
    # Another epoch draws other words.
    again = {**batch, "retromae_keys": batch["retromae_keys"] ^ 1}
    assert (visible_of(again)[other] != visible_of(batch)[other]).mean() > 0.4


# ---------------------------------------------------------------- who sees whom
@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ("bert", False),
        ("bert", True),
        ("pre", False),
        ("albert", True),
        ("windows", False),
        ("rope", True),
        ("modernbert", False),
    ],
)
def test_the_decoder_sees_what_is_drawn_and_nothing_else(packed, shape):
    """A token changes only the predictions whose queries see it, never its own."""
    batch = make_batch(packed)
    vectors, seen, run = vectors_of(batch), visible_of(batch), decoder(shape)
    before = run(batch, vectors, seen)
    text = batch["retromae_words"] > 0
    sequence = batch.get("segment_ids", batch["attention_mask"])
    seen = seen & (sequence[:, :, None] == sequence[:, None])
    for at in range(1, L):
        ids = batch["retromae_ids"].copy()
        ids[:, at] = np.where(text[:, at], 5 + (ids[:, at] + 6) % (V - 5), ids[:, at])
        after = run({**batch, "retromae_ids": ids}, vectors, visible_of(batch))
        moved = np.abs(after - before).max(axis=-1) > 1e-6
        wanted = seen[:, :, at] & text[:, at, None]
        np.testing.assert_array_equal(moved[text], wanted[text])


@cases
def test_the_vector_is_in_every_prediction(packed):
    batch = make_batch(packed)
    vectors, seen, run = vectors_of(batch), visible_of(batch), decoder()
    # Also if nothing else is visible except special tokens.
    for visible in (seen, visible_of(batch, 1.0)):
        before, after = (run(batch, v, visible) for v in (vectors, vectors + 0.1))
        moved = np.abs(after - before).max(axis=-1) > 1e-6
        assert moved[batch["retromae_words"] > 0].all()
    # The first position holds the vector, not the embedding of [CLS].
    ids = np.where(batch["retromae_ids"] == 2, 7, batch["retromae_ids"])
    after = run({**batch, "retromae_ids": ids}, vectors, seen)
    np.testing.assert_array_equal(after, run(batch, vectors, seen))


def test_rotary_positions_order_the_words():
    """A query tells the words that it sees apart by their distance from itself: the
    prediction changes if two of them trade places or if the query moves."""
    batch = make_batch()
    vectors, run = vectors_of(batch), decoder("rope")
    ids = batch["retromae_ids"]
    ids[:, 4], ids[:, 6] = 5, 9
    ids[:, 12], ids[:, 14] = ids[:, 10], ids[:, 10]
    seen = np.zeros((B, L, L), bool)
    seen[:, :, [0, 4, 6]] = True
    before = run(batch, vectors, seen)
    swapped = ids.copy()
    swapped[:, [4, 6]] = ids[:, [6, 4]]
    after = run({**batch, "retromae_ids": swapped}, vectors, seen)
    full = batch["attention_mask"].all(axis=1)
    assert full.any()
    # Also for the query between them: it is as far from both, but on another side.
    assert (np.abs(after - before).max(axis=-1) > 1e-6)[full].all()
    # Queries have the same vector, and see the same words: only their place differs.
    assert (np.abs(before[:, 12] - before[:, 14]).max(axis=-1) > 1e-6)[full].all()


def test_rotary_positions_are_of_the_sequence():
    """A packed sequence gets the predictions that it gets in a row of its own."""
    batch, run = make_batch(packed=True), decoder("rope")
    vectors, seen = vectors_of(batch), visible_of(batch)
    before = run(batch, vectors, seen)
    for row, segments in enumerate(batch["segment_ids"]):
        (at,) = np.nonzero(segments == 2)
        alone = {
            name: np.zeros((B, L), np.int32)
            for name in ("retromae_ids", "attention_mask", "token_type_ids")
        }
        alone["retromae_ids"][0, : len(at)] = batch["retromae_ids"][row, at]
        alone["attention_mask"][:, : len(at)] = 1
        visible = np.ones((B, L, L), bool)
        visible[0, : len(at), : len(at)] = seen[row][np.ix_(at, at)]
        after = run(alone, np.repeat(vectors[row, at[:1]][None], B, 0), visible)
        np.testing.assert_allclose(after[0, : len(at)], before[row, at], atol=1e-5)


@cases
def test_the_vector_is_of_the_masked_row(packed):
    """The encoder reads the masked row, and a vector depends only on its sequence."""
    _, _, params = made()
    batch = make_batch(packed)
    cfg = dataclasses.replace(CFG, pooler=False)
    run = jax.jit(lambda b: retromae.encode(params, cfg, b, None)[1])
    vectors = run(batch)
    same = run({**batch, "retromae_ids": 0 * batch["retromae_ids"]})
    np.testing.assert_array_equal(vectors, same)
    other = {**batch, "input_ids": batch["input_ids"].copy()}
    other["input_ids"][:, 1] = 7  # in the first sequence
    moved = np.abs(run(other) - vectors).max(axis=-1) > 1e-6
    sequence = batch.get("segment_ids", np.ones((B, 1)))
    np.testing.assert_array_equal(moved[sequence > 0], (sequence == 1)[sequence > 0])


def test_the_loss_is_both():
    objective, own, params = made()
    batch = make_batch()
    sums = jax.jit(lambda b: objective.sums(params, b, None))(batch)
    assert {"mlm_loss", "mlm_accuracy", "retromae_loss", "retromae_accuracy"} == {*sums}
    weights = objective.weights(batch)
    assert float(weights["retromae_loss"]) == batch["retromae_weights"].sum()
    # The masked LM's terms are the same as without the decoder.
    alone, _ = make_objective("mlm", CFG)
    own = {name: params[name] for name in ("encoder", "mlm")}
    plain = jax.jit(lambda b: alone.sums(own, b, None))(batch)
    for name, term in plain.items():
        np.testing.assert_allclose(term, sums[name], rtol=1e-6)
    # Logits in pieces give the same terms.
    small = dataclasses.replace(CFG, max_logits_mb=1, vocab_size=V)
    cut = make_objective("retromae", small)[0]
    wide = jax.tree.map(lambda x: jnp.tile(x, (200, *(1,) * (x.ndim - 1))), batch)
    whole, many = (
        jax.jit(lambda b, o=o: o.sums(params, b, None))(wide) for o in (objective, cut)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), whole, many)


# ---------------------------------------------------------------- training
@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_on_one_device_and_on_eight(packed):
    objective, *_ = made()
    batches = [make_batch(packed, seed) for seed in range(3)]
    eight, one = make_mesh(), make_mesh(devices=jax.devices()[:1])
    (rows, params), (alone, same) = (
        train_steps(objective, mesh, batches) for mesh in (eight, one)
    )
    for a, b in zip(rows, alone, strict=True):
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, same)


def test_it_learns_to_write_by_the_vector():
    """Each row repeats a single word. At rate 1 a query does not see it, so that only
    the vector reveals it."""
    cfg = dataclasses.replace(CFG, initializer_range=0.02, hidden_size=32)
    objective, _ = make_objective("retromae:decoder_rate=1.0", cfg)
    half = make_half("retromae", TOKENIZER, L, rate=0.3)
    batches = []
    for seed in range(120):
        rows = make_rows(seed=seed, n=16)
        ids = rows.arrays["input_ids"]
        word = 5 + counter_rng.below(rows.keys, 99, 5)[:, None]
        rows.arrays["input_ids"] = np.where(ids > 4, word, ids).astype(np.int32)
        batches.append(half.make(rows))
    one = make_mesh(devices=jax.devices()[:1])
    rows, _ = train_steps(objective, one, batches)
    assert rows[0]["train/retromae_loss"] > 3
    assert rows[-1]["train/retromae_accuracy"] > 0.8
    assert rows[-1]["train/mlm_accuracy"] > 0.8


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("retromae:decoder_rate=0.0", {}, "decoder_rate=0.0 must be a share"),
        ("retromae:decoder_weight=0.0", {}, "decoder_weight=0.0 more than 0"),
        ("retromae", {"position_embedding_type": "none"}, '"absolute" or "rope"'),
        ("retromae", {"is_decoder": True}, "set model.is_decoder=False"),
        ("retromae+nsp", {}, "stands alone"),
    ],
)
def test_what_is_refused(name, change, words):
    with pytest.raises(UserError, match=words) as e:
        make_objective(name, dataclasses.replace(CFG, **change))
    assert "\n" not in str(e.value)

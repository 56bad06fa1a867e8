# SPDX-License-Identifier: Apache-2.0
"""Rows of CugLM: two copies, names that are masked as a whole, and their types."""

from types import SimpleNamespace

import numpy as np
import pytest
from host_half import make_half
from hypothesis import given
from hypothesis import strategies as st
from made_up import fake_store, fake_tokenizer

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.batches import Batches
from bertjax.data.features.base import GatheredRows
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan

V, PAD, UNK, CLS, SEP, MASK = 300, 0, 1, 2, 3, 4
TOKENIZER = fake_tokenizer(V)


def half(length=12, causal=False, **keys):
    return make_half(f"cuglm:causal={int(causal)}", TOKENIZER, length, **keys)


def make(features, ids, types, **more):
    ids = np.atleast_2d(np.array(ids, np.int32))
    types = np.atleast_2d(np.array(types, np.int32))
    real = (ids != PAD).astype(np.int32)
    arrays = {"input_ids": ids, "attention_mask": real, "token_type_ids": 0 * ids}
    arrays |= {"type_ids": types, **more}
    n = np.arange(len(ids))
    keys = counter_rng.fold(7, n)
    return features.make(GatheredRows(arrays, keys, n, n))


def test_the_worked_example():
    """The example in the docstring, with room for both names."""
    features = half(rate=0.5)
    assert (features.raw, features.predictions) == (6, 3)
    batch = make(features, [2, 17, 25, 31, 46, 3], [0, 7, 7, 0, 2, 0])
    want = {
        "input_ids": [2, 4, 4, 31, 4, 3, 2, 17, 25, 31, 46, 3],
        "attention_mask": [1] * 12,
        "token_type_ids": [0] * 12,
        "segment_ids": [1] * 6 + [2] * 6,
        "attention_steps": [0] * 6 + [1, 2, 3, 4, 5, 6],
        "position_ids": [0, 1, 2, 3, 4, 5] * 2,
        "mlm_positions": [1, 2, 4],
        "mlm_ids": [17, 25, 46],
        "mlm_types": [7, 7, 2],
        "mlm_names": [1, 1, 2],
        "mlm_weights": [1, 1, 1],
        "lm_positions": [6, 7, 8, 9, 10, 11],
        "lm_ids": [17, 25, 31, 46, 3, 0],
        "lm_weights": [1, 1, 1, 1, 0, 0],
        "lm_names": [1, 1, 0, 2, 0, 0],
        "text_tokens": 6,
    }
    assert {name: values[0].tolist() for name, values in batch.items()} == want


def test_a_causal_masked_copy_sees_what_is_before():
    batch = make(half(causal=True), [2, 17, 25, 31, 46, 3], [0, 7, 7, 0, 2, 0])
    assert batch["attention_steps"][0].tolist() == [1, 2, 3, 4, 5, 6] * 2


def test_the_budget_is_that_of_the_article():
    """The budget is min(30, max(1, round(0.15 n)))."""
    for length, most in ((16, 1), (40, 3), (256, 19), (1024, 30)):
        assert half(length).predictions == most
    assert half(1024, max_predictions=40).predictions == 40
    features = half(256)
    ids = np.full((3, 128), 50, np.int32)
    ids[1, 64:] = ids[2, 3:] = PAD
    types = 2 + np.arange(128) % 2  # each token is a name
    batch = make(features, ids, np.where(ids == PAD, 0, types))
    assert batch["mlm_weights"].sum(axis=1).tolist() == [19, 10, 1]


def test_names_are_drawn_uniformly_or_in_the_order_of_reading():
    ids, types = np.full((4000, 20), 50), np.zeros((4000, 20), np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    types[:, 2:18:2] = 5  # 8 names
    batch = make(half(40, max_predictions=2), ids, types)
    assert (batch["mlm_weights"].sum(axis=1) == 2).all()
    counts = np.bincount(batch["mlm_positions"].ravel(), minlength=20)
    assert set(np.flatnonzero(counts)) == set(range(2, 18, 2))
    assert abs(counts[2:18:2] / 1000 - 1).max() < 0.15
    first = make(half(40, max_predictions=2, paper_compat=True), ids, types)
    assert (first["mlm_positions"] == [2, 4]).all()


def test_a_name_that_does_not_fit_is_left():
    batch = make(half(24), [2, *[9] * 8, 11, 11, 3], [0, *[7] * 8, 0, 5, 0])
    assert batch["mlm_weights"].sum() == 1 and batch["mlm_positions"][0, 0] == 10


def test_rows_without_names_mask_nothing():
    batch = make(half(), [2, 17, 25, 31, 46, 3], [0] * 6)
    assert batch["mlm_weights"].sum() == 0 and MASK not in batch["input_ids"]
    assert batch["lm_weights"].sum() == 4 and batch["lm_names"].sum() == 0


def test_unknown_tokens_are_names_and_special_ones_are_none():
    batch = make(half(rate=1.0), [2, UNK, 25, SEP, 46, 3], [0, 7, 0, 9, 2, 0])
    assert batch["mlm_ids"][0, :2].tolist() == [UNK, 46]
    assert batch["lm_ids"][0, :5].tolist() == [UNK, 25, SEP, 46, SEP]
    assert batch["lm_weights"][0].tolist() == [1, 1, 0, 1, 0, 0]


def store(sentences=300, documents=30):
    """Return a text in which a token decides its type; every third token has none."""
    made = fake_store(sentences, documents, size=V)
    made.streams = {"type": ("token", type_of(made.tokens).astype(np.uint16))}
    return made


def type_of(ids):
    return np.where(ids % 3, 2 + ids % 5, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_types_survive_truncation_and_packing(packed):
    """Pairs are truncated at both ends of both sides."""
    features, text = half(64), store()
    plan = make_plan(
        text, "pairs", features.raw, 5, packed=packed, pair_rule="nsp", max_segments=3
        if packed else None, streams=features.streams,
    )  # fmt: skip
    batches = Batches((plan,), make_mixture({"x": plan.n}), features, TOKENIZER, 64, 3)
    truncated = names = 0
    for step in range(3):
        seen = batches.inspect(step)
        batch, truncated = seen.batch, truncated + seen.truncated.sum()
        row, slot = np.nonzero(batch["mlm_weights"])
        ids = batch["mlm_ids"][row, slot]
        at = batch["mlm_positions"][row, slot]
        assert (batch["mlm_types"][row, slot] == type_of(ids)).all()
        assert (type_of(ids) > 0).all() and (ids >= 5).all()
        assert (seen.gathered["input_ids"][row, at] == ids).all()
        assert (batch["input_ids"][row, at] == MASK).all()
        masked = (batch["input_ids"] == MASK).sum(axis=1)
        assert (masked == batch["mlm_weights"].sum(axis=1)).all()
        names += batch["mlm_names"].max(axis=1).sum()
        # The clean copy is the gathered row.
        R, real = features.raw, seen.gathered["attention_mask"] > 0
        clean = batch["input_ids"][:, R:][real]
        assert (clean == seen.gathered["input_ids"][real]).all()
        assert (batch["text_tokens"] == real.sum(axis=1)).all()
        if packed:
            segments = batch["segment_ids"]
            first, second = segments[:, :R], segments[:, R:]
            assert (second[first > 0] == first[first > 0] + 3).all()
            assert first.max() <= 3
    assert truncated > 20 and names > 100
    told = seen.counts
    assert told["special_selected"] == 0 and told["selected"] == told["masked"]
    assert told["masked_names"] <= told["names"]


codes = st.lists(st.tuples(st.integers(3, 20), st.integers(0, 3)), max_size=20)


@given(codes, st.integers(4, 48), st.floats(0.01, 1))
def test_ranges(tokens, length, rate):
    features = half(length, rate=rate)
    R = features.raw
    row = np.zeros((1, R, 2), np.int32)
    row[0, : min(len(tokens), R)] = np.array(tokens).reshape(-1, 2)[:R]
    ids, types = row[..., 0], row[..., 1]
    batch = make(features, ids, types)
    specs = features.specs({})
    for name in ("mlm_positions", "lm_positions"):
        assert (batch[name] >= 0).all() and (batch[name] < length).all()
        assert batch[name].shape[1:] == specs[name].shape
    count = int(batch["mlm_weights"].sum())
    n = int((ids != PAD).sum())
    assert count <= min(features.predictions, max(1, round(rate * n)), 30)
    # A name is masked as a whole or not at all.
    chosen = np.zeros(R, bool)
    chosen[batch["mlm_positions"][0, :count]] = True
    assert (batch["mlm_positions"][0, :count] < R).all()
    name = (ids[0] >= 5) & (types[0] > 0)
    joined = name[1:] & name[:-1] & (types[0, 1:] == types[0, :-1])
    assert (chosen[1:] == chosen[:-1])[joined].all()
    assert not (chosen & ~name).any()
    numbers = batch["mlm_names"][0, :count]
    assert (np.diff(numbers, prepend=0) <= 1).all() and (numbers >= 1).all()
    assert batch["lm_names"].max(initial=0) <= R
    assert ((batch["lm_names"] == 0) | (batch["lm_weights"] > 0)).all()


def test_a_model_must_not_read_the_types_it_predicts():
    with pytest.raises(UserError, match=r"model\.id_streams: .* must not read them"):
        from bertjax.data.features import base, cuglm

        config = SimpleNamespace(data=SimpleNamespace(), objective="cuglm")
        settings = base.Settings(config, TOKENIZER, None, 12)
        cuglm.make_features(settings._replace(streams=frozenset({"type"})))
    with pytest.raises(UserError, match=r"data\.length >= 4"):
        half(3)

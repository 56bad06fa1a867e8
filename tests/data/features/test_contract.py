# SPDX-License-Identifier: Apache-2.0
"""The promises of every host half: the shipped ones and one from outside."""

import dataclasses

import numpy as np
import pytest
from host_half import make_half
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_store, fake_tokenizer

from bertjax import UserError
from bertjax.data.batches import Batches, batch_sha256
from bertjax.data.features.base import percent, prediction_weights
from bertjax.data.features.make_features import SUPPORT
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan
from bertjax.registry import names

V = 300
SENTINELS = np.arange(V, V + 20)
TOKENIZER = fake_tokenizer(
    V + 20,
    special_ids=np.append(np.arange(5), SENTINELS),
    sentinel_ids=SENTINELS[::-1],
    replacement_ids=np.arange(5, V, dtype=np.int32),
    word_starts=np.arange(V + 20) % 3 > 0,
    sentence_ends=np.arange(V + 20) % 9 == 8,
)
TABLES = make_tables(TOKENIZER)
B, L = 16, 32
SHIPPED = [n for n in names("bertjax.data.features") if n not in SUPPORT]
HALVES = [*SHIPPED, "lab.swap", "lab.swap:rate=0.9", "mlm*1+clm*3", "mntp*3+clm*1"]
HALVES += ["diffusion:schedule=cosine", "diffusion:block=4", "diffusion*1+clm*1"]
HALVES += ["spans:density=0.15/0.5/0.25,mean=3/8/99"]


def batches(name, packed=False, batch_size=B, seed=3, store=None, **keys):
    half = make_half(frozenset({name}), TOKENIZER, L, TABLES, packed=packed, **keys)
    store = store or fake_store(400, 40, size=V)
    how = dict(packed=packed, slots=half.slots(np.arange(half.raw + 1)))
    kind = "full_sentences"
    if half.limits:
        kind, how["limits"] = "turns", half.limits
        speakers = np.arange(len(store.sentences) - 1) % 3 + 1
        store.streams = {"speaker": ("sentence", speakers)}
    if half.streams:
        how["streams"] = half.streams
        ids = (store.tokens % 3 == 0) * (2 + store.tokens % 5)
        store.streams = dict.fromkeys(half.streams, ("token", ids))
    plan = make_plan(store, kind, half.raw, 5, **how)
    return Batches((plan,), make_mixture({"x": plan.n}), half, TOKENIZER, batch_size, 3)


@pytest.fixture(params=HALVES)
def name(request):
    return request.param


@pytest.mark.parametrize("packed", [False, True])
def test_specs_state_every_array(name, packed):
    made = batches(name, packed)
    batch = made.batch(7)
    assert {k: (v.shape[1:], v.dtype.name) for k, v in batch.items()} == {
        k: (spec.shape, spec.dtype) for k, spec in made.specs.items()
    }
    assert made.loss_weights
    assert all(made.specs[k].dtype == "float32" for k in made.loss_weights)


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_depends_on_itself_alone(name, packed):
    """A row is the same in a whole batch and alone, on one host and on four."""
    made = batches(name, packed)
    whole = made.batch(5)
    for rows in (slice(4, 8), np.array([11])):
        part = made.batch(5, rows)
        assert all((part[k] == whole[k][rows]).all() for k in whole)


def test_places_of_rows_do_not_depend_on_the_batch_size(name):
    """Compare rows 32 to 47 of a run in a batch of 16 and in half a batch of 32."""
    small, large = batches(name), batches(name, batch_size=2 * B)
    a, b = small.batch(2), large.batch(1, slice(0, B))
    assert all((a[k] == b[k]).all() for k in a)


def test_evaluations_repeat_and_leave_out_what_fills_up(name):
    made = batches(name, store=fake_store(60, 6, size=V))
    first, second = (list(made.eval_batches(B)) for _ in range(2))
    assert [*map(batch_sha256, first)] == [*map(batch_sha256, second)]
    fill = first[-1]["example_weights"] == 0
    assert fill.any()
    for weights in made.loss_weights:
        assert (first[-1][weights][fill] == 0).all()
        assert any((batch[weights] > 0).any() for batch in first)


@pytest.mark.parametrize("packed", [False, True])
def test_specials_are_never_predicted_nor_drawn(name, packed):
    made = batches(name, packed)
    if "clm" in name or name in ("prefix", "dialogue"):
        return  # they predict the separator at the end of a text
    for step in range(3):
        seen = made.inspect(step)
        if seen.origin is None:  # two sides: masks and sentinels replace text
            hidden = seen.batch["input_ids"][seen.predicted]
            assert np.isin(hidden, [TOKENIZER.mask_id, *SENTINELS]).all()
            assert seen.counts.get("special_selected", 0) == 0
            continue
        origin = np.take_along_axis(seen.gathered["input_ids"], seen.origin, 1)
        assert (origin[seen.predicted] >= 5).all()
        after = seen.batch["input_ids"][seen.predicted]
        assert ((after >= 5) | (after == TOKENIZER.mask_id)).all()


def test_what_people_are_told(name):
    made = batches(name)
    seen = made.inspect(0)
    assert made.features.describe()
    assert seen.predicted.any()
    assert seen.origin is None or seen.predicted.shape == seen.origin.shape
    assert all(np.isfinite(count) for count in seen.counts.values())


def test_shares_are_told_as_they_are():
    """12.5% must not be rounded to 12%, nor 0.5% to 0%."""
    shares = 0.15, 0.125, 0.005, 0.07, 1 / 3, 1
    told = ["15%", "12.5%", "0.5%", "7%", "33.3%", "100%"]
    assert [*map(percent, shares)] == told


@settings(max_examples=25)
@given(data=st.data())
def test_rows_of_any_length(data):
    """Rows from a single token to a full row fit in the room of each array."""
    name = data.draw(st.sampled_from(HALVES))
    made = batches(name)
    raw = made.features.raw
    lengths = np.array(data.draw(st.lists(st.integers(1, raw), min_size=4, max_size=4)))
    gathered = made.gathered(0, slice(0, 4))
    real = (np.arange(raw) < lengths[:, None]).astype(np.int32)
    arrays = {k: v * real for k, v in gathered.arrays.items()}
    batch = made.features.make(gathered._replace(arrays=arrays))
    for key in made.loss_weights:
        assert np.isfinite(batch[key]).all() and (batch[key] >= 0).all()
    for key in prediction_weights(made.specs):
        weights = batch[key]
        at = batch.get(key.replace("_weights", "_positions"))
        if at is not None:
            assert ((at >= 0) & (at < L)).all()
            row, slot = np.nonzero(weights)
            assert (batch["attention_mask"][row, at[row, slot]] == 1).all()
    ids = batch["input_ids"]
    assert ids.min() >= 0 and ids.max() < TOKENIZER.vocab_size


HASHES = {
    "clm": "c9a9fb02c4c294f5",
    "dialogue": "11a699cdacc2a1a3",
    "diffusion": "9fbf8c4506933ab3",
    "diffusion:block=4": "e23863aff0b59e4c",
    "diffusion:schedule=cosine": "c38ced0a6464a202",
    "mlm": "9ee2efc0558629d6",
    "mlm*1+clm*3": "8d89089af6d3ed15",
    "mntp": "8ca229230ab7713e",
    "mntp*3+clm*1": "4becf878a70a8e31",
    "noise": "542bde532600fe9c",
    "prefix": "3ab853e368d66452",
    "spans": "9c1f0f8680779bc5",
}


def test_golden_hashes():
    """A run must stay the same after an upgrade: change these only for a reason."""
    made = {n: batch_sha256(batches(n, n != "mlm").batch(9))[:16] for n in HASHES}
    assert made == HASHES


def test_a_ramp_goes_from_one_rate_to_the_other():
    made = dataclasses.replace(batches("mlm", rate="0.5:0.1"), end=100)
    assert made.P == 16  # P for the higher rate
    shares = []
    for step in (0, 50, 99):
        batch = made.batch(step)
        shares.append(batch["mlm_weights"].sum() / batch["attention_mask"].sum())
    assert shares == pytest.approx([0.5, 0.3, 0.1], abs=0.02)
    assert (batches("mlm", rate=0.5).batch(0)["mlm_ids"] == made.batch(0)["mlm_ids"])[
        :, :10
    ].any()


@pytest.mark.parametrize(
    "rate, said", [("0.3:", "a ramp"), ("0.3:1.5", "above 0"), ("x", "give a rate")]
)
def test_rates_that_are_none(rate, said):
    with pytest.raises(UserError, match=rf"data.mask_rate={rate}.*{said}"):
        batches("mlm", rate=rate)


def test_unknown_names_and_options():
    with pytest.raises(UserError, match="needs='clmm' is unknown; did you mean 'clm'"):
        batches("clmm")
    with pytest.raises(UserError, match=r"option of lab\.swap='share' is unknown"):
        batches("lab.swap:share=1")
    with pytest.raises(UserError, match=r"least=0\.5 and most=0\.1 are not shares"):
        batches("prefix:least=0.5,most=0.1")

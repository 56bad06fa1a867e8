# SPDX-License-Identifier: Apache-2.0
"""Rows of a pseudo-masked LM: layout, blocks, and what they depend on."""

from collections import Counter

import numpy as np
import pytest
from host_half import make_half
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.config import schema
from bertjax.data import counter_rng
from bertjax.data.batches import batch_sha256
from bertjax.data.features import pmlm
from bertjax.data.features.base import GatheredRows
from bertjax.data.features.mixed import take_rows

V, PAD, CLS, SEP, MASK = 50, 0, 2, 3, 4
TOKENIZER = fake_tokenizer(V, pieces=[str(i) for i in range(V)], kind="ids")
COPIED = ["input_ids", "attention_mask", "token_type_ids", "segment_ids"]


def gathered(b, length, packed=False, seed=0):
    """Make b rows of random text, with lengths from 2 to the full row; packed rows have
    two sequences."""
    keys = counter_rng.fold(seed, "rows", np.arange(b))
    least = 6 if packed else 2
    used = least + counter_rng.below(keys, 0, length + 1 - least)
    real = np.arange(length) < used[:, None]
    ids = 5 + counter_rng.below(keys[:, None], 1 + np.arange(length), V - 5)
    ids[:, 0], ids[np.arange(b), used - 1] = CLS, SEP
    arrays = {"attention_mask": real, "token_type_ids": ids % 2 * real}
    if packed:
        half = used[:, None] // 2
        ids[np.arange(b), half[:, 0]], ids[np.arange(b), half[:, 0] - 1] = CLS, SEP
        second = np.arange(length) >= half
        arrays["segment_ids"] = (1 + second) * real
        arrays["position_ids"] = (np.arange(length) - half * second) * real
        arrays["cls_positions"] = np.concatenate([0 * half, half], axis=1)
    arrays["input_ids"] = np.where(real, ids, PAD)
    arrays = {name: values.astype(np.int32) for name, values in arrays.items()}
    return GatheredRows(arrays, keys, np.arange(b), np.arange(b))


def is_likely(observed, expected):
    return stats.chisquare(observed, expected).pvalue > 1e-4


def one_row(free, budget, blocks=0.4, longest=6, attempts=10_000, seed=0, b=1):
    """Draw the blocks of b equal rows."""
    rows = np.broadcast_to(np.asarray(free, bool), (b, len(free)))
    keys = counter_rng.fold(seed, "blocks", np.arange(b))
    budgets = np.full(b, budget)
    return pmlm.draw_blocks(keys, rows, budgets, blocks, longest, attempts)


# ---------------------------------------------------------------- layout
@pytest.mark.parametrize("packed", [False, True])
def test_the_layout_by_hand(monkeypatch, packed):
    """The example in the docstring, with a spare slot."""
    half = make_half("pmlm", TOKENIZER, 10, corruption="1,0,0", rate=0.3)
    assert (half.raw, half.predictions) == (6, 2)
    steps = np.array([[0, 0, 2, 1, 0, 0], [0, 1, 0, 0, 0, 0]], np.int32)
    monkeypatch.setattr(pmlm, "draw_blocks", lambda *a: steps)
    arrays = {
        "input_ids": [[2, 17, 25, 31, 46, 3], [2, 18, 3, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        "token_type_ids": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]],
    }
    if packed:
        arrays["segment_ids"] = [[1, 1, 1, 2, 2, 2], [1, 1, 1, 0, 0, 0]]
        arrays["position_ids"] = [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 0, 0]]
        arrays["cls_positions"] = [[0, 3], [0, 0]]
    arrays = {name: np.array(values, np.int32) for name, values in arrays.items()}
    index = np.arange(2)
    batch = half.make(GatheredRows(arrays, index.astype(np.uint64), index, index))
    want = {
        "input_ids": ("2 17 4 4 46 3 4 4 25 31", "2 4 3 0 0 0 4 0 18 0"),
        "attention_mask": ("1 1 1 1 1 1 1 1 1 1", "1 1 1 0 0 0 1 0 1 0"),
        "token_type_ids": ("0 0 0 1 1 1 0 1 0 1", "0 1 1 0 0 0 1 0 1 0"),
        "position_ids": ("0 1 2 3 4 5 2 3 2 3", "0 1 2 3 4 5 1 0 1 0"),
        "attention_steps": ("0 0 0 0 0 0 -2 -1 2 1", "0 0 0 0 0 0 -1 0 1 0"),
        "mlm_positions": ("2 3", "1 0"),
        "mlm_ids": ("25 31", "18 0"),
        "mlm_weights": ("1 1", "1 0"),
        "par_positions": ("6 7", "6 0"),
        "par_ids": ("25 31", "18 0"),
        "par_weights": ("1 1", "1 0"),
    }
    if packed:
        want |= {
            "segment_ids": ("1 1 1 2 2 2 1 2 1 2", "1 1 1 0 0 0 1 0 1 0"),
            "position_ids": ("0 1 2 0 1 2 2 0 2 0", "0 1 2 0 0 0 1 0 1 0"),
            "cls_positions": ("0 3", "0 0"),
        }
    assert batch.pop("text_tokens").tolist() == [6, 3]
    assert {name: values.tolist() for name, values in batch.items()} == {
        name: [[int(number) for number in row.split()] for row in rows]
        for name, rows in want.items()
    }
    predicted = [[0, 0, 1, 1, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]]
    assert half.predicted(batch).astype(int).tolist() == predicted
    origin = [[0, 1, 2, 3, 4, 5, 2, 3, 2, 3], [0, 1, 2, 3, 4, 5, 1, 0, 1, 0]]
    assert half.origin(batch).tolist() == origin
    counts = half.count(arrays, batch)
    assert (counts["selected"], counts["masked"], counts["blocks"]) == (3, 3, 3)
    assert counts["partial_words"] == counts["special_selected"] == 0


@pytest.mark.parametrize(
    ("length", "text"), [(128, 98), (256, 196), (512, 393), (640, 492), (768, 590)]
)
def test_text_leaves_room_for_its_copies(length, text):
    half = make_half("pmlm", TOKENIZER, length, rate=0.15)
    assert half.raw == text and half.predictions == -(-15 * text // 100)
    assert text + 2 * half.predictions <= length
    assert str(text) in half.describe()


def test_shapes_follow_the_highest_rate():
    ramp = make_half("pmlm", TOKENIZER, 128, rate="0.3:0.15")
    assert (ramp.raw, ramp.predictions) == (80, 24)
    rows = gathered(64, ramp.raw)._replace(progress=1.0)
    chosen = (ramp.make(rows)["mlm_weights"] > 0).sum(axis=1)
    tokens = rows.arrays["attention_mask"].sum(axis=1)
    want = np.minimum(np.maximum(1, np.rint(0.15 * tokens)), np.maximum(tokens - 2, 0))
    assert (chosen == want).all()


@pytest.mark.parametrize("packed", [False, True])
def test_copies_stand_for_what_was_chosen(packed):
    half = make_half("pmlm", TOKENIZER, 96, rate=0.3, corruption="0.5,0.3,0.2")
    rows = gathered(300, half.raw, packed)
    drawn = []
    batch = half.make(rows, drawn)
    R, P = half.raw, half.predictions
    before, at = rows.arrays, batch["mlm_positions"]
    used = batch["mlm_weights"] > 0
    pseudo, original = batch["par_positions"], batch["par_positions"] + P

    def take(name, where):
        return np.take_along_axis(batch[name], where, 1)[used]

    truth = np.take_along_axis(before["input_ids"], at, 1)[used]
    assert (truth >= 5).all()  # no special tokens
    assert (batch["mlm_ids"][used] == truth).all()
    assert (batch["par_ids"] == batch["mlm_ids"]).all()
    assert (batch["par_weights"] == batch["mlm_weights"]).all()
    assert (take("input_ids", original) == truth).all()
    assert (take("input_ids", pseudo) == take("input_ids", at)).all()
    for name in {*COPIED[1:], "position_ids"} & batch.keys():
        assert (take(name, pseudo) == take(name, at)).all(), name
        assert (take(name, original) == take(name, at)).all(), name
    step = take("attention_steps", original)
    assert (step > 0).all() and (take("attention_steps", pseudo) == -step).all()
    # Tokens that were not chosen are unchanged, and unused slots are padding.
    own = np.arange(R)[None] == np.where(used, at, -1)[..., None]
    kept = ~own.any(axis=1)
    assert (batch["input_ids"][:, :R] == before["input_ids"])[kept].all()
    assert not batch["attention_steps"][:, :R].any()
    spare = np.tile(~used, 2)
    assert not batch["attention_mask"][:, R : R + 2 * P][spare].any()
    assert not batch["attention_steps"][:, R : R + 2 * P][spare].any()
    assert (batch["text_tokens"] == before["attention_mask"].sum(axis=1)).all()
    # The corruption has the given shares, and the lengths are those of the blocks.
    new = take("input_ids", at)
    fates = [(new == MASK).sum(), ((new != MASK) & (new != truth)).sum()]
    shares = np.array([0.5, 0.3 * 44 / 45, 0.2 + 0.3 / 45])
    assert is_likely([*fates, (new == truth).sum()], shares * truth.size)
    assert np.concatenate(drawn).sum() == truth.size
    blocks = half.count(before, batch)["blocks"]
    assert np.concatenate(drawn).size == blocks


# ---------------------------------------------------------------- blocks
def test_attempts_in_order(monkeypatch):
    """The example in the docstring; places count the free tokens."""
    begins, lengths = [1, 0, 3, 3, 4], [2, 2, 3, 1, 1]

    def scripted(values):
        return lambda key, attempt, *n: (
            np.array(values)[np.minimum(attempt, 4)]
            + (np.zeros(np.shape(key), type(values[0])))
        )

    monkeypatch.setattr(counter_rng, "below", scripted(begins))
    size = [0.4 * (n - 2 + 0.5) / 5 if n > 1 else 0.9 for n in lengths]
    monkeypatch.setattr(counter_rng, "uniform", scripted(size))
    for budget, want in enumerate(
        ["0000000", "0010000", "0011000", "0011200", "0011230"]
    ):
        found = one_row([0, 1, 1, 1, 1, 1, 0], budget, attempts=5)
        assert "".join(map(str, found[0])) == want


def test_the_law_of_the_first_block():
    """A length that does not fit at its place is drawn again: with n free tokens in a
    row, n - length + 1 places remain for it."""
    n, b = 40, 60_000
    found = one_row(np.ones(n), 12, b=b) == 1
    length, first = found.sum(axis=1), found.argmax(axis=1)
    law = np.array([0.6] + [0.08] * 5) * (n - np.arange(6))
    assert is_likely(np.bincount(length, minlength=7)[1:], law / law.sum() * b)
    for size in range(1, 7):
        places = np.bincount(first[length == size], minlength=n - size + 1)
        assert len(places) == n - size + 1
        assert is_likely(places, np.full(len(places), places.mean()))


def test_the_law_of_whole_rows_by_enumeration():
    """Compare all choices of 3 tokens in a row with a gap with exact probabilities."""
    free, budget, blocks, longest, b = (0, 1, 1, 1, 1, 0, 1), 3, 0.4, 3, 100_000
    places = [i for i, ok in enumerate(free) if ok]
    law: Counter[tuple[int, ...]] = Counter()

    def go_on(row, number, left, chance):
        if not left:
            law[row] += chance
            return
        ways = {}
        for at in places:
            for size in range(1, longest + 1):
                cells = range(at, at + size)
                if all(c < len(row) and free[c] and not row[c] for c in cells):
                    share = 1 - blocks if size == 1 else blocks / (longest - 1)
                    ways[at, size] = share
        for (at, size), share in ways.items():
            new, cut = list(row), min(size, left)
            new[at : at + cut] = [number] * cut
            go_on(
                tuple(new), number + 1, left - cut, chance * share / sum(ways.values())
            )

    go_on((0,) * len(free), 1, budget, 1.0)
    assert sum(law.values()) == pytest.approx(1)
    found = Counter(map(tuple, one_row(free, budget, blocks, longest, b=b).tolist()))
    assert found.keys() <= law.keys()
    outcomes = sorted(law)
    assert is_likely([found[o] for o in outcomes], [law[o] * b for o in outcomes])


@settings(max_examples=200)
@given(
    free=st.lists(st.booleans(), min_size=1, max_size=40),
    budget=st.integers(0, 45),
    blocks=st.sampled_from([0.0, 0.4, 1.0]),
    longest=st.integers(2, 7),
    attempts=st.sampled_from([0, 1, 20, 200]),
    seed=st.integers(0, 99),
)
def test_budgets_are_met_exactly(free, budget, blocks, longest, attempts, seed):
    """The budget is met for any row, also if the attempts run out."""
    [row] = one_row(free, budget, blocks, longest, attempts, seed)
    assert np.count_nonzero(row) == min(budget, sum(free))
    assert not row[~np.array(free)].any()
    for number in range(1, row.max(initial=0) + 1):
        where = np.flatnonzero(row == number)
        assert 1 <= len(where) <= longest
        assert (np.diff(where) == 1).all()
        assert blocks or len(where) == 1


def test_single_tokens_fill_up_in_random_order():
    found = one_row(np.ones(4), 4, attempts=0, b=24_000)
    orders = Counter(map(tuple, found.tolist()))
    assert len(orders) == 24 and is_likely([*orders.values()], [1000] * 24)


@settings(max_examples=40)
@given(length=st.integers(1, 60), b=st.integers(1, 5), seed=st.integers(0, 99))
def test_rows_of_any_text(length, b, seed):
    """Texts have one token or more; rows of special tokens alone predict nothing."""
    half = make_half("pmlm", TOKENIZER, 80, rate=0.15)
    rows = gathered(b, half.raw, seed=seed)
    real = (np.arange(half.raw) < length).astype(np.int32)
    ids = np.where(np.arange(half.raw) % 7 < seed % 8, rows.arrays["input_ids"], CLS)
    arrays = rows.arrays | {
        "input_ids": (ids * real).astype(np.int32),
        "attention_mask": np.tile(real, (b, 1)),
    }
    batch = half.make(rows._replace(arrays=arrays))
    free = ((arrays["input_ids"] >= 5) & (real > 0)).sum(axis=1)
    budget = max(1, np.rint(0.15 * real.sum()))
    assert (batch["mlm_weights"].sum(axis=1) == np.minimum(budget, free)).all()
    assert (batch["attention_mask"][:, half.raw :].sum(axis=1) == 2 * np.minimum(
        budget, free
    )).all()  # fmt: skip


# ---------------------------------------------------------------- independence
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_does_not_depend_on_others(monkeypatch, packed):
    half = make_half("pmlm", TOKENIZER, 64, rate=0.3)
    rows = gathered(40, half.raw, packed)
    whole = half.make(rows)
    for own in (np.array([7]), np.array([39, 3, 21])):
        part = half.make(take_rows(rows, own))
        for name, values in part.items():
            assert (values == whole[name][own]).all(), name
    monkeypatch.setattr(pmlm, "_BLOCK", 100)
    parts = half.make(rows)
    assert batch_sha256(parts) == batch_sha256(whole)


def test_rows_are_as_they_were():
    half = make_half("pmlm", TOKENIZER, 64)
    found = [batch_sha256(half.make(gathered(16, half.raw, p))) for p in (False, True)]
    assert found == [
        "10261f82d70920331b4f383fe517eb156368e57cf6a27b4228ce662a8ff93548",
        "c9617827c3b74871fc1168944e59c39212b607c874de34b0ca6e97b6f6f69d6a",
    ]


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ("pmlm:blocks=1.5", "blocks=1.5 must be a share"),
        ("pmlm:longest=1", "longest=1 at least 2"),
        ("pmlm:share=1", "'share' is unknown"),
    ],
)
def test_options_that_are_refused(needs, message):
    with pytest.raises(UserError, match=message):
        make_half(needs, TOKENIZER, 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [("mask_unit", "word"), ("masking", "roberta"), ("max_predictions", 4)],
)
def test_keys_that_say_nothing_are_refused(key, value):
    config = schema.base()
    config.data[key] = value
    half = make_half("pmlm", TOKENIZER, 64)
    with pytest.raises(UserError, match=f"data.{key}={value} has no effect"):
        resolve.check_keys(config, [half])

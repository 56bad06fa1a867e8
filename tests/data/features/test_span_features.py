# SPDX-License-Identifier: Apache-2.0
"""T5's spans: sizes, distribution, and joining both sides into the text."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from host_half import make_half
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_tokenizer
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.data.features.spans import random_parts, span_counts
from bertjax.data.sequences.make_plan import make_plan

V, N, PAD, UNK, CLS, SEP, MASK = 60, 100, 0, 1, 2, 3, 4
SENTINELS = np.arange(V, V + N)[::-1]
TOKENIZER = fake_tokenizer(
    V + N,
    special_ids=np.append(np.arange(5), SENTINELS[::-1]),
    sentinel_ids=SENTINELS,
    replacement_ids=np.arange(5, V, dtype=np.int32),
)


def half(length=64, options="", tokenizer=TOKENIZER, **keys):
    return make_half(frozenset({f"spans{options}"}), tokenizer, length, **keys)


def row_of(texts, raw, packed=False):
    """Lay texts out as a plan does: one packed row, or documents with separators."""
    ids, segments, places = [], [], []
    for number, text in enumerate(texts, 1):
        opens = packed or number == 1
        own = [CLS] * opens + [*text, SEP]
        ids += own
        segments += [number if packed else 1] * len(own)
        places += range(len(own)) if packed else range(len(places), len(ids))
    assert len(ids) <= raw
    arrays = {
        name: np.pad(np.array(values, np.int32), (0, raw - len(ids)))[None]
        for name, values in (
            ("input_ids", ids), ("attention_mask", [1] * len(ids)),
            ("segment_ids", segments), ("position_ids", places),
        )
    }  # fmt: skip
    if not packed:
        del arrays["segment_ids"], arrays["position_ids"]
    return arrays


def rows_of(arrays, seed=0):
    b = len(arrays["input_ids"])
    keys = counter_rng.fold(seed, np.arange(b))
    return GatheredRows(arrays, keys, np.arange(b), np.arange(b))


def sides(batch, row, packed):
    """Yield the tokens of both sides, text by text."""
    names = ("segment_ids", "decoder_segment_ids")
    if not packed:
        names = ("attention_mask", "decoder_attention_mask")
    for number in range(1, batch[names[0]][row].max() + 1):
        read, written = (batch[name][row] == number for name in names)
        yield batch["input_ids"][row, read], batch["lm_ids"][row, written]


def together(read, written):
    """Insert the spans of a target into the gaps of its input."""
    assert read[-1] == written[-1] == SEP
    first = np.flatnonzero(np.isin(written, SENTINELS))
    spans = dict(zip(written[first], np.split(written[:-1], first)[1:], strict=True))
    assert [*spans] == [*SENTINELS[: len(first)]]
    assert sum(i in spans for i in read) == len(spans)
    return [t for i in read[:-1] for t in (spans[i][1:] if i in spans else [i])]


# ---------------------------------------------------------------- sizes
def t5_lengths(length, density=0.15, mean=3.0):
    """Return the lengths that T5's random_spans_helper finds for inputs of `length`."""

    def sizes(tokens):
        noise = round(tokens * density)
        spans = round(noise / mean)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = length
    while sizes(tokens + 1)[0] <= length:
        tokens += 1
    return tokens, sizes(tokens)[1]


@pytest.mark.parametrize("length", [64, 128, 256, 512])
def test_lengths_are_those_of_t5(length):
    made = half(length)
    assert (made.text, made.target) == t5_lengths(length)
    if length == 512:
        assert (made.text, made.raw, made.target) == (568, 570, 114)


def test_counts_round_as_t5_does():
    n = np.array([0, 1, 2, 3, 10, 30, 50, 568])
    noise, spans = span_counts(n, np.float32(0.15), np.float32(3))
    assert noise.tolist() == [0, 0, 1, 1, 2, 4, 8, 85]
    assert spans.tolist() == [0, 0, 1, 1, 1, 1, 3, 28]
    # There are at most as many spans as kept tokens.
    assert span_counts(np.array([8]), np.float32(0.8), np.float32(1))[1] == [2]


def test_worked_example():
    """The example in the docstring: 2 of 8 tokens (round(0.25 8)) in 2 spans of 1."""
    made = half(16, ":density=0.25,mean=1")
    text = [17, 25, 31, 46, 50, 51, 52, 53]
    batch = made.make(rows_of(row_of([text], made.raw), 3))
    assert batch["attention_mask"].sum() == 9 and batch["lm_weights"].sum() == 5
    (pair,) = sides(batch, 0, packed=False)
    assert together(*pair) == text
    assert batch["decoder_input_ids"][0, :5].tolist() == [PAD, *pair[1][:-1]]
    assert batch["text_tokens"] == [10]


# ---------------------------------------------------------------- round trip
TEXTS = st.lists(
    st.lists(st.integers(5, V - 1) | st.just(UNK), max_size=30), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(
    texts=TEXTS,
    packed=st.booleans(),
    seed=st.integers(0, 2**32),
    options=st.sampled_from(["", ":density=0.5,mean=2", ":density=0.15/0.5,mean=3/8"]),
)  # fmt: skip
def test_both_sides_together_are_the_text(texts, packed, seed, options):
    made = half(160, options)
    batch = made.make(rows_of(row_of(texts, made.raw, packed), seed))
    whole = texts if packed else [[t for text in texts for t in text]]
    for text, (read, written) in zip(whole, sides(batch, 0, packed), strict=True):
        assert together(read, written) == text
        is_gap = np.isin(read, SENTINELS)
        assert not (is_gap[1:] & is_gap[:-1]).any() and not is_gap[0]
        if len(text) > 1:
            assert is_gap[-2]  # the last token is always in a span
        if not options:
            noise, spans = span_counts(np.array([len(text)]), np.float32(0.15), 3)
            assert is_gap.sum() == spans
            assert len(written) == (noise + spans + 1).item()
    predicted = batch["lm_ids"][batch["lm_weights"] > 0]
    assert not np.isin(predicted, [PAD, UNK, CLS, MASK]).any()
    # The decoder reads what it has predicted so far, text by text.
    shifted = batch["decoder_input_ids"][0]
    begins = batch.get("decoder_position_ids", np.arange(made.target)[None])[0] == 0
    assert (shifted[begins] == PAD).all()
    after = np.flatnonzero(~begins & (batch["decoder_attention_mask"][0] > 0))
    assert (shifted[after] == batch["lm_ids"][0, after - 1]).all()


def test_packed_rows_fit_exactly():
    sizes = np.array([60, 3, 17, 40, 9, 5, 31, 22, 1, 2] * 12)
    tokens = 5 + np.arange(sizes.sum()) % (V - 5)
    store = SimpleNamespace(
        tokens=tokens.astype(np.uint16), sentences=np.cumsum([0, *sizes]),
        documents=np.arange(len(sizes) + 1),
    )  # fmt: skip
    made = half(64, packed=True)
    slots = made.slots(np.arange(made.raw + 1))
    plan = make_plan(store, "document", made.raw, 0, packed=True, slots=slots)
    ids = np.arange(plan.n)
    arrays = plan.gather(ids, counter_rng.fold(0, ids), TOKENIZER)
    batch = made.make(rows_of(arrays))
    found = Counter()
    for row in ids:
        for pair in sides(batch, row, packed=True):
            found[tuple(together(*pair))] += 1
    bounds = np.cumsum([0, *sizes])
    texts = [tuple(tokens[a:b]) for a, b in pairwise(bounds)]
    assert found == Counter(texts)
    assert batch["decoder_attention_mask"].mean() > 0.8


# ---------------------------------------------------------------- the law
def test_partitions_are_uniform():
    keys = counter_rng.fold(1, np.arange(30_000))
    parts = random_parts(keys, np.full(30_000, 6), np.full(30_000, 3)).reshape(-1, 3)
    assert (parts.sum(axis=1) == 6).all() and (parts > 0).all()
    _, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(counts) == 10  # 5 choose 2
    assert stats.chisquare(counts).pvalue > 1e-3


def test_spans_are_t5s_in_law():
    """All ways to hide 3 of 6 tokens in 2 spans are equally frequent."""
    made = half(32, ":density=0.5,mean=1.5")
    b = 8_000
    arrays = row_of([[10, 11, 12, 13, 14, 15]], made.raw)
    arrays = {name: np.repeat(values, b, axis=0) for name, values in arrays.items()}
    batch = made.make(rows_of(arrays))
    found, counts = np.unique(batch["input_ids"], axis=0, return_counts=True)
    assert len(found) == 4  # two ways to split the noise, two to split the rest
    assert stats.chisquare(counts).pvalue > 1e-3


def test_laws_are_drawn_by_text():
    made = half(64, ":density=0.15/0.5,mean=3/2")
    arrays = row_of([[10] * 40], made.raw)
    arrays = {name: np.repeat(values, 400, axis=0) for name, values in arrays.items()}
    batch = made.make(rows_of(arrays))
    noise = 40 - (batch["input_ids"] == 10).sum(axis=1)
    assert set(noise) == {6, 20} and 150 < (noise == 20).sum() < 250
    end = half(64, ":density=0.25,mean=99").make(rows_of(row_of([[10] * 40], 62)))
    assert end["input_ids"][0, :32].tolist() == [10] * 30 + [SENTINELS[0], SEP]


def test_counts_for_people():
    made = half(64)
    arrays = row_of([[10] * 20, [11] * 20], made.raw)
    rows = rows_of(arrays)
    counts = made.count({**arrays, "keys": rows.keys}, made.make(rows))
    assert (counts["selected"], counts["spans"], counts["target_tokens"]) == (6, 2, 9)
    assert counts["masked"] == 6 and counts["special_selected"] == 0
    # An unknown word is part of the text, within a span or outside.
    ids = arrays["input_ids"]
    unknown = {**arrays, "input_ids": np.where(ids > 9, UNK, ids)}
    told = made.count({**unknown, "keys": rows.keys}, made.make(rows))
    assert told["selected"] == 6 and told["special_selected"] == 0


@pytest.mark.parametrize(
    "length, options, said",
    [
        (4096, "", r"up to 227 spans.* has 100 of them: give data\.extra_ids=227"),
        (64, ":density=0.15/0.5", "as many means"),
        (64, ":density=1.5", "between 0 and 1"),
        (64, ":mean=many", "not numbers"),
    ],
)
def test_refusals(length, options, said):
    with pytest.raises(UserError, match=said):
        half(length, options)

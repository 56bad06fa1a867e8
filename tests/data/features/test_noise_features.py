# SPDX-License-Identifier: Apache-2.0
"""BART's noise: the effects and limits of each operation, and its distribution."""

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
from bertjax.data.features.noise_operations import (
    draw_lengths,
    poisson_table,
    read_noise,
)

V, PAD, UNK, CLS, SEP, MASK, STOP = 60, 0, 1, 2, 3, 4, 5
PIECES = np.arange(V)
TOKENIZER = fake_tokenizer(V, word_starts=PIECES % 2 == 0, sentence_ends=PIECES == STOP)
ALL = "permute,infill:poisson:3.5,mask:0.1,delete:0.1,insert:0.05,substitute:0.1,rotate"


def half(noise, length=64, **keys):
    return make_half(frozenset({"noise"}), TOKENIZER, length, noise=noise, **keys)


def rows_of(*documents, width=62, b=1, seed=0):
    """Return b equal rows: [CLS] and these documents, with [SEP] after each."""
    ids = [CLS, *(t for document in documents for t in [*document, SEP])]
    assert len(ids) <= width
    row = np.pad(np.array(ids, np.int32), (0, width - len(ids)))
    real = (np.arange(width) < len(ids)).astype(np.int32)
    arrays = {"input_ids": row, "attention_mask": real}
    arrays = {name: np.tile(values, (b, 1)) for name, values in arrays.items()}
    keys = counter_rng.fold(seed, np.arange(b))
    return GatheredRows(arrays, keys, np.arange(b), np.arange(b))


def corrupt(noise, *documents, b=1, seed=0, length=64, **keys):
    """Return the corrupted rows, each a list of documents, and the counts."""
    made = half(noise, length, **keys)
    rows = rows_of(*documents, width=made.raw, b=b, seed=seed)
    batch = made.make(rows)
    counts = made.count({**rows.arrays, "keys": rows.keys}, batch)
    whole = np.zeros((b, made.target), np.int32)
    whole[:, : made.raw] = rows.arrays["input_ids"]
    assert (batch["lm_ids"] == whole).all()
    assert (batch["decoder_input_ids"][:, 0] == SEP).all()
    real = batch["decoder_attention_mask"] > 0
    shifted = batch["decoder_input_ids"][:, 1:]
    assert (shifted == np.where(real[:, 1:], whole[:, :-1], PAD)).all()
    out = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        ids = ids[mask > 0].tolist()
        assert ids[0] == CLS and ids[-1] == SEP and ids.count(CLS) == 1
        ends = [i for i, t in enumerate(ids) if t == SEP]
        starts = [1, *(i + 1 for i in ends[:-1])]
        out.append([ids[a:b] for a, b in zip(starts, ends, strict=True)])
        assert len(ends) == len(documents)
    return out, counts


def is_subsequence(part, whole):
    rest = iter(whole)
    return all(t in rest for t in part)


def sentences(document):
    cut = [i + 1 for i, t in enumerate(document[:-1]) if t == STOP != document[i + 1]]
    ends = [0, *cut, len(document)]
    return [tuple(document[a:b]) for a, b in pairwise(ends) if a < b]


SEEDS = st.integers(0, 2**32)
UNITS, MEANS = st.sampled_from(["token", "word"]), st.sampled_from([0.3, 1, 3.5])
DOCUMENTS = st.lists(
    st.lists(st.integers(5, 12) | st.just(UNK), max_size=14), min_size=1, max_size=3
)


# ---------------------------------------------------------------- each operation
@settings(max_examples=25)
@given(documents=DOCUMENTS, seed=SEEDS, unit=UNITS)
def test_what_operations_do(documents, seed, unit):
    how = dict(seed=seed, mask_unit=unit)
    text = [t for d in documents for t in d]
    units = sum(1 for d in documents for _ in words(d, unit))
    some = -(-units // 4)  # a share of 0.25

    (out,), _ = corrupt("permute", *documents, **how)
    for before, after in zip(documents, out, strict=True):
        assert Counter(sentences(before)) == Counter(resplit(after, before))

    (out,), counts = corrupt("rotate", *documents, **how)
    for before, after in zip(documents, out, strict=True):
        turns = [before[i:] + before[:i] for i in range(max(len(before), 1))]
        assert after in turns

    (out,), counts = corrupt("delete:0.25", *documents, **how)
    left = [t for d in out for t in d]
    assert is_subsequence(left, text) and counts["deleted_units"] == some
    assert left.count(UNK) == text.count(UNK)
    if unit == "token":
        assert len(left) == len(text) - some

    (out,), counts = corrupt("insert:0.25", *documents, **how)
    more = [t for d in out for t in d]
    free = sum(t != UNK for t in text)
    assert len(more) - len(text) == -(-free // 4) == counts["inserted"]
    assert is_subsequence(text, more)

    for noise, name in (("mask:0.25", "masked"), ("substitute:0.25", "substituted")):
        (out,), counts = corrupt(noise, *documents, **how)
        now = [t for d in out for t in d]
        assert len(now) == len(text) and counts[f"{name}_units"] == some
        changed = [i for i in range(len(text)) if now[i] != text[i]]
        assert all(
            text[i] != UNK and now[i] not in (UNK, CLS, SEP, PAD) for i in changed
        )
        if noise.startswith("mask"):
            assert {now[i] for i in changed} <= {MASK}
            assert sum(w[0] in changed for w in all_words(documents, unit)) == some


def words(document, unit):
    """Yield the units of a document, each a list of places."""
    word = []
    for i, t in enumerate(document):
        begins = unit == "token" or t % 2 == 0 or i == 0 or document[i - 1] == UNK
        if word and (begins or t == UNK):
            yield word
            word = []
        if t != UNK:
            word.append(i)
    if word:
        yield word


def all_words(documents, unit):
    at = 0
    for document in documents:
        for word in words(document, unit):
            yield [at + i for i in word]
        at += len(document)


def resplit(after, before):
    """Cut a permuted document into its sentences, in their new order."""
    left, out = Counter(sentences(before)), []
    while after:
        one = next(s for s in left if left[s] and fits(after, s, left))
        left[one] -= 1
        out.append(one)
        after = after[len(one) :]
    return out


def fits(after, sentence, left):
    """Return whether the rest can be cut so that this sentence comes first."""
    if tuple(after[: len(sentence)]) != sentence:
        return False
    rest, after = left.copy(), after[len(sentence) :]
    rest[sentence] -= 1
    if not after:
        return rest.total() == 0
    return any(rest[s] and fits(after, s, rest) for s in rest)


@settings(max_examples=60)
@given(documents=DOCUMENTS, seed=SEEDS, unit=UNITS, mean=MEANS)
def test_infilling_keeps_its_budget(documents, seed, unit, mean):
    (out,), counts = corrupt(
        f"infill:poisson:{mean}:0.3", *documents, seed=seed, mask_unit=unit
    )
    every = [*all_words(documents, unit)]
    text = [t for d in documents for t in d]
    now = [t for d in out for t in d]
    budget = int(np.ceil(0.3 * len(every) - 1e-9))
    left = [t for t in now if t != MASK]
    assert is_subsequence(left, text) and len(now) <= len(text)
    if unit == "token":
        assert len(left) == len(text) - budget
    assert left.count(UNK) == text.count(UNK)
    masks = now.count(MASK)
    fitted = counts["spans"] - counts["zero_length_spans_refused"]
    # A special token or the end of a document within a span adds a mask.
    assert fitted <= masks <= fitted + text.count(UNK) + len(documents) - 1
    for before, after in zip(documents, out, strict=True):
        assert is_subsequence([t for t in after if t != MASK], before)


def test_all_operations_in_order():
    documents = [[*range(6, 26), STOP] * 2]
    _, counts = corrupt(ALL, *documents)
    assert {k for k, n in counts.items() if n} >= {
        "sentences", "spans", "masked_units", "deleted_units", "inserted",
        "substituted_units", "documents_rotated",
    }  # fmt: skip
    # Each operation counts the output of the one before: 42 tokens, ceil(0.3 42)
    # hidden.
    left = 42 - 13
    assert counts["masked_units"] == 3 and left - 3 == 26
    assert counts["deleted_units"] == 3 and counts["inserted"] == 2  # of 23
    assert counts["substituted_units"] == 3  # of 25


# ---------------------------------------------------------------- laws
def test_lengths_of_spans_are_poisson():
    lengths, many = draw_lengths(
        counter_rng.fold(1, np.arange(200)), np.full(200, 500), 3.5
    )
    assert many.sum() == len(lengths)
    sums = np.add.reduceat(lengths, np.cumsum(many) - many)
    assert (sums == 500).all()
    whole = np.delete(lengths, np.cumsum(many) - 1)  # the last one is trimmed
    observed = np.bincount(np.minimum(whole, 10), minlength=11)
    table = poisson_table(3.5)
    shares = np.diff(np.append(table[:10], 1.0), prepend=0)
    assert stats.chisquare(observed, shares * len(whole)).pvalue > 1e-3


def test_spans_lie_anywhere():
    out, _ = corrupt("infill:poisson:1000:0.3", [*range(10, 20)], b=8_000)
    places = [document.index(MASK) for (document,) in out]
    assert all(len(document) == 8 for (document,) in out)  # one span of 3 tokens
    counts = np.bincount(places, minlength=8)
    assert len(counts) == 8 and stats.chisquare(counts).pvalue > 1e-3


def test_orders_and_turns_are_uniform():
    text = [10, STOP, 11, STOP, 12, STOP]
    out, _ = corrupt("permute", text, b=6_000)
    counts = Counter(tuple(document) for (document,) in out)
    assert len(counts) == 6 and stats.chisquare([*counts.values()]).pvalue > 1e-3
    out, _ = corrupt("rotate", [10, 11, 12, 13, 14], b=6_000)
    counts = Counter(tuple(document) for (document,) in out)
    assert len(counts) == 5 and stats.chisquare([*counts.values()]).pvalue > 1e-3
    out, counts = corrupt("rotate:0.25", [10, 11, 12, 13, 14], b=6_000)
    assert 0.17 < counts["documents_rotated"] / 6_000 < 0.23  # 4 of 5 change it


def test_insertions_lie_anywhere_and_replacements_are_drawn_alike():
    out, _ = corrupt("insert:0.2", [10, 11, 12, 13, 14], b=12_000)
    text = [10, 11, 12, 13, 14]
    at = Counter()
    new = Counter()
    for (document,) in out:
        places = [i for i in range(6) if document[:i] + document[i + 1 :] == text]
        if len(places) == 1:
            at[places[0]] += 1
            new[document[places[0]]] += 1
    assert len(at) == 6 and stats.chisquare([*at.values()]).pvalue > 1e-3
    others = [new[i] for i in range(15, V)]
    assert stats.chisquare(others).pvalue > 1e-3
    out, _ = corrupt("infill:poisson:2:1:0.5", [*range(20, 30)], b=500)
    masks = sum(document.count(MASK) for (document,) in out)
    assert 0.45 < masks / sum(len(document) for (document,) in out) < 0.55


# ---------------------------------------------------------------- room
def test_rows_leave_room_for_what_is_inserted():
    made = half("insert:0.05,insert:0.1", length=64)
    grown = [r + -(-r // 20) for r in (made.raw, made.raw + 1)]
    grown = [r + -(-r // 10) for r in grown]
    assert grown[0] <= 64 < grown[1]
    assert half(ALL).raw == 60 and half("").raw == 64
    with pytest.raises(UserError, match=r"data\.noise=insert:1.* no room"):
        half(",".join(["insert:1"] * 6))


def test_rows_that_stay_as_they_are_are_counted_whatever_pads_them():
    tokenizer = SimpleNamespace(**vars(TOKENIZER) | {"pad_id": UNK, "unk_id": PAD})
    for noise, unchanged in (("mask:0", 2), ("mask:1", 0), ("delete:1", 0)):
        made = make_half(frozenset({"noise"}), tokenizer, 64, noise=noise)
        rows = rows_of([10, 11], width=made.raw, b=2)
        counts = made.count({**rows.arrays, "keys": rows.keys}, made.make(rows))
        assert counts["rows_unchanged"] == unchanged


def test_masks_of_no_length_are_refused_where_a_text_would_grow():
    out, counts = corrupt("infill:poisson:0.2:0.3", [*range(10, 30)], b=50)
    assert counts["zero_length_spans_refused"] > 0
    assert counts["zero_length_spans"] > counts["zero_length_spans_refused"]
    assert all(len(document) <= 20 for (document,) in out)
    # A mask after the last word comes after all its pieces and before [SEP].
    text = [10, 12, 13, 14, 15]
    out, _ = corrupt("infill:poisson:1:0.3", text, b=300, mask_unit="word")
    ends = [document for (document,) in out]
    assert any(d[-3:] == [14, 15, MASK] for d in ends)
    assert not any(d[-3:] == [14, MASK, 15] for d in ends)


def test_packed_rows_are_corrupted_text_by_text():
    made = half("permute,infill:poisson:3:0.3", packed=True)
    rows = rows_of(range(10, 24), range(30, 50), width=64, b=30)
    second = np.arange(64) >= 16
    real = rows.arrays["attention_mask"]
    rows.arrays["input_ids"][:, 16:] = rows.arrays["input_ids"][:, 15:-1].copy()
    rows.arrays["input_ids"][:, 16] = CLS
    real[:, 16:] = real[:, 15:-1].copy()
    rows.arrays["segment_ids"] = (1 + second).astype(np.int32) * real
    rows.arrays["position_ids"] = (np.arange(64) - 16 * second).astype(np.int32) * real
    batch = made.make(rows)
    for row in range(30):
        for number, (low, high) in ((1, (10, 24)), (2, (30, 50))):
            own = batch["input_ids"][row, batch["segment_ids"][row] == number]
            assert own[0] == CLS and own[-1] == SEP
            text = own[1:-1][own[1:-1] != MASK]
            assert ((text >= low) & (text < high)).all()
            assert len(text) == (high - low) - np.ceil(0.3 * (high - low))
            target = batch["decoder_segment_ids"][row] == number
            whole = [CLS, *range(low, high), SEP]
            assert batch["lm_ids"][row, target].tolist() == whole
            begin = batch["decoder_input_ids"][row, target]
            assert begin.tolist() == [SEP, *whole[:-1]]


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "noise, said",
    [
        ("permut", "'permut' is unknown; did you mean 'permute'"),
        ("infill:3.5", "'infill:3.5' is not infill:poisson:MEAN"),
        ("infill:poisson:0", r"a mean is from 0\.1"),
        ("mask", "'mask' is not mask:SHARE"),
        ("delete:1.5", "a share is from 0 to 1"),
        ("permute,,rotate", "operation='' is unknown"),
        ("rotate:0.5:2", "is not rotate, or rotate:SHARE"),
        ("mask:x", "'mask:x' is not mask:SHARE"),
    ],
)
def test_grammar(noise, said):
    with pytest.raises(UserError, match=said) as caught:
        read_noise(noise)
    assert str(caught.value).startswith("data.noise=")


def test_keys_that_do_not_go_together():
    with pytest.raises(UserError, match=r"data\.mask_unit='ngram' is unknown"):
        half("mask:0.1", mask_unit="ngram")
    with pytest.raises(UserError, match="unigram needs the counts"):
        half("insert:0.1", replacement="unigram")

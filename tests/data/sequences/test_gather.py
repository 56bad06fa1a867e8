# SPDX-License-Identifier: Apache-2.0
"""Compare packed rows with the unpacked rows of the same plan and with the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_stores import CLS, PAD, SEP, SPECIALS, rows_of, store_of
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.sequences import packing
from bertjax.data.sequences.make_plan import make_plan

WAYS = [
    ("full_sentences", None), ("doc_sentences", None), ("sentence_starts", None),
    ("document", None), ("pairs", None), ("pairs", "nsp"), ("pairs", "sop"),
]  # fmt: skip


def unpacked(batch):
    """Split packed rows by segment_ids alone, and check their special tokens."""
    found = []
    for r, segments in enumerate(batch["segment_ids"]):
        used = (segments > 0).sum()
        held = segments.max()
        assert (segments[:used] > 0).all() and (segments[used:] == 0).all()
        assert sorted(set(segments[:used])) == list(range(1, held + 1))
        assert (np.diff(segments[:used]) >= 0).all()
        assert (batch["attention_mask"][r] == (segments > 0)).all()
        for name in ("input_ids", "position_ids", "token_type_ids"):
            assert not batch[name][r, used:].any()
        weights = batch["cls_weights"][r]
        assert weights.tolist() == [1] * held + [0] * (len(weights) - held)
        assert not batch["cls_positions"][r, held:].any()
        for number in range(held):
            at = np.flatnonzero(segments == number + 1)
            assert batch["cls_positions"][r, number] == at[0]
            assert batch["position_ids"][r, at].tolist() == list(range(len(at)))
            ids = batch["input_ids"][r, at].tolist()
            assert ids[0] == CLS and ids[-1] == SEP and CLS not in ids[1:]
            types = batch["token_type_ids"][r, at].tolist()
            labels = [
                int(values[r, number]) for k, values in batch.items() if "labels" in k
            ]
            found.append((ids, types, labels))
    return found


def loose(batch):
    used = batch["attention_mask"].sum(1)
    return [
        (ids[:n].tolist(), types[:n].tolist())
        for ids, types, n in zip(
            batch["input_ids"], batch["token_type_ids"], used, strict=True
        )
    ]


corpora = st.lists(
    st.lists(st.integers(1, 14), min_size=1, max_size=6), min_size=1, max_size=9
)


@settings(max_examples=100, deadline=None)
@given(
    corpora, st.integers(6, 40), st.sampled_from([None, 1, 3]),
    st.sampled_from([1, 4, packing.WINDOW]), st.sampled_from(WAYS[:4]),
)  # fmt: skip
def test_packed_rows_hold_the_sequences_of_unpacked_ones(
    corpus, length, cap, window, way
):
    store = store_of(corpus)
    plain = make_plan(store, way[0], length, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        p = make_plan(store, way[0], length, 0, packed=True, max_segments=cap)
    assert p.max_segments == (cap or max(4, length // 16))
    assert p.packed and not plain.packed and plain.max_segments is None
    assert p.sequences == plain.sequences == plain.n and p.n <= plain.n
    batch = rows_of(p)
    assert batch["cls_positions"].shape == (p.n, p.max_segments)
    found = unpacked(batch)
    assert sorted((i, t) for i, t, _ in found) == sorted(loose(rows_of(plain)))
    text = sorted(t for ids, _, _ in found for t in ids if t >= 10)
    if way[0] == "sentence_starts":  # what was cut off is in the next row, too
        assert sorted(set(text)) == store.tokens.tolist()
    else:
        assert text == store.tokens.tolist()  # nothing is lost or repeated
    if way[0] != "full_sentences":
        edges = store.sentences[store.documents] + 10
        for ids, _, _ in found:
            assert ids.count(SEP) == 1
            assert np.ptp(np.searchsorted(edges, ids[1:-1], "right")) == 0


@settings(max_examples=100, deadline=None)
@given(corpora, st.integers(6, 40), st.sampled_from(WAYS[4:]), st.integers(1, 5))
def test_packed_pairs_are_pairs_of_their_chunks(corpus, length, way, cap):
    store = store_of(corpus)
    how = {"pair_rule": way[1], "short_seq_prob": 0.5}
    try:
        p = make_plan(store, "pairs", length, 1, packed=True, max_segments=cap, **how)
    except UserError:
        assert way[1] == "sop"  # no chunk has two sentences
        return
    skipped = p.skipped.get("tokens in chunks of one sentence", 0)
    planned = store.sentences[p.stops] - store.sentences[p.starts]
    assert planned.sum() + skipped == len(store.tokens)
    assert (p.starts[1:] >= p.stops[:-1]).all()
    batch = rows_of(p)
    seen = []
    for (ids, types, labels), number in zip(unpacked(batch), p.members, strict=True):
        cut = ids.index(SEP)
        a, b = ids[1:cut], ids[cut + 1 : -1]
        assert a and types == [0] * (cut + 1) + [1] * (len(ids) - cut - 1)
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
        start, stop = p.starts[number], p.stops[number]
        chunk = range(10 + store.sentences[start], 10 + store.sentences[stop])
        assert bool(b) == (way[1] == "nsp" or stop - start > 1)
        first, second = (b, a) if labels == [1] and way[1] == "sop" else (a, b)
        assert set(first) <= set(chunk)
        if way[1] != "nsp" or labels == [0]:
            assert set(second) <= set(chunk)
            assert not second or first[-1] < second[0]
            if len(chunk) <= length - 3:
                assert first + second == list(chunk)
        seen.append(int(number))
    assert sorted(seen) == list(range(p.sequences))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "rule"), WAYS)
def test_a_row_is_its_own(kind, rule, packed):
    """Any rows, in any order, equal those of the whole batch; a seed fixes a plan."""
    corpus = [[3, 9, 5, 7], [4, 4], [8], [2, 2, 2, 2, 2, 2, 2], [11, 6]] * 5
    store = store_of(corpus, marks=(np.arange(500) % 8).astype(np.uint8))
    p, again = (
        make_plan(store, kind, 24, 0, pair_rule=rule, packed=packed) for _ in range(2)
    )
    whole = rows_of(p)
    assert all((rows_of(again)[k] == whole[k]).all() for k in whole)
    some = np.array([5, 0, 3, 5, p.n - 1])
    part = rows_of(p, some)
    assert part.keys() == whole.keys()
    assert all((part[k] == whole[k][some]).all() for k in whole)
    assert {
        v.dtype.str[1:] for k, v in whole.items() if k not in ("cls_weights", "marks")
    } == {"i4"}
    assert whole["marks"].dtype == np.uint8
    text = whole["input_ids"] >= 10
    marks = np.where(text, (whole["input_ids"].astype(int) - 10) % 8, 0)
    assert (whole["marks"] == marks).all()
    if packed:
        other = make_plan(store, kind, 24, 1, pair_rule=rule, packed=True)
        assert other.members.tolist() != p.members.tolist()


def test_two_documents_in_a_row():
    store = store_of([[2], [1]])
    batch = rows_of(make_plan(store, "document", 8, 0, packed=True))
    wanted = {
        "input_ids": [CLS, 10, 11, SEP, CLS, 12, SEP, PAD],
        "attention_mask": [1, 1, 1, 1, 1, 1, 1, 0],
        "token_type_ids": [0] * 8,
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
        "cls_positions": [0, 4, 0, 0],
        "cls_weights": [1, 1, 0, 0],
    }
    assert {k: v.tolist() for k, v in batch.items()} == {
        k: [v] for k, v in wanted.items()
    }


@pytest.mark.parametrize("packed", [False, True])
def test_sentence_order_is_a_fair_coin_over_chunks_of_two_sentences(packed):
    corpus = [[1] * 40] * 20 + [[7]] * 9 + [[30, 5]]
    store = store_of(corpus)
    p = make_plan(
        store, "pairs", 23, 0, short_seq_prob=0, pair_rule="sop", packed=packed
    )
    # The sentence of 30 fills a chunk by itself; the one of 5 is left alone.
    assert p.skipped == {
        "chunks of one sentence": 11, "tokens in chunks of one sentence": 98,
    }  # fmt: skip
    assert p.sequences == 40
    labels = []
    for epoch in range(50):
        batch = rows_of(p, epoch=epoch)
        real = batch["cls_weights"] > 0 if packed else np.ones(p.n, bool)
        labels += batch["sop_labels"][real].tolist()
    assert len(labels) == 2000
    assert stats.binomtest(sum(labels), 2000, 0.5).pvalue > 1e-4


def test_swapped_means_swapped():
    p = make_plan(
        store_of([[1] * 40] * 20), "pairs", 23, 0, short_seq_prob=0, pair_rule="sop"
    )
    batch = rows_of(p)
    for ids, label, start in zip(
        batch["input_ids"], batch["sop_labels"], p.starts, strict=True
    ):
        cut = ids.tolist().index(SEP)
        a, b = ids[1:cut].tolist(), ids[cut + 1 : -1].tolist()
        chunk = list(range(start + 10, start + 30))
        assert (b + a if label else a + b) == chunk


def test_sentence_order_needs_two_sentences():
    with pytest.raises(UserError, match="two sentences that sop needs"):
        make_plan(store_of([[3], [4]]), "pairs", 16, 0, pair_rule="sop")


def test_packed_next_sentences_are_fair():
    corpus = [[1] * 100 for _ in range(50)]
    p = make_plan(
        store_of(corpus), "pairs", 46, 0, short_seq_prob=1, pair_rule="nsp", packed=True
    )
    labels = []
    for epoch in range(20):
        batch = rows_of(p, epoch=epoch)
        for ids, _, [label] in unpacked(batch):
            cut = ids.index(SEP)
            same = (ids[1] - 10) // 100 == (ids[cut + 1] - 10) // 100
            assert same == (label == 0)
            assert label == 1 or ids[cut + 1] == ids[cut - 1] + 1
        real = batch["cls_weights"] > 0
        labels += batch["nsp_labels"][real].tolist()
        keys = counter_rng.fold(3, epoch, np.arange(p.n))
        assert not p.truncated(np.arange(p.n), keys).any()
    # The last chunk of a document may be one sentence, whose partner is always random.
    alone = (p.stops - p.starts == 1).mean()
    share = 0.5 + alone / 2
    assert alone < 0.1
    assert stats.binomtest(sum(labels), len(labels), share).pvalue > 1e-4


@pytest.mark.parametrize(("kind", "rule"), WAYS)
@pytest.mark.parametrize("length", [128, 512])
def test_packed_rows_are_full(kind, rule, length):
    """Articles have 1,500 tokens. Whole sentences leave gaps that nothing fits into;
    random partners end with their documents."""
    rng = np.random.default_rng(0)
    corpus = [rng.geometric(1 / 25, n) for n in rng.geometric(1 / 60, 800)]
    least = 0.86 if "sentences" in kind else 0.92 if rule == "nsp" else 0.99
    store, fill = store_of(corpus), []
    for packed in (False, True):
        p = make_plan(store, kind, length, 0, pair_rule=rule, packed=packed)
        fill.append(rows_of(p)["attention_mask"].mean())
    assert fill[1] > fill[0] and fill[1] > least


@pytest.mark.parametrize("rule", ["nsp", "sop"])
def test_twenty_documents_fill_rows_whatever_the_seed(rule):
    rng = np.random.default_rng(0)
    store = store_of([rng.geometric(1 / 27, n) for n in rng.geometric(1 / 130, 20)])
    for seed in range(5):
        p = make_plan(store, "pairs", 128, seed, pair_rule=rule, packed=True)
        assert rows_of(p)["attention_mask"].mean() > 0.96


def test_truncated_counts_a_row_s_sequences_together():
    """Two pairs of 3 + 3 tokens, with room for 4 tokens each."""
    p = make_plan(
        store_of([[3, 3], [3, 3]]), "pairs", 14, 0, packed=True, short_seq_prob=0
    )
    assert p.truncated(np.arange(p.n), np.arange(p.n)).sum() == 0
    p = make_plan(
        store_of([[3, 30], [4, 30], [30, 5]]),
        "pairs",
        13,
        0,
        packed=True,
        short_seq_prob=0,
    )
    keys = counter_rng.fold(1, np.arange(p.n))
    lost = p.truncated(np.arange(p.n), keys)
    kept = p.gather(np.arange(p.n), keys, SPECIALS)["input_ids"] >= 10
    size = p.sentences[p.stops] - p.sentences[p.starts]
    held = np.add.reduceat(size[p.members], p.rows[:-1])
    assert (held - kept.sum(1)).tolist() == lost.tolist() and lost.max() > 20

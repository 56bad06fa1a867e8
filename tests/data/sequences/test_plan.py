# SPDX-License-Identifier: Apache-2.0
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_stores import CLS, PAD, SEP, SPECIALS, rows_of, store_of
from scipy import stats

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.sequences import chunks
from bertjax.data.sequences import make_plan as making
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.sequences.sentence_pairs import trim


def greedy(documents, room, cross):
    """Pack token by token according to the definition: slow and obvious."""
    rows, row, last, token = [], [], None, 10
    for d, sentences in enumerate(documents):
        for size in sentences:
            while size:
                piece = min(size, room)
                crossing = bool(row) and last != d
                if row and (
                    len(row) + piece + crossing > room or (crossing and not cross)
                ):
                    rows.append(row)
                    row, crossing = [], False
                row = row + [SEP] * crossing + list(range(token, token + piece))
                size, token, last = size - piece, token + piece, d
    return [*rows, row] if row else rows


corpora = st.lists(
    st.lists(st.integers(0, 14), max_size=6), min_size=1, max_size=8
).filter(lambda c: any(n for d in c for n in d))


@settings(max_examples=150, deadline=None)
@given(corpora, st.integers(3, 14), st.booleans(), st.integers(1, 9))
def test_sentence_rows_are_greedy_and_lossless(corpus, length, cross, chunk):
    kind = "full_sentences" if cross else "doc_sentences"
    store = store_of(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "WINDOW", chunk)
        p = make_plan(store, kind, length, 0)
    batch = rows_of(p)
    bodies = []
    for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        used = real.sum()
        assert ids[0] == CLS and ids[used - 1] == SEP and used <= length
        assert real[:used].all() and (ids[used:] == PAD).all()
        bodies.append(ids[1 : used - 1].tolist())
    assert bodies == greedy(corpus, length - 2, cross)
    assert [t for b in bodies for t in b if t != SEP] == store.tokens.tolist()
    assert not batch["token_type_ids"].any()


@settings(max_examples=150, deadline=None)
@given(corpora, st.integers(3, 14), st.integers(1, 9), st.booleans())
def test_sentence_starts_fills_rows_with_the_sentence_that_begins_the_next_row(
    corpus, length, chunk, packed
):
    store, room = store_of(corpus), length - 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "WINDOW", chunk)
        p = make_plan(store, "sentence_starts", length, 0, packed=packed)
    ends = np.cumsum([sum(sentences) for sentences in corpus])
    expected = []
    for row in greedy(corpus, room, cross=False):
        first = row[0] - store.tokens[0]
        end = ends[np.searchsorted(ends, first, "right")]
        tokens = store.tokens[first : min(first + room, end)]
        expected.append([CLS, *tokens.tolist(), SEP])
    batch = rows_of(p)
    found = [ids[ids != PAD].tolist() for ids in batch["input_ids"]]
    if packed:
        chain = itertools.chain.from_iterable
        assert sorted(chain(found)) == sorted(chain(expected))
    else:
        assert found == expected


def test_full_sentences_separates_documents_once():
    p = make_plan(store_of([[2, 1], [2, 1]]), "full_sentences", 8, 0)
    ids = rows_of(p)["input_ids"].tolist()
    assert ids == [[1, 10, 11, 12, 2, 13, 14, 2], [1, 15, 2, 0, 0, 0, 0, 0]]


@settings(max_examples=80, deadline=None)
@given(corpora, st.integers(5, 16), st.sampled_from(["nsp", None]), st.integers(1, 9))
def test_pairs_are_well_formed(corpus, length, rule, chunk):
    store = store_of(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "WINDOW", chunk)
        p = make_plan(store, "pairs", length, 1, short_seq_prob=0.5, pair_rule=rule)
    assert p.starts[0] == 0 and p.stops[-1] == len(p.sentences) - 1
    assert (p.starts < p.stops).all() and (p.starts[1:] == p.stops[:-1]).all()
    batch = rows_of(p)
    for ids, types, real in zip(
        batch["input_ids"],
        batch["token_type_ids"],
        batch["attention_mask"],
        strict=True,
    ):
        used = real.sum()
        first = int(np.flatnonzero(ids == SEP)[0])
        assert first > 1 and ids[0] == CLS and ids[used - 1] == SEP
        one = first == used - 1
        assert (ids == SEP).sum() == (1 if one else 2) and not (one and rule)
        assert types.tolist() == [0] * (first + 1) + [1] * (used - first - 1) + [0] * (
            length - used
        )
        for segment in (ids[1:first], ids[first + 1 : used - 1]):
            assert (np.diff(segment) == 1).all()
        assert (ids[used:] == PAD).all()
    assert ("nsp_labels" in batch) == (rule == "nsp")


def test_chunks_follow_the_rule_of_bert():
    rng = np.random.default_rng(0)
    corpus = [list(rng.integers(1, 30, rng.integers(1, 20))) for _ in range(300)]
    p = make_plan(store_of(corpus), "pairs", 64, 5)
    targets = chunks.targets(5, 0.1, 61, np.arange(sum(map(len, corpus))))
    starts, sentence = [], 0
    for document in corpus:
        held = 0
        for size in document:
            if held == 0:
                starts.append(sentence)
            held, sentence = held + size, sentence + 1
            held = 0 if held >= targets[starts[-1]] else held
    assert p.starts.tolist() == starts
    short = targets[starts] != 61
    assert 0.07 < short.mean() < 0.13 and targets.min() == 2 and targets.max() == 61


@pytest.mark.parametrize("packed", [False, True])
def test_documents_have_their_share_of_rows_whatever_the_seed(packed):
    """A short target for a long document once gave it a quarter of all rows."""
    rng = np.random.default_rng(0)
    sizes = [30 * 2**k for k in range(7)] * 2  # sentences per document
    store = store_of([rng.geometric(1 / 20, n) for n in sizes])
    tokens = np.diff(store.sentences[store.documents]) / len(store.tokens)
    large = tokens > 0.02
    rows, fill = [], []
    for seed in range(12):
        p = make_plan(store, "pairs", 128, seed, pair_rule="nsp", packed=packed)
        held = np.bincount(p.documents_of(np.arange(p.n)), minlength=len(sizes)) / p.n
        assert (np.abs(held / tokens - 1)[large] < 0.2).all()
        rows.append(p.n)
        fill.append(rows_of(p)["attention_mask"].mean())
    assert max(rows) / min(rows) < 1.05 and max(fill) - min(fill) < 0.03


def test_nsp_labels_agree_with_the_text():
    """Sentences have one token, so that nothing is truncated or ambiguous."""
    corpus = [[1] * 40 for _ in range(50)]
    p = make_plan(store_of(corpus), "pairs", 23, 0, short_seq_prob=0, pair_rule="nsp")
    labels = []
    for epoch in range(20):
        batch = rows_of(p, epoch=epoch)
        for ids, types, label in zip(
            batch["input_ids"],
            batch["token_type_ids"],
            batch["nsp_labels"],
            strict=True,
        ):
            a, b = ids[(types == 0) & (ids > SEP)], ids[(types == 1) & (ids > SEP)]
            same = (a[0] - 10) // 40 == (b[0] - 10) // 40
            assert same == (label == 0)
            assert label == 1 or b[0] == a[-1] + 1
            assert len(a) + len(b) == 20 or label == 1
        labels += batch["nsp_labels"].tolist()
    assert stats.binomtest(sum(labels), len(labels), 0.5).pvalue > 1e-4


def test_random_partner_is_every_other_document_and_sentence():
    store = store_of([[4, 4]] + [[1] * 5] * 6)
    p = make_plan(store, "pairs", 11, 0, short_seq_prob=0, pair_rule="nsp")
    n = 20_000
    batch = p.gather(np.zeros(n, int), counter_rng.fold(0, np.arange(n)), SPECIALS)
    ids, random = batch["input_ids"], batch["nsp_labels"] == 1
    begin = ids[random, 6] - 18
    assert (ids[~random, 6] == 14).all()
    counts = np.bincount(begin, minlength=30)
    assert len(counts) == 30 and stats.chisquare(counts).pvalue > 1e-4
    # B is filled to 8 - 4 tokens, or to the end of its document.
    size = batch["token_type_ids"][random].sum(1) - 1
    assert (size == np.minimum(4, 5 - begin % 5)).all()


@pytest.mark.parametrize("sizes", [[3], [3, 3], [2] * 9])
def test_a_single_document_partners_with_itself(sizes):
    store = store_of([sizes])
    p = make_plan(store, "pairs", 9, 0, short_seq_prob=0, pair_rule="nsp")
    for epoch in range(30):
        batch = rows_of(p, epoch=epoch)
        for ids, label in zip(batch["input_ids"], batch["nsp_labels"], strict=True):
            first, last = np.flatnonzero(ids == SEP)
            follows = ids[first + 1] == ids[first - 1] + 1
            assert last > first + 1 and (label == 0) >= follows


def test_one_sentence_without_a_rule_has_no_second_segment():
    batch = rows_of(make_plan(store_of([[3]]), "pairs", 8, 0))
    assert batch["input_ids"].tolist() == [[1, 10, 11, 12, 2, 0, 0, 0]]
    assert not batch["token_type_ids"].any()


def one_by_one(a, b, room):
    cut = [0, 0]
    while a + b - sum(cut) > room:
        cut[0 if a - cut[0] > b - cut[1] else 1] += 1
    return tuple(cut)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(2, 60))
def test_trim_equals_removal_one_by_one(a, b, room):
    cut = trim(np.array([a]), np.array([b]), room)
    assert (int(cut[0][0]), int(cut[1][0])) == one_by_one(a, b, room)


def test_truncation_removes_from_both_ends_like_a_coin_for_each_token():
    p = make_plan(store_of([[19, 13]]), "pairs", 23, 0, short_seq_prob=0)
    n = 20_000
    keys = counter_rng.fold(1, np.arange(n))
    batch = p.gather(np.zeros(n, int), keys, SPECIALS)
    cut_a, cut_b = one_by_one(19, 13, 20)
    assert (batch["token_type_ids"].sum(1) == 13 - cut_b + 1).all()
    assert (batch["attention_mask"].sum(1) == 23).all()
    for front, cut in (
        (batch["input_ids"][:, 1] - 10, cut_a),
        (batch["input_ids"][:, 19 - cut_a + 2] - 29, cut_b),
    ):
        law = stats.binom.pmf(np.arange(cut + 1), cut, 0.5) * n
        counts = np.bincount(front, minlength=cut + 1)
        assert stats.chisquare(counts, law).pvalue > 1e-4


def test_faults_of_the_user_are_named():
    with pytest.raises(UserError, match=r"data.plan='pair' .* did you mean 'pairs'"):
        make_plan(store_of([[1]]), "pair", 8, 0)
    with pytest.raises(UserError, match=r"data.length=4 is too short"):
        make_plan(store_of([[1]]), "pairs", 4, 0)
    with pytest.raises(UserError, match=r"holds no text"):
        make_plan(store_of([[0, 0], []]), "pairs", 8, 0)
    with pytest.raises(UserError, match=r"use data.plan='pairs'"):
        make_plan(store_of([[1]]), "doc_sentences", 8, 0, pair_rule="nsp")
    with pytest.raises(UserError, match=r"pair rule='spo' .* known"):
        make_plan(store_of([[1]]), "pairs", 8, 0, pair_rule="spo")
    p = make_plan(store_of([[1]]), "doc_sentences", 8, 0)
    p.check_ids(11)
    with pytest.raises(UserError, match=r"holds id 10"):
        p.check_ids(10)


@pytest.mark.parametrize("damage", ["short", "missing", "garbled"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("pairs", {}),
        ("pairs", {"packed": True, "pair_rule": "sop"}),
        ("full_sentences", {}),
        ("sentence_starts", {}),
        ("document", {"packed": True}),
    ],
)
def test_a_kept_plan_is_used_and_a_damaged_one_is_made_again(
    kind, how, damage, tmp_path, monkeypatch
):
    monkeypatch.setattr(making, "_SMALL", 0)
    store = store_of([[3, 4, 5], [4]] * 30, content_hash="abc")

    def contents(p):
        batch = rows_of(p)
        return {k: v.tolist() for k, v in batch.items()}, p.skipped, p.n

    made = contents(make_plan(store, kind, 16, 0, **how))
    assert contents(make_plan(store, kind, 16, 0, cache=tmp_path, **how)) == made
    [path] = tmp_path.iterdir()
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(making, "_fill", None)
        assert contents(make_plan(store, kind, 16, 0, cache=tmp_path, **how)) == made
    if damage == "short":
        (path / "starts.bin").write_bytes(before["starts.bin"][:-8])
    elif damage == "missing":
        (path / "starts.bin").unlink()
    else:
        (path / "plan.json").write_bytes(before["plan.json"][:-2])
    assert contents(make_plan(store, kind, 16, 0, cache=tmp_path, **how)) == made
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before
    make_plan(store, kind, 16, 1, cache=tmp_path, **how)
    fixed = kind != "pairs" and not how
    assert len(list(tmp_path.iterdir())) == (1 if fixed else 2)


def test_a_kept_plan_of_other_rules_is_left_alone(tmp_path, monkeypatch):
    """Under the first of these names, unpacked pairs were drawn by other rules."""
    monkeypatch.setattr(making, "_SMALL", 0)
    store = store_of([[3, 4, 5], [4]] * 30, content_hash="abc")
    names = []
    for kind, packed in (("pairs", False), ("pairs", True), ("document", False)):
        decides = [making.FORMAT, "abc", kind, 16]
        decides += [0, 0.1, None] if kind == "pairs" else []
        decides += [0, 4] if packed else []
        make_plan(store, kind, 16, 0, packed=packed, cache=tmp_path)
        name = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
        names.append((tmp_path / f"plan-{name}").exists())
    assert names == [False, True, True] and len(list(tmp_path.iterdir())) == 3


def test_a_store_with_empty_sentences_is_planned_without_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "_SMALL", 0)
    store = store_of([[3, 0, 5], [], [0]], content_hash="abc")
    p = make_plan(store, "document", 16, 0, cache=tmp_path)
    assert p.n == 1 and not list(tmp_path.iterdir())

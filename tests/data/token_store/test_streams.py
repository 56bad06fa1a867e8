# SPDX-License-Identifier: Apache-2.0
"""Streams: from records through stores to the rows of batches."""

import json
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_texts import VOCAB, WORDS, hashes, quiet

from bertjax import UserError
from bertjax.data.corpus.aligned_records import make_document
from bertjax.data.corpus.documents import Fields
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.token_store import pieces
from bertjax.data.token_store.encoding import Block, split_block
from bertjax.data.token_store.prepare_data import Work, prepare_data
from bertjax.data.token_store.store import FORMAT, open_store, verify
from bertjax.data.token_store.streams import Stream
from bertjax.data.tokenizers.stream_vocab import (
    StreamVocab,
    make_vocab,
    read_streams,
    streams_of,
)
from bertjax.data.tokenizers.tokenizer import load_tokenizer

SPEAKERS = ["ann", "bob", "cem", None]


def write_records(path, number, seed=0):
    """Write records of sentences with speakers and ranges; return them."""
    rng, records = np.random.default_rng(seed), []
    for _ in range(number):
        sentences, speakers, kinds = [], [], []
        for _ in range(rng.integers(1, 6)):
            words = rng.choice(WORDS, rng.integers(1, 9)).tolist()
            sentences.append(" ".join(words))
            speakers.append(SPEAKERS[rng.integers(4)])
            at = len(" ".join(words[:-1]))
            last = [at + (at > 0), len(sentences[-1]), words[-1]]
            kinds.append([last] if rng.integers(2) else [])
        records.append({"sentences": sentences, "speaker": speakers, "kind": kinds})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


@pytest.fixture
def given_data(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces.cut, "__defaults__", (4000,))
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB))
    records = write_records(tmp_path / "a.jsonl", 200)
    write_records(tmp_path / "v.jsonl", 20, seed=1)
    return records, {
        "train": f"{tmp_path}/a.jsonl",
        "valid": f"{tmp_path}/v.jsonl",
        "vocab": f"{tmp_path}/vocab.txt",
        "tokenizer_kind": "unigram",
        "vocab_size": 60,
        "lower_case": None,
        "cache": f"{tmp_path}/cache",
        "streams": "speaker,kind:5",
    }


def test_a_store_holds_the_value_of_each_sentence_and_token(given_data):
    records, given_values = given_data
    prepared = prepare_data(workers=1, say=quiet, **given_values)
    store, vocabs = prepared.parts["train"], streams_of(prepared.tokenizer)
    verify(store)
    assert store.meta["format"] == FORMAT == 3 and store.marks is None
    assert {k: v.kind for k, v in store.streams.items()} == {
        "kind": "token",
        "speaker": "sentence",
    }
    said = [s for r in records for s in r["speaker"]]
    assert {*vocabs["speaker"].values} == {"ann", "bob", "cem"}
    names = [vocabs["speaker"].name(i) for i in store.streams["speaker"].ids]
    assert names == ["-" if s is None else s for s in said]
    counts = Counter(r[2] for x in records for s in x["kind"] for r in s)
    known = vocabs["kind"].values
    assert len(known) == 5 and min(counts[k] for k in known) >= max(
        n for k, n in counts.items() if k not in known
    )
    ids, ends = store.streams["kind"].ids, store.sentences
    ranges = [s for r in records for s in r["kind"]]
    for n, own in enumerate(ranges):
        row = ids[ends[n] : ends[n + 1]].tolist()
        word = own and own[0][2]
        want = vocabs["kind"].ids.get(word, 1) if own else 0
        assert row == [0] * (len(row) - 1) + [want]


def test_shards_workers_and_a_saved_tokenizer_give_the_same_store(given_data, tmp_path):
    _, given_values = given_data
    whole = prepare_data(workers=1, say=quiet, **given_values)
    other = {**given_values, "cache": f"{tmp_path}/other"}
    for shard in range(2):
        Work(other, 1, quiet).encode_shard(shard, 2)
    assert hashes(Work(other, 1, quiet).merge_shards(2)) == hashes(whole)
    whole.tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.identity == whole.tokenizer.identity
    assert streams_of(saved) == streams_of(whole.tokenizer)
    # With another text, the ids stay those of the saved vocabulary.
    new = {**given_values, "train": given_values["valid"], "valid": ""}
    new |= {"vocab": f"{tmp_path}/saved", "streams": "speaker,kind"}
    again = prepare_data(workers=1, say=quiet, **new)
    assert streams_of(again.tokenizer) == streams_of(saved)


def test_without_streams_stores_are_what_they_were(given_data, tmp_path):
    text = tmp_path / "plain.jsonl"
    text.write_text(json.dumps({"text": "The cat sat."}) + "\n")
    plain = {**given_data[1], "train": str(text), "valid": "", "streams": ""}
    store = prepare_data(workers=1, say=quiet, **plain).parts["train"]
    assert store.meta["format"] == 1 and store.streams == {}
    # The code before streams created the same store from this text.
    assert store.content_hash.startswith("47015ed096d5be35")
    assert store.path.name == "store-train-48a3a24ca64ffee5"


def test_gathered_rows_bring_the_ids_of_their_tokens(given_data):
    prepared = prepare_data(workers=1, say=quiet, **given_data[1])
    store, tokenizer = prepared.parts["train"], prepared.tokenizer
    for kind, packed in (("full_sentences", False), ("document", True), ("pairs", 0)):
        names = ["speaker", "kind"]
        plan = make_plan(store, kind, 24, 0, packed=bool(packed), streams=names)
        rows = plan.gather(np.arange(8), np.arange(8, dtype=np.uint64), tokenizer)
        special = np.isin(rows["input_ids"], tokenizer.special_ids)
        assert not rows["speaker_ids"][special].any()
        assert not rows["kind_ids"][special].any()
        bare = make_plan(store, kind, 24, 0, packed=bool(packed))
        old = bare.gather(np.arange(8), np.arange(8, dtype=np.uint64), tokenizer)
        assert rows.keys() - old.keys() == {"speaker_ids", "kind_ids"}
        for name, values in old.items():
            np.testing.assert_array_equal(values, rows[name])
    # Row 0 of full sentences begins with the first tokens of the store.
    plan = make_plan(store, "full_sentences", 24, 0, streams=["speaker", "kind"])
    rows = plan.gather(np.zeros(1, int), np.zeros(1, np.uint64), tokenizer)
    n = rows["input_ids"][0].tolist().index(tokenizer.sep_id) - 1
    want = np.repeat(store.streams["speaker"].ids, np.diff(store.sentences))[:n]
    np.testing.assert_array_equal(rows["speaker_ids"][0, 1 : n + 1], want)
    want = store.streams["kind"].ids[:n]
    np.testing.assert_array_equal(rows["kind_ids"][0, 1 : n + 1], want)
    assert n > 5
    with pytest.raises(UserError, match=r"no stream `topic`.*data\.streams"):
        make_plan(store, "document", 24, 0, streams=["topic"])


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"sentences": ["a", "b"], "speaker": ["x"]}, "a.jsonl, line 2.*each of the 2"),
        ({"sentences": ["a"]}, "a.jsonl, line 2.*no field `speaker`.*`sentences`"),
        ({"sentences": ["a"], "speaker": [[[0, 9, "x"]]]}, "line 2.*0 to 9.*1 char"),
        ({"sentences": ["a"], "speaker": [{"x": 1}]}, "line 2.*not text but dict"),
        ({"sentences": ["a"], "speaker": [[[0, 1, "x"]]]}, "a.jsonl.*ranges in some"),
        ({"text": "a", "speaker": "x"}, "line 2.*not a list of"),
    ],
)
def test_bad_records_are_named_by_their_line(given_data, tmp_path, record, match):
    good = {"sentences": ["the cat"], "speaker": ["ann"]}
    lines = "".join(json.dumps(r) + "\n" for r in (good, record))
    (tmp_path / "a.jsonl").write_text(lines)
    wrong = {**given_data[1], "streams": "speaker", "valid": ""}
    with pytest.raises(UserError, match=match):
        prepare_data(workers=1, say=quiet, **wrong)


def test_validation_text_of_another_kind_is_refused(given_data, tmp_path):
    (tmp_path / "v.jsonl").write_text(
        json.dumps({"sentences": ["the cat"], "speaker": [[[0, 3, "ann"]]]}) + "\n"
    )
    wrong = {**given_data[1], "streams": "speaker"}
    with pytest.raises(UserError, match=r"v\.jsonl, line 1: `speaker` has ranges"):
        prepare_data(workers=1, say=quiet, **wrong)


@pytest.mark.parametrize(
    "written", ["Type", "input", "a,a", "a:x", "a:0", "tokens", "role"]
)
def test_names_that_are_none(written):
    with pytest.raises(UserError, match=r"data\.streams"):
        read_streams(written)


def test_values_beyond_the_cap_are_unknown():
    stream = Stream(make_vocab("sentence", Counter("aabbbcd"), 2))
    assert [stream.id_of(v) for v in ("b", "a", "c", None)] == [2, 3, 1, 0]


@given(st.data())
def test_a_token_has_the_value_of_the_range_that_it_touches(data):
    """By definition, the last range that overlaps a token decides its value."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    gaps = data.draw(st.lists(st.integers(0, 1), min_size=12, max_size=12))
    spans, at = [], 0
    for size, gap in zip(sizes, gaps, strict=False):
        spans.append((at + gap, at + gap + size))
        at += gap + size
    ranges = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, at - 1), st.integers(1, 6), st.sampled_from("abc")
            ),
            max_size=5,
        )
    )
    ranges = tuple((a, min(a + n, at), v) for a, n, v in ranges)
    stream = Stream(StreamVocab("token", ("a", "b")))
    want = np.zeros(len(spans), int)
    for first, last, value in ranges:
        for n, (begin, end) in enumerate(spans):
            if begin < last and end > first:
                want[n] = stream.id_of(value)
    np.testing.assert_array_equal(stream.of_tokens("x", ranges, spans), want)


@given(
    st.lists(st.sampled_from(["int", "x", "\t", " ", "\x00", "\n", "é"]), min_size=1),
    st.data(),
)
def test_ranges_move_with_their_characters(parts, data):
    """In a line, a range covers what remains of the text that it covered before."""
    text = "".join(parts)
    a = data.draw(st.integers(0, len(text) - 1))
    b = data.draw(st.integers(a + 1, len(text)))
    record = {"text": text, "type": [[a, b, "v"]]}
    document = make_document(record, Fields(streams="type"), str, Counter())
    covered = "".join(
        line[first:last]
        for line, own in zip(document.paragraphs, document.values, strict=True)
        for first, last, _ in own["type"]
    )
    kept = text[a:b].replace("\x00", "")
    assert covered.replace(" ", "") == "".join(kept.split())


@given(
    st.lists(st.sampled_from(["", "a", "bc", "def"]), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=6),
)
def test_a_line_has_the_ranges_that_reach_into_it(lines, drawn):
    text = "\n".join(lines)
    ranges = [[a, a + n, f"v{a}"] for a, n in drawn if a + n <= len(text)]
    record = {"text": text, "type": ranges}
    document = make_document(record, Fields(streams="type"), str, Counter())
    start, wanted = 0, []
    for line in lines:
        end = start + len(line)
        cuts = (
            (max(a, start) - start, min(b, end) - start, value)
            for a, b, value in sorted(map(tuple, ranges))
        )
        wanted += [tuple(cut for cut in cuts if cut[0] < cut[1])] if line else []
        start = end + 1
    assert [value["type"] for value in document.values] == wanted


def test_ranges_of_a_long_text_are_looked_at_once():
    """Each line used to visit all ranges before it: 0.4 MB took 4 s, and 30 s with a
    range over the whole text."""
    n, line = 12_000, "String name;"
    ranges = [[i * 13 + 7, i * 13 + 11, "String"] for i in range(n)]
    record = {"text": "\n".join([line] * n), "type": [[0, 13 * n - 1, "x"], *ranges]}
    begun = time.process_time()
    document = make_document(record, Fields(streams="type"), str, Counter())
    assert time.process_time() - begun < 1.5
    assert document.values[-1]["type"] == ((0, 12, "x"), (7, 11, "String"))


def test_a_later_format_is_refused(given_data):
    store = prepare_data(workers=1, say=quiet, **given_data[1]).parts["train"]
    meta = store.path / "meta.json"
    meta.write_text(json.dumps({**store.meta, "format": FORMAT + 1}))
    with pytest.raises(UserError, match="later version"):
        open_store(store.path)


def test_text_beside_records_with_values_is_cut_at_its_sentences():
    tokenizer = SimpleNamespace(kind="wordpiece", has_sentences=True)
    tokenizer.joins_with_space = False
    prose = ["One here. Two here."]
    block = Block(parts=[prose, ["int a. int b."]], values=[[], [{"type": ()}]])
    texts, owners, _ = split_block(tokenizer, block)
    assert texts == ["One here.", "Two here.", "int a. int b."]
    assert owners == [0, 0, 1]

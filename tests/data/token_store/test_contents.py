# SPDX-License-Identifier: Apache-2.0
"""What stores hold besides text: ids, groups, marks."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_texts import (
    VOCAB,
    WORDS,
    documents,
    hashes,
    left,
    paragraph,
    quiet,
    small_pieces,
)

from bertjax import UserError
from bertjax.data.corpus.documents import Document
from bertjax.data.corpus.sentences import split_sentences
from bertjax.data.token_store import encoding, pieces
from bertjax.data.token_store import prepare_data as text
from bertjax.data.token_store.store import open_store, verify
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bertjax.data.tokenizers.word_starts import make_marker


@pytest.fixture
def given_(tmp_path, monkeypatch) -> dict:
    return small_pieces(tmp_path, monkeypatch)


# Integers and names


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.txt", "1 2\r\n\n3. 4\n", "a.txt, line 3"),
        ("a.txt.gz", "1 2\n\n\n3. 4\n", "a.txt.gz, line 4"),
        ("a.jsonl", '{"text": [1, 2]}\n{"text": ["3", "3. 4"]}', "a.jsonl, line 2"),
    ],
)
def test_what_is_no_id_is_found(given_, tmp_path, name, content, where):
    many = "7 8 9\n" * 3000 if name == "a.txt" else ""  # in a later piece
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write((many + content).encode())
    given_ |= {"train": f"{tmp_path}/{name}", "valid": "", "vocab": "ids:10"}
    where = where.replace("line 3", f"line {3 + many.count(chr(10))}")
    with pytest.raises(UserError) as caught:
        text.prepare_data(**given_, workers=1, say=quiet)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/{where}: data.vocab=ids:10: '3.' in the text")
    assert left(given_["cache"]) <= {"fingerprints.json", "parts"}


def test_a_line_at_which_the_tokenizer_gives_up_is_found(given_, tmp_path):
    """A regular expression of it would backtrack forever; the library panics."""
    library = load_tokenizer(tmp_path / "vocab.txt").engine.tokenizer
    data = json.loads(library.to_str())
    pattern = {"Regex": "(x+x+)+y"}
    data["normalizer"] = {"type": "Replace", "pattern": pattern, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "a.txt").write_text(f"the cat\n\non a mat\nit {'x' * 60}\n")
    given_ |= {"train": f"{tmp_path}/a.txt", "valid": ""}
    given_["vocab"] = f"{tmp_path}/tokenizer.json"
    with pytest.raises(UserError) as caught:
        text.prepare_data(**given_, workers=1, say=quiet)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/a.txt, line 4: data.vocab: its tokenizer")
    assert "\n" not in said


def test_capitals_that_the_vocabulary_lacks_are_told_of(given_, tmp_path):
    (tmp_path / "a.txt").write_text("The cat sat.\n\nThe mat ran off.\n")
    said = []
    given_ |= {"train": f"{tmp_path}/a.txt", "valid": "", "lower_case": False}
    for _ in range(2):  # a new store, then the existing one
        text.prepare_data(**given_, workers=1, say=said.append)
        told = said.pop()
        assert told.startswith("train: 22.22% of a sample's tokens are unknown words")
    text.prepare_data(**given_ | {"lower_case": None}, workers=1, say=said.append)
    assert not [line for line in said if "with capitals" in line]


def test_documents_of_a_single_sentence_are_told_of(given_, tmp_path):
    (tmp_path / "a.txt").write_text("The cat.\n\nThe mat.\n\nIt ran off. It sat.\n")
    said = []
    given_ |= {"train": f"{tmp_path}/a.txt", "valid": ""}
    for vocab, number in ((given_["vocab"], 1), (f"ids:{tmp_path}/vocab.txt", 0)):
        names = tmp_path / "vocab.txt"
        names.write_text("\n".join(VOCAB if number else ["The", "cat."]))
        text.prepare_data(**given_ | {"vocab": vocab}, workers=1, say=said.append)
        told = [line for line in said if "single sentence" in line]
        assert len(told) == number
        said.clear()
        if number:
            assert told[0].startswith("train: 67% of the documents are a single sente")


def test_a_line_of_ids_is_one_sentence(given_, tmp_path):
    (tmp_path / "names.txt").write_text("A.\nB!\n。\nC")
    (tmp_path / "a.txt").write_text("A. C B! C 。 C\nC 。 \n\n C\n")
    given_ |= {
        "train": f"{tmp_path}/a.txt",
        "valid": "",
        "vocab": f"ids:{tmp_path}/names.txt",
    }
    store = text.prepare_data(**given_, workers=1, say=quiet).parts["train"]
    assert documents(store) == [[[5, 8, 6, 8, 7, 8], [8, 7]], [[8]]]


# Groups


def test_groups_become_stores(given_, tmp_path):
    given_ |= {"train": f"{tmp_path}/d.jsonl", "valid": "", "group_field": "lang"}
    said: list[str] = []
    first = text.prepare_data(**given_, workers=1, say=said.append)
    assert [*first.parts] == ["en", "w.o", "zh-x"]
    ids = {word: i for i, word in enumerate(VOCAB)}
    records = [json.loads(x) for x in (tmp_path / "d.jsonl").read_text().splitlines()]
    for group, store in first.parts.items():
        want = [r["text"] for r in records if r["lang"] == group]
        assert documents(store) == [[[ids[w] for w in t.split()]] for t in want]
    again: list[str] = []
    assert hashes(text.prepare_data(**given_, workers=1, say=again.append)) == hashes(
        first
    )
    assert again == said and said[0].startswith("train en: ")
    sharded = {**given_, "cache": f"{tmp_path}/2"}
    for index in range(2):
        text.Work(sharded, 1, quiet).encode_shard(index, 2)
    assert hashes(text.Work(sharded, 1, quiet).merge_shards(2)) == hashes(first)
    given_["train"] = f"web={tmp_path}/d.jsonl"
    given_["valid"] = f"web={tmp_path}/d.jsonl,en={tmp_path}/d.jsonl"
    said.clear()
    named = text.prepare_data(**given_, workers=1, say=said.append)
    assert [*named.parts] == ["web.en", "web.w.o", "web.zh-x"]
    told = [line.partition(":")[0] for line in said]
    assert told[::3] == ["train web.en", "valid web.en", "valid en.en"]


def test_merging_looks_at_the_blocks_of_a_group_alone(given_, tmp_path, monkeypatch):
    """Reading all blocks for each group took over a minute with 2,000 groups."""
    n, path = 60, tmp_path / "many.jsonl"
    lines = ({"text": "the cat sat .", "repo": f"a/{i % n}"} for i in range(2 * n))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(pieces.cut, "__defaults__", (1 << 20,))
    given_ |= {"train": str(path), "valid": "", "group_field": "repo"}
    real, read = np.fromfile, []

    def spy(*args, **kwargs):
        read.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "fromfile", spy)
    made = text.prepare_data(**given_, workers=1, say=quiet)
    assert len(made.parts) == n and len(read) == 1 + 3 * n
    assert made.parts["a/7"].meta["documents"] == 2


def test_groups_may_have_any_printable_name(given_, tmp_path):
    names = ["../.. x", "apache/commons-lang", "中文=1,2"]
    path = tmp_path / "e.jsonl"

    def lines(names):
        rows = [json.dumps({"text": "the cat .", "repo": n}) for n in names]
        path.write_text("\n".join(rows))

    lines(names)
    given_ |= {"train": str(path), "valid": str(path), "group_field": "repo"}
    made = text.prepare_data(**given_, workers=1, say=quiet)
    assert [*made.parts] == [*made.valid] == names
    assert all(tmp_path / "cache" in s.path.parents for s in made.parts.values())
    lines(["train/a"])
    with pytest.raises(UserError, match="`train/a` is a name of training text"):
        text.prepare_data(**given_, workers=1, say=quiet)
    lines(["b.c", "c"])
    given_ |= {"train": f"a={path},a.b={path}", "valid": ""}
    with pytest.raises(UserError, match=r"two parts have the name a\.b\.c"):
        text.prepare_data(**given_, workers=1, say=quiet)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("xyz"), st.lists(st.text("ab ", min_size=1), min_size=1)
        )
    ),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_blocks_of_groups_hold_everything_in_order(drawn, size):
    wanted: dict[str, list[list[str]]] = {}
    for group, paragraphs in drawn:
        wanted.setdefault(group, []).append(paragraphs)
    found: dict[str, list[list[str]]] = {}
    texts = (Document(paragraphs, group) for group, paragraphs in drawn)
    for block in encoding.blocks(texts, size):
        assert block.characters == sum(len(p) for part in block.parts for p in part)
        held = found.setdefault(block.group, [])
        for part, begins in zip(block.parts, block.begins, strict=True):
            if begins:
                held.append([])
            held[-1] += part
    assert found == wanted


# Marks


class Toy:
    """Marks an entity's words and odd positions, so that marks can be recomputed."""

    identity = "toy"

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, sentences, joined, entities):
        out = []
        for sentence, after in zip(sentences, joined, strict=True):
            ids = self.tokenizer.encode(sentence)
            names = {i for e in entities for i in self.tokenizer.encode(e)}
            out.append((ids, [after + 2 * (i in names) for i in ids]))
        return out


def test_marks_are_stored_beside_the_tokens(given_, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    records = [
        {
            "text": paragraph(rng) + "\n" + paragraph(rng).capitalize() + " The cat .",
            "names": [str(rng.choice(WORDS))],
        }
        for _ in range(100)
    ]
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (tmp_path / "e.jsonl").write_text(lines)
    plain = {**given_, "train": f"{tmp_path}/e.jsonl", "valid": ""}
    plain_store = text.prepare_data(**plain, workers=1, say=quiet).parts["train"]
    assert plain_store.marks is None and plain_store.meta["format"] == 1
    monkeypatch.setattr(text, "make_marker", lambda tokenizer, *_: Toy(tokenizer))
    given_ = {**plain, "entity_field": "names"}
    prepared = text.prepare_data(**given_, workers=1, say=quiet)
    store = prepared.parts["train"]
    verify(store)
    assert np.array_equal(store.tokens, plain_store.tokens)
    assert store.path != plain_store.path and store.meta["format"] == 2
    assert store.content_hash != plain_store.content_hash
    assert store.marks.dtype == np.uint8 and len(store.marks) == len(store.tokens)
    number = 0
    for d, record in enumerate(records):
        name = VOCAB.index(record["names"][0])
        for s in range(store.documents[d], store.documents[d + 1]):
            a, b = store.sentences[s : s + 2]
            assert np.array_equal(store.marks[a:b] & 2, 2 * (store.tokens[a:b] == name))
            number += b - a
    assert number == len(store.marks)
    damaged = bytearray((store.path / "marks.bin").read_bytes())
    damaged[3] ^= 1
    (store.path / "marks.bin").write_bytes(damaged)
    with pytest.raises(UserError, match=r"marks\.bin"):
        verify(open_store(store.path))


# Sentences without a space between them


def metaspace(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Return a Unigram tokenizer.json with the pieces of a SentencePiece model."""
    scores = [[piece, -float(i)] for i, piece in enumerate(tokenizer.pieces)]
    added = [
        {"id": int(i), "content": tokenizer.pieces[i], "special": True,
         "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i in tokenizer.special_ids
    ]  # fmt: skip
    data = {"version": "1.0", "added_tokens": added, "normalizer": None}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [spaces]}
    data["model"] = {"type": "Unigram", "unk_id": tokenizer.unk_id, "vocab": scores}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["unigram", "bpe", "tokenizer.json"])
def test_only_spaces_of_the_text_become_pieces(kind, tmp_path):
    texts = [
        "我来到北京。你好。今天天气很好。",
        "好。 我来。今天 a cat。The end. 你好。好",
    ]
    texts += ["The cat.", "。好。"]
    sample = [*texts, "好。 。a 。The cat end"] * 20
    known = kind != "tokenizer.json"
    tokenizer = train_tokenizer(sample, kind if known else "unigram", 60, False)
    if not known:
        tokenizer = metaspace(tokenizer, tmp_path)
    for marker in (None, make_marker(tokenizer, "", entities=True)):
        for text_ in texts:
            block = encoding.Block("", [[text_]], [True], [("cat", "好")], len(text_))
            encoded = encoding.encode_block(tokenizer, block, marker)
            found = "".join(tokenizer.pieces[i] for i in encoded.tokens)
            assert found == "▁" + text_.replace(" ", "▁")
            assert len(encoded.lengths) == len(split_sentences(text_))

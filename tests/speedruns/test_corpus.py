# SPDX-License-Identifier: Apache-2.0
"""The text of the speedruns, made from small files of the same formats."""

import gzip
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.speedruns import corpus

WIKI = "= A =\none two three\nfour five\n\n= B =\nsix seven eight nine\n"
TALK = [{"turns": [{"text": "hello  there"}, {"utterance": "yes"}]}, {"turns": []}]


def zipped(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def part(name, file, words, spread=False, text=""):
    known = hashlib.sha256(text.encode()).hexdigest()
    return corpus.Part(name, file, words, spread, known)


@pytest.fixture
def folder(tmp_path):
    zipped(tmp_path / "wiki.txt.gz", WIKI)
    zipped(tmp_path / "talk.jsonl.gz", "\n".join(map(json.dumps, TALK)))
    (tmp_path / "blimp").mkdir()
    (tmp_path / corpus.PAIRS).write_bytes(b"pairs")
    return tmp_path


def test_documents_in_their_order_until_the_words_are_there(folder):
    wiki = part("wiki", "wiki.txt.gz", 10)
    # The first document has 8 words, "= A =" and five; the second adds its first two.
    assert corpus.take(wiki, folder) == "= A =\none two three\nfour five\n\n= B\n"


def test_equal_shares_of_all_documents(folder):
    wiki = part("wiki", "wiki.txt.gz", 8, spread=True)
    assert corpus.take(wiki, folder) == "= A =\none\n\n= B =\nsix\n"


def test_the_turns_of_conversations(folder):
    talk = part("talk", "talk.jsonl.gz", 3)
    assert corpus.take(talk, folder) == "hello there\nyes\n"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_shares_are_whole_fair_and_add_up(sizes, data):
    words = data.draw(st.integers(0, sum(sizes)))
    shares = corpus.equal_shares(sizes, words)
    assert sum(shares) == words
    assert all(share <= size for share, size in zip(shares, sizes, strict=True))
    cut = [s for s, size in zip(shares, sizes, strict=True) if s < size]
    # A truncated document has the largest share, up to one word of the remainder.
    assert not cut or max(shares) - min(cut) <= 1


@pytest.fixture
def known(folder, monkeypatch):
    """The folder, with the corpus's parts and hashes patched to the small files."""
    text = "= A =\none two three\nfour five\n\n= B\n"
    wiki = part("wiki", "wiki.txt.gz", 10, text=text)
    monkeypatch.setattr(corpus, "PARTS", (wiki,))
    talk = part("valid", "talk.jsonl.gz", 3, text="hello there\nyes\n")
    monkeypatch.setattr(corpus, "VALID", talk)
    pairs = hashlib.sha256(b"pairs").hexdigest()
    monkeypatch.setattr(corpus, "PAIRS_SHA256", pairs)
    return folder


def test_it_is_made_once(known, tmp_path):
    target = corpus.place(tmp_path / "cache")
    said = []
    corpus.make_corpus(known, target, said.append)
    assert said == ["wiki: 10 words", "valid: 3 words"]
    assert {p.name for p in target.iterdir()} == {
        "wiki.txt",
        "valid.txt",
        "pairs.jsonl.gz",
    }
    (known / "wiki.txt.gz").unlink()
    corpus.make_corpus(known, target, said.append)
    assert len(said) == 2


@pytest.mark.parametrize("file", ["wiki.txt", "pairs.jsonl.gz"])
@pytest.mark.parametrize("content", [b"cut", None])
def test_text_that_was_damaged_is_built_again(known, tmp_path, file, content):
    target, said = corpus.place(tmp_path / "cache"), []
    corpus.make_corpus(known, target, said.append)
    whole = (target / file).read_bytes()
    (target / file).unlink()
    if content is not None:
        (target / file).write_bytes(content)
    corpus.make_corpus(known, target, said.append)
    assert said[2] == f"{target} is damaged: the text is built again"
    assert (target / file).read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    ["[1, 2]", '{"turns": 5}', '{"turns": ["a"]}', '{"turns": [{"text": 3}]}', "{"],
)
def test_a_line_that_is_no_conversation_is_named(known, tmp_path, line):
    talk = "\n".join([json.dumps(TALK[0]), line])
    zipped(known / "talk.jsonl.gz", talk)
    with pytest.raises(UserError, match=r"talk.jsonl.gz .* line 2 is no conversation"):
        corpus.make_corpus(known, tmp_path / "text", lambda line: None)


def test_damaged_gzip_is_named(known, tmp_path):
    packed = bytearray((known / "wiki.txt.gz").read_bytes())
    packed[20:28] = bytes(8)
    (known / "wiki.txt.gz").write_bytes(packed)
    with pytest.raises(UserError, match=r"wiki\.txt\.gz cannot be read"):
        corpus.make_corpus(known, tmp_path / "text", lambda line: None)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("wiki.txt.gz", WIKI.replace("one", "two"), "wiki of wiki.txt.gz has the SHA"),
        ("wiki.txt.gz", "too short", "has 2 words, and wiki needs 10"),
        ("wiki.txt.gz", None, "wiki.txt.gz cannot be read"),
        (corpus.PAIRS, "other pairs", "blimp/pairs.jsonl.gz has the SHA"),
        (corpus.PAIRS, None, "blimp/pairs.jsonl.gz cannot be read"),
    ],
)
def test_other_files_leave_nothing(known, tmp_path, file, content, message):
    if content is None:
        (known / file).unlink()
    else:
        zipped(known / file, content)
    target = corpus.place(tmp_path / "cache")
    with pytest.raises(UserError, match=message):
        corpus.make_corpus(known, target, lambda line: None)
    assert not target.parent.exists()


def test_the_parts_are_ten_million_words():
    assert sum(part.words for part in corpus.PARTS) == 10_000_000

# SPDX-License-Identifier: Apache-2.0
"""Token stores: contents, reuse, interruption, damage, full disks."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_texts import build_store

from bertjax import UserError
from bertjax.data.corpus.documents import Document, Source
from bertjax.data.token_store import encoding
from bertjax.data.token_store.store import Store, open_store, verify
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bertjax.storage import directories

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "."]


class Memory(Source):
    """A source of documents in memory."""

    def __init__(self, *documents: list[str], name: str = "memory") -> None:
        self.found = [Document(paragraphs) for paragraphs in documents]
        self.name = name
        self.read = 0

    def fingerprint(self, cache_dir, say=print):
        return json.dumps(self.found)

    def documents(self, counts, max_line_bytes):
        self.read += 1
        counter = counts[self.name]
        counter["bad_utf8"] += 2
        counter["documents"] += len(self.found)
        yield from self.found


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES))
    return load_tokenizer(path)


def build(sources, tokenizer, cache, **more) -> Store:
    more.setdefault("say", lambda line: None)
    return build_store(sources, tokenizer, cache, max_line_bytes=1 << 20, **more)


def arrays(store: Store) -> list[list[int]]:
    kept = store.tokens, store.sentences, store.documents, store.counts
    return [a.tolist() for a in kept]


def test_what_is_in_a_store(tokenizer, tmp_path):
    said: list[str] = []
    # The second paragraph and the second document yield no token (a zero width space).
    first = Memory(["A b. C c.", "\u200b", "zz"], ["\u200b"])
    second = Memory(["[MASK] a"])
    store = build([first, second], tokenizer, tmp_path / "c", say=said.append)
    assert arrays(store) == [
        [5, 6, 8, 7, 7, 8, 1, 1, 1, 1, 5],
        [0, 3, 6, 7, 11],
        [0, 3, 4],
        [0, 4, 0, 0, 0, 2, 1, 2, 2],
    ]
    assert store.tokens.dtype == np.uint16
    assert {a.dtype for a in (store.sentences, store.documents)} == {np.dtype("<i8")}
    assert said[0].startswith("train: 11 tokens, 4 sentences, 2 documents, 36.36% unk")
    assert said[1].startswith("4 byte sequences outside UTF-8, replaced")
    assert said[2:] == [
        "2 sentences without a token, left out (train)",
        "1 document without a token, left out (train)",
    ]
    assert os.listdir(tmp_path / "c") == [store.path.name]
    verify(store)


def test_a_store_is_reused_and_reports_its_repairs_again(tokenizer, tmp_path):
    source = Memory(["a b. C."])
    said: list[list[str]] = [[], []]
    first = build([source], tokenizer, tmp_path, say=said[0].append)
    second = build([source], tokenizer, tmp_path, say=said[1].append)
    assert source.read == 1 and said[0] == said[1] and len(said[0]) == 2
    assert first.path == second.path and first.content_hash == second.content_hash
    assert arrays(open_store(first.path)) == arrays(first)


def test_what_makes_another_store(tokenizer, tmp_path):
    a, b = Memory(["a."]), Memory(["b."])
    cased = load_tokenizer(tmp_path / "vocab.txt", lower_case=False)
    stores = [
        build([a, b], tokenizer, tmp_path),
        build([b, a], tokenizer, tmp_path),
        build([a, b], cased, tmp_path),
        build([a, b], tokenizer, tmp_path, label="valid"),
        build_store([a, b], tokenizer, tmp_path, max_line_bytes=9, say=lambda _: None),
    ]
    assert len({s.path for s in stores}) == 5
    # Settings that change no token do not change the content hash.
    assert [s.content_hash == stores[0].content_hash for s in stores] == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_store_is_the_same_in_another_place(tokenizer, tmp_path):
    here = build([Memory(["a b."])], tokenizer, tmp_path / "x")
    there = build([Memory(["a b."], name="other")], tokenizer, tmp_path / "y")
    assert here.content_hash == there.content_hash
    assert here.path.name == there.path.name


DOCUMENTS = [
    [" ".join("abc"[(d * p + w) % 3] for w in range(d + p)) + "." for p in range(1, 6)]
    for d in range(40)
]


def test_blocks_and_workers_change_nothing(tokenizer, tmp_path, monkeypatch):
    whole = build([Memory(*DOCUMENTS)], tokenizer, tmp_path / "1", workers=1)
    assert whole.meta["documents"] == 40
    monkeypatch.setattr(encoding.blocks, "__defaults__", (100,))
    cut = build([Memory(*DOCUMENTS)], tokenizer, tmp_path / "2", workers=1)
    spread = build([Memory(*DOCUMENTS)], tokenizer, tmp_path / "3", workers=2)
    assert arrays(whole) == arrays(cut) == arrays(spread)
    assert whole.content_hash == cut.content_hash == spread.content_hash


def test_paragraphs_of_extreme_length_are_cut_and_nothing_is_lost():
    text = "One. Two three four. " + "x" * 25 + " five"
    found = list(encoding.pieces(text, 10))
    assert found[:4] == ["One.", "Two three", "four.", "x" * 10]
    assert max(map(len, found)) <= 10
    assert "".join(found).replace(" ", "") == text.replace(" ", "")


def test_byte_bpe_keeps_the_space_between_sentences():
    text = 'One.  "Two."  三。四。'
    sentences = ["One.", '"Two."', "三。", "四。"]
    spaced = ["One.", ' "Two."', " 三。", "四。"]
    assert encoding.with_spaces(text, sentences) == spaced


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    tokenizer.engine.encode_batch = lambda texts, *_: [[5, 9] for _ in texts]
    block = encoding.Block("", [["a"]], [True], [()], 1)
    with pytest.raises(UserError, match="id 9"):
        encoding.encode_block(tokenizer, block)


def test_a_text_without_a_token_is_refused(tokenizer, tmp_path):
    cache = tmp_path / "c"
    with pytest.raises(UserError, match=r"empty\.txt"):
        build([Memory(["\u200b"], name="empty.txt")], tokenizer, cache)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
def test_damage_is_named(name, tokenizer, tmp_path):
    store = build([Memory(["a b. C."])], tokenizer, tmp_path)
    file = store.path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        build([Memory(["a b. C."])], tokenizer, tmp_path)
    assert str(file) in str(caught.value) and "delete" in str(caught.value)


def test_a_flipped_bit_is_found_by_verify(tokenizer, tmp_path):
    store = build([Memory(["a b. C."])], tokenizer, tmp_path)
    data = bytearray((store.path / "tokens.bin").read_bytes())
    data[2] ^= 1
    (store.path / "tokens.bin").write_bytes(data)
    with pytest.raises(UserError, match="checksum"):
        verify(open_store(store.path))


def test_later_formats_and_other_directories_are_refused(tokenizer, tmp_path):
    store = build([Memory(["a b."])], tokenizer, tmp_path)
    meta = store.path / "meta.json"
    meta.write_text(json.dumps({**store.meta, "format": 99}))
    with pytest.raises(UserError, match="later version"):
        open_store(store.path)
    with pytest.raises(UserError, match="not a token store"):
        open_store(tmp_path / "nothing")


# Directories that are either complete or absent

BUILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_store import *
class Stops(Memory):
    def documents(self, counts, max_line_bytes):
        yield from self.found
        {stop}
if __name__ == "__main__":
    root = Path(sys.argv[2])
    {before}
    try:
        build([Stops(*DOCUMENTS)], load_tokenizer(root / "vocab.txt"), root / "cache")
    except UserError as e:
        print("error:", e)
"""


def run_build(tmp_path, stop="pass", before="pass") -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(BUILD.format(stop=stop, before=before))
    command = [sys.executable, script, Path(__file__).parent, tmp_path]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_killed_build_leaves_nothing_that_looks_finished(tokenizer, tmp_path):
    killed = run_build(tmp_path, stop="os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL
    (parts,) = (tmp_path / "cache").iterdir()
    assert parts.name.startswith("parts-")
    left = os.listdir(parts)
    assert left and all(n.startswith(directories.TEMPORARY) for n in left)
    store = build([Memory(*DOCUMENTS)], tokenizer, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == [store.path.name]
    verify(store)


def test_a_full_disk_is_one_line(tokenizer, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))"
    ended = run_build(tmp_path, before=limit)
    cache = tmp_path / "cache"
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"error: data.cache={cache} cannot be written: ")
    assert not cache.exists()


def test_a_file_where_the_cache_should_be(tokenizer, tmp_path):
    (tmp_path / "file").write_text("x")
    for cache in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UserError, match=r"data\.cache=.*directory"):
            build([Memory(["a."])], tokenizer, cache)


def test_work_of_living_processes_is_left_alone(tmp_path):
    def outer(path: Path) -> None:
        (path / "mine").write_text("outer")
        # Another process begins, cleans up, and finishes the same directory first.
        directories.make_whole(tmp_path / "t", lambda p: (p / "his").write_text("x"))
        assert (path / "mine").exists()

    directories.make_whole(tmp_path / "t", outer)
    assert os.listdir(tmp_path) == ["t"] and os.listdir(tmp_path / "t") == ["his"]


def test_a_sweep_that_has_the_lock_just_now(tmp_path, monkeypatch):
    lock, said = fcntl.flock, []

    def taken_once(file, how):
        if not said:
            said.append(file.name)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        lock(file, how)

    monkeypatch.setattr(directories.fcntl, "flock", taken_once)
    directories.make_whole(tmp_path / "t", lambda p: None)
    assert said and (tmp_path / "t").is_dir()


def test_errors_of_the_work_pass_and_leave_nothing(tmp_path):
    def fails(path: Path) -> None:
        (path / "part").write_text("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        directories.make_whole(tmp_path / "t", fails)
    assert os.listdir(tmp_path) == []

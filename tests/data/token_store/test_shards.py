# SPDX-License-Identifier: Apache-2.0
"""Preparing in pieces: shards, restarts and faults create the same stores."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_texts import documents, hashes, left, quiet, reference, small_pieces

from bertjax import UserError
from bertjax.data.corpus import files
from bertjax.data.token_store import components, encoding, pieces, trained_tokenizer
from bertjax.data.token_store import prepare_data as text
from bertjax.data.token_store.cache import open_cache


@pytest.fixture
def given_(tmp_path, monkeypatch) -> dict:
    return small_pieces(tmp_path, monkeypatch)


# Pieces and shards


def test_shards_pools_and_one_process_give_the_same_stores(given_, tmp_path):
    one = text.prepare_data(**given_, workers=1, say=quiet)
    assert [*one.parts] == ["one", "two"] and [*one.valid] == ["valid"]
    two = text.prepare_data(
        **{**given_, "cache": f"{tmp_path}/2"}, workers=2, say=quiet
    )
    sharded = {**given_, "cache": f"{tmp_path}/3"}
    for index in (2, 0, 1):
        text.Work(sharded, 1, quiet).encode_shard(index, 3)
    merged = text.Work(sharded, 1, quiet).merge_shards(3)
    assert hashes(one) == hashes(two) == hashes(merged)
    names = {s.path.name for s in one.parts.values()}
    assert names == {s.path.name for s in merged.parts.values()}
    for cache in ("cache", "2", "3"):
        assert left(tmp_path / cache) == {"fingerprints.json", "store"}
    # They equal the result of a single piece.
    assert documents(one.parts["one"]) == reference(tmp_path / "a.txt")


def test_the_pool_takes_pieces_and_blocks(given_, tmp_path, monkeypatch):
    """Lower limits make the work large enough for processes."""
    one = text.prepare_data(**given_, workers=1, say=quiet)
    monkeypatch.setattr(pieces, "SMALL", 0)
    monkeypatch.setattr(encoding, "SMALL", 0)
    taken = []
    submit = encoding.Encoder.submit

    def spy(self, function, *args):
        taken.append(function.__name__)
        return submit(self, function, *args)

    monkeypatch.setattr(encoding.Encoder, "submit", spy)
    two = text.prepare_data(
        **{**given_, "cache": f"{tmp_path}/2"}, workers=2, say=quiet
    )
    assert hashes(one) == hashes(two)
    assert {"encode_piece"} <= set(taken)
    taken.clear()
    given_ |= {"train": f"{tmp_path}/v.txt.gz", "cache": f"{tmp_path}/3"}
    text.prepare_data(**given_, workers=2, say=quiet)
    assert set(taken) == {"encode"}  # one big file is encoded block by block


def test_merging_too_early_names_what_is_lacking(given_, tmp_path):
    text.Work(given_, 1, quiet).encode_shard(1, 3)
    with pytest.raises(UserError) as caught:
        text.Work(given_, 1, quiet).merge_shards(3)
    said = str(caught.value)
    assert "--shard=0/3, 2/3" in said and "one piece 0 of" in said and "\n" not in said
    # Another number of shards reuses the existing pieces.
    for index in range(2):
        text.Work(given_, 1, quiet).encode_shard(index, 2)
    text.Work(given_, 1, quiet).merge_shards(2)
    # Late or repeated commands have nothing to do.
    text.Work(given_, 1, quiet).encode_shard(0, 2)
    text.Work(given_, 1, quiet).merge_shards(2)
    assert left(given_["cache"]) == {"fingerprints.json", "store"}


def test_a_shard_does_only_what_is_left(given_, monkeypatch):
    made = []
    write = pieces._write

    def counting(path, encoder, piece, report):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(str(piece))
        write(path, encoder, piece, report)

    monkeypatch.setattr(pieces, "_write", counting)
    with pytest.raises(KeyboardInterrupt):
        text.prepare_data(**given_, workers=1, say=quiet)
    first = list(made)
    made[:] = []
    monkeypatch.setattr(
        pieces, "_write", lambda *a: (made.append(str(a[2])), write(*a))
    )
    text.prepare_data(**given_, workers=1, say=quiet)
    assert len(first) == 3 and made and not set(first) & set(made)


def test_pieces_cut_otherwise_are_not_merged(given_, tmp_path, monkeypatch):
    want = hashes(
        text.prepare_data(**{**given_, "cache": f"{tmp_path}/1"}, workers=1, say=quiet)
    )
    text.Work(given_, 1, quiet).encode_shard(0, 2)
    monkeypatch.setattr(pieces.cut, "__defaults__", (9000,))
    with pytest.raises(UserError, match="5 of 5 pieces are not there"):
        text.Work(given_, 1, quiet).merge_shards(2)
    assert hashes(text.prepare_data(**given_, workers=1, say=quiet)) == want


def test_a_file_that_changes_between_its_hash_and_its_reading(
    given_, tmp_path, monkeypatch
):
    path = tmp_path / "a.txt"
    inner = components.encode_pieces

    def changes(*args):
        path.write_text("the cat .\n\n" * 500)
        inner(*args)

    with monkeypatch.context() as m:
        m.setattr(components, "encode_pieces", changes)
        with pytest.raises(UserError, match=r"a\.txt: the file changed while it was"):
            text.prepare_data(**given_, workers=1, say=quiet)
    assert not [*Path(given_["cache"]).glob("parts-one-*/*/tokens.bin")]
    store = text.prepare_data(**given_, workers=1, say=quiet).parts["one"]
    assert documents(store) == reference(path)


def test_a_damaged_piece_is_made_again(given_, tmp_path):
    want = hashes(
        text.prepare_data(**{**given_, "cache": f"{tmp_path}/1"}, workers=1, say=quiet)
    )
    for index in range(2):
        text.Work(given_, 1, quiet).encode_shard(index, 2)
    found = sorted(Path(given_["cache"]).glob("parts-one-*/*/tokens.bin"))
    data = bytearray(found[1].read_bytes())
    data[4] ^= 1
    found[1].write_bytes(data)
    (found[2].parent / "meta.json").unlink()
    said: list[str] = []
    merged = text.Work(given_, 1, said.append).merge_shards(2)
    assert hashes(merged) == want
    damaged = [line for line in said if "damaged, it" in line]
    assert len(damaged) == 2 and str(found[1].parent) in damaged[0]


def test_a_source_that_one_shard_cannot_read(given_, tmp_path):
    whole = (tmp_path / "v.txt.gz").read_bytes()
    (tmp_path / "bad.txt.gz").write_bytes(whole[:-20])
    given_["valid"] = f"{tmp_path}/bad.txt.gz"
    failed = []
    for index in range(3):
        try:
            text.Work(given_, 1, quiet).encode_shard(index, 3)
        except UserError as e:
            assert "bad.txt.gz" in str(e)
            failed.append(index)
    assert len(failed) == 1
    with pytest.raises(
        UserError, match=rf"--shard={failed[0]}/3 first .*valid piece 0"
    ):
        text.Work(given_, 1, quiet).merge_shards(3)


def test_components_without_text_are_refused(given_, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n\n" * 3000)
    given_["train"] = f"one={tmp_path}/a.txt,void={tmp_path}/blank.txt"
    with pytest.raises(UserError, match=r"blank\.txt.*no document"):
        text.prepare_data(**given_, workers=1, say=quiet)
    (tmp_path / "blank.txt").write_text("\u200b\n")
    with pytest.raises(UserError, match=r"blank\.txt.*\(void\)"):
        text.prepare_data(**given_, workers=1, say=quiet)


def test_some_files_without_text_are_counted(given_, tmp_path):
    want = text.prepare_data(
        **{**given_, "cache": f"{tmp_path}/1"}, workers=1, say=quiet
    )
    (tmp_path / "b0.txt").write_text("\n \n\n" * 3000)
    (tmp_path / "b1.txt").write_text("")
    (tmp_path / "b2.txt.gz").write_bytes(gzip.compress(b""))
    given_["train"] = given_["train"].replace("b.txt", "b*.txt*")
    said: list[str] = []
    made = text.prepare_data(**given_, workers=1, say=said.append)
    assert hashes(made) == hashes(want)
    (told,) = (line for line in said if "without text" in line)
    assert told.startswith("3 files without text (") and "b1.txt" in told
    for name in ("b.txt", "b0.txt"):
        (tmp_path / name).write_text("")
    given_ |= {"train": f"{tmp_path}/b?.txt", "valid": ""}
    with pytest.raises(UserError, match=r"b0\.txt: the file is empty"):
        text.prepare_data(**given_, workers=1, say=quiet)


def test_two_processes_at_once(given_, tmp_path, monkeypatch):
    """The other process finishes and removes the pieces while this one is working."""
    want = text.prepare_data(
        **{**given_, "cache": f"{tmp_path}/1"}, workers=1, say=quiet
    )
    write = pieces._write
    for moment in (0, 2, -1):
        cache = f"{tmp_path}/m{moment}"
        seen = []

        def meanwhile(
            path, encoder, piece, report, moment=moment, cache=cache, seen=seen
        ):
            write(path, encoder, piece, report)
            seen.append(piece)
            if len(seen) - 1 == moment:
                monkeypatch.setattr(pieces, "_write", write)
                text.prepare_data(**{**given_, "cache": cache}, workers=1, say=quiet)

        monkeypatch.setattr(pieces, "_write", meanwhile)
        got = text.prepare_data(**{**given_, "cache": cache}, workers=1, say=quiet)
        assert hashes(got) == hashes(want)
        assert left(cache) == {"fingerprints.json", "store"}
    # The other process finishes in the middle of a merge.
    cache = f"{tmp_path}/merge"
    inner = components.Component._write

    def other(self, *args):
        monkeypatch.setattr(components.Component, "_write", inner)
        text.prepare_data(**{**given_, "cache": cache}, workers=1, say=quiet)
        inner(self, *args)

    monkeypatch.setattr(components.Component, "_write", other)
    got = text.prepare_data(**{**given_, "cache": cache}, workers=1, say=quiet)
    assert hashes(got) == hashes(want) and left(cache) == {"fingerprints.json", "store"}


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import shutil
from bertjax.data.token_store.store import Hashed
from test_shards import *
left = int(sys.argv[3])  # operations on the disk until the end
def dies(function):
    def counted(*args, **more):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)
    return counted
os.fsync = dies(os.fsync)
Path.rename = dies(Path.rename)
Path.mkdir = dies(Path.mkdir)
Path.unlink = dies(Path.unlink)
shutil.rmtree = dies(shutil.rmtree)
Hashed.write = dies(Hashed.write)
if __name__ == "__main__":
    pieces.cut.__defaults__ = (4000,)
    text.prepare_data(**json.loads(sys.argv[2]), workers=1, say=quiet)
"""


def test_killed_at_any_moment(given_, tmp_path):
    want = hashes(
        text.prepare_data(**{**given_, "cache": f"{tmp_path}/1"}, workers=1, say=quiet)
    )
    (tmp_path / "run.py").write_text(KILLED)
    here = str(Path(__file__).parent)
    # Killed in the first piece, in later ones, in a merge, and while removing pieces.
    for moment in (19, 9, 61, 70, 60, 50):
        command = [tmp_path / "run.py", here, json.dumps(given_), str(moment)]
        ended = subprocess.run([sys.executable, *command], capture_output=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert {"parts", "store"} < left(given_["cache"])
    assert hashes(text.prepare_data(**given_, workers=1, say=quiet)) == want
    assert left(given_["cache"]) == {"fingerprints.json", "store"}


def test_pieces_that_nobody_goes_on_with_are_removed(given_, tmp_path):
    cache = Path(given_["cache"])
    for index in range(2):
        text.Work(given_, 1, quiet).encode_shard(index, 2)
    parts = sorted(p.name for p in cache.glob("parts-*"))
    long_ago = time.time() - pieces.STALE - 60
    for path in cache.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    touched = cache / parts[1] / "000000"  # another process is working there
    os.utime(touched)
    other = {**given_, "train": f"three={tmp_path}/c.txt"}
    said: list[str] = []
    text.prepare_data(**other, workers=1, say=said.append)
    # The validation text is the same, so its pieces were used.
    assert [p.name for p in cache.glob("parts-*")] == [parts[1]]
    assert sum("unfinished pieces of 1 text that" in line for line in said) == 1
    said.clear()
    text.prepare_data(**other, workers=1, say=said.append)
    assert not [line for line in said if "unfinished" in line]


# A cache behind a URL


def test_a_cache_behind_a_url(given_, tmp_path, bucket, monkeypatch):
    want = hashes(text.prepare_data(**given_, workers=1, say=quiet))
    given_ |= {"cache": "gs://bucket/cache", "vocab": ""}
    local = {**given_, "cache": str(tmp_path / "t")}
    want = hashes(text.prepare_data(**local, workers=1, say=quiet))
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m1"))
    made = text.prepare_data(**given_, workers=1, say=quiet)
    assert hashes(made) == want
    assert left(bucket / "cache") == {"store", "tokenizer"}
    assert made.parts["one"].path.is_relative_to(tmp_path / "m1")

    # Another machine copies the existing directories and creates nothing.
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m2"))
    with monkeypatch.context() as m:
        m.setattr(pieces, "_write", None)
        m.setattr(trained_tokenizer, "train_tokenizer", None)
        found = text.prepare_data(**given_, workers=1, say=quiet)
    assert hashes(found) == want
    assert found.parts["one"].path.is_relative_to(tmp_path / "m2")

    # A damaged store is not copied.
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m3"))
    file = next(bucket.glob("cache/store-one-*/tokens.bin"))
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"gs://bucket/cache/store-one-\w+: damaged"):
        text.prepare_data(**given_, workers=1, say=quiet)
    assert not [*(tmp_path / "m3").rglob("store-one-*")]


def test_texts_in_a_bucket_are_hashed_once(given_, tmp_path, bucket, monkeypatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(bucket / name)
    given_ |= {"train": "one=gs://bucket/a.txt,two=gs://bucket/b.txt", "valid": ""}
    given_["cache"] = "gs://bucket/cache"
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m1"))
    want = hashes(text.prepare_data(**given_, workers=1, say=quiet))
    assert left(bucket / "cache") == {"fingerprints.json", "store"}
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m2"))
    with monkeypatch.context() as m:
        m.setattr(files, "hashlib", None)
        assert hashes(text.prepare_data(**given_, workers=1, say=quiet)) == want
    # A changed text gets a new hash; damaged hashes only mean hashing again.
    (bucket / "b.txt").write_text("the cat .")
    other = hashes(text.prepare_data(**given_, workers=1, say=quiet))
    assert other["one"] == want["one"] and other["two"] != want["two"]
    (bucket / "cache/fingerprints.json").write_text("[1]")
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "m3"))
    assert hashes(text.prepare_data(**given_, workers=1, say=quiet)) == other


def test_shards_that_share_nothing_but_a_bucket(given_, tmp_path, bucket, monkeypatch):
    want = hashes(text.prepare_data(**given_, workers=1, say=quiet))
    given_["cache"] = "gs://bucket/cache"
    for index in range(3):
        monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / f"m{index}"))
        text.Work(given_, 1, quiet).encode_shard(index, 3)
        assert not [*(tmp_path / f"m{index}").rglob("tokens.bin")]
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path / "merge"))
    assert hashes(text.Work(given_, 1, quiet).merge_shards(3)) == want
    assert left(bucket / "cache") == {"store"}
    assert not [*(tmp_path / "merge").rglob("parts-*/*")]


def test_a_cache_behind_an_unknown_kind_of_url(tmp_path, monkeypatch):
    monkeypatch.setenv("BERTJAX_LOCAL_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"=foo://b: no such kind of URL: foo://"):
        open_cache("foo://b").has("a")

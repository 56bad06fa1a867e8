# SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all, on a disk and in a bucket."""

import io
import os
from pathlib import Path

import numpy as np
import pytest

from bertjax import UserError
from bertjax.checkpoints.manifest import as_path
from bertjax.storage import atomic, directories


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "new/run.json"
    atomic.write_file(path, "old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic.write_file(path, fail)
    with pytest.raises(UserError, match=r"^--out=x cannot be written: No space left"):
        atomic.write_file(path, fail, "--out=x")
    assert path.read_text() == "old" and os.listdir(path.parent) == ["run.json"]


def test_whatever_writes_to_a_file_writes_to_a_bucket(bucket):
    path = as_path("gs://bucket/run")
    atomic.write_file(path / "a.npy", lambda file: np.save(file, np.arange(3)))
    assert np.load(bucket / "run/a.npy").tolist() == [0, 1, 2]


def test_a_directory_in_a_bucket_is_written_and_read_as_one_here(bucket, tmp_path):
    def fill(folder):
        (folder / "a").write_text("1")
        (folder / "b").write_text("2")

    for path in (as_path("gs://bucket/run"), tmp_path / "run"):
        directories.write_directory(path, fill)
        directories.write_directory(path, lambda folder: (folder / "a").write_text("3"))
        read = directories.read_directory(
            path, lambda folder: {f.name: f.read_text() for f in folder.iterdir()}
        )
        assert read == {"a": "3", "b": "2"}


def test_a_directory_that_cannot_be_made_takes_its_new_parents_along(tmp_path):
    def fail(path):
        raise OSError("disk full")

    with pytest.raises(UserError, match=r"^--to=x cannot be written: disk full"):
        directories.make_whole(tmp_path / "new/parents/x", fail, "--to=x")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_keeps_no_lock(tmp_path, monkeypatch):
    """The file can be made there, and not written."""

    class Full(io.FileIO):
        def write(self, content):
            raise OSError(28, "No space left on device")

    def open_full(name, mode, buffering):
        return Full(name, mode)

    monkeypatch.setattr(directories, "open", open_full, raising=False)
    with pytest.raises(UserError, match=r"^--to=x cannot be written: No space left"):
        directories.make_whole(tmp_path / "x", lambda draft: None, "--to=x")
    assert os.listdir(tmp_path) == []


def test_a_place_where_nothing_can_be_made_is_refused_at_once():
    with pytest.raises(UserError, match=r"^--to=/proc/x cannot be written: No such"):
        directories.make_whole(Path("/proc/x"), lambda draft: None, "--to=/proc/x")


def test_an_output_is_not_what_is_read_which_may_be_a_list_of_files(tmp_path):
    out = tmp_path / "a.jsonl"
    out.touch()
    many = ",".join(f"{i}.jsonl" for i in range(999))
    assert atomic.check_out(str(out), "--out", source=("--text", many)) == out
    with pytest.raises(UserError, match=r"a\.jsonl is --text, which it would replace"):
        atomic.check_out(str(out), "--out", source=("--text", str(out)))


@pytest.mark.parametrize("value", ["{0}/a.txt", "{0}/b.txt,x={0}/a.txt", "{0}/*.txt"])
def test_what_is_read_is_not_replaced(value, tmp_path):
    (tmp_path / "a.txt").write_text("read\n")
    with pytest.raises(
        UserError, match=r"--out=.* is .*--text, which it would replace"
    ):
        atomic.check_out(
            f"{tmp_path}/a.txt", "--out", "", ("--text", value.format(tmp_path))
        )
    named = tmp_path / "data[1].txt", tmp_path / "lr=a.txt"
    for path in named:  # look like a pattern and NAME=FILE
        path.touch()
    for path in (*named, "missing.txt"):
        atomic.check_out(f"{tmp_path}/a.txt", "--out", "", ("--text", str(path)))
    new = atomic.check_out(
        f"{tmp_path}/c.txt", "--out", "", ("--text", value.format(tmp_path))
    )
    assert new == tmp_path / "c.txt"


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    """Not after the work, and nothing is left of the attempt; a device stays one."""
    with pytest.raises(UserError, match="nothing can be made in /proc"):
        atomic.check_out("/proc/x.jsonl", "--out")
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/null", "/dev/stdout", f"{tmp_path}/pipe"):
        with pytest.raises(UserError, match=f"--out={name} is a device or pipe"):
            atomic.check_out(name, "--out")
    atomic.check_out(f"{tmp_path}/new.jsonl", "--out")
    assert os.listdir(tmp_path) == ["pipe"]

# SPDX-License-Identifier: Apache-2.0
"""The top-level files of a workdir, its lock, and a workdir in a bucket."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bertjax import UserError
from bertjax.checkpoints import workdir
from bertjax.storage import atomic, directories
from bertjax.training import step


def test_a_second_process_is_kept_out(tmp_path):
    code = (
        "import pathlib, sys; from bertjax import UserError\n"
        "from bertjax.storage import directories\n"
        "try: directories.lock(pathlib.Path(sys.argv[1]))\n"
        "except UserError as e: print(e)"
    )
    args = [sys.executable, "-c", code, str(tmp_path)]
    with directories.lock(tmp_path):
        said = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    assert "another process trains in it" in said and str(tmp_path) in said
    assert subprocess.run(args, capture_output=True, check=True).stdout == b""


def rows(path, *given, end="\n"):
    text = "\n".join(json.dumps(row) for row in given) + end
    (path / "metrics.jsonl").write_text(text)


def test_done_means_the_last_step_with_its_scores(tmp_path):
    (tmp_path / "run.json").write_text('{"total_steps": 4}')
    train, scores = (
        {"step": 4, "train/loss": 1.0},
        {"step": 4, "eval/valid/mlm_loss": 1},
    )
    rows(tmp_path, train)
    assert not workdir.is_done(tmp_path, 4, scored=True)  # stopped by a signal
    assert workdir.is_done(tmp_path, 4, scored=False)  # nothing to score
    rows(tmp_path, train, scores, end="")  # an incomplete line does not count
    assert not workdir.is_done(tmp_path, 4, scored=True)
    rows(tmp_path, train, scores)
    assert workdir.is_done(tmp_path, 4, scored=True)
    assert not workdir.is_done(tmp_path, 3, scored=True)
    assert not workdir.is_done(tmp_path, None, scored=True)


def test_a_kill_while_a_workdir_is_begun_anew_leaves_its_files(tmp_path, monkeypatch):
    """Each start rewrites them while other commands may read them."""
    how = {"config.json": "{}"}, {}, lambda folder: None
    workdir.begin(tmp_path, *how, np.arange(3))

    def save(file, counts):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(KeyboardInterrupt):
        workdir.begin(tmp_path, *how, np.arange(3))
    assert np.load(tmp_path / "unigram.npy").tolist() == [0, 1, 2]


def test_a_machine_without_git(tmp_path, monkeypatch):
    """Without git, as in a container, the run starts and records no commit."""
    known = workdir.git_commit()
    assert known is None or len(known) == 40
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(workdir.Path, "exists", lambda path: True)
    workdir.begin(tmp_path, {}, {}, lambda folder: None, np.arange(3))
    assert json.loads((tmp_path / "run.json").read_text())["git"] is None


def test_the_commit_of_another_project_is_not_ours(tmp_path, monkeypatch):
    """A virtual environment is often inside the repository of another project."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    names = "-c user.name=x -c user.email=x commit -q --allow-empty -m x"
    subprocess.run(["git", "-C", tmp_path, *names.split()], check=True)
    place = tmp_path / ".venv/site-packages/bertjax/checkpoints/workdir.py"
    monkeypatch.setattr(workdir, "__file__", str(place))
    place.parent.mkdir(parents=True)
    assert workdir.git_commit() is None


def test_an_evaluation_is_broken_off():
    def evaluate(params, batch):
        return {"loss": (np.float32(batch), np.float32(2))}

    assert step.run_eval(evaluate, None, [1, 3]) == {"loss": 1.0}
    asked = iter([False, True])
    assert step.run_eval(evaluate, None, [1, 3, 5], lambda: next(asked)) is None

    def with_stop(params, batch):  # another host got a signal
        return {"loss": (np.float32(1), np.float32(1)), "stop": (batch > 1, 1)}

    assert step.run_eval(with_stop, None, [0] * 3) == {"loss": 1.0}
    assert step.run_eval(with_stop, None, [0, 2, 2, 2, 2]) is None


def test_changed_text_is_refused(tmp_path):
    before = {"train": "a" * 64, "valid": "b" * 64}
    workdir.check_text(tmp_path, before, dict(before))
    with pytest.raises(UserError, match=r"data\.train"):
        workdir.check_text(tmp_path, before, before | {"train": "c" * 64})
    with pytest.raises(UserError, match=r"data\.valid"):
        workdir.check_text(tmp_path, before, {"train": "a" * 64})
    with pytest.raises(UserError, match=r"data\.train or task\.index: the text"):
        changed = before | {"train": "c" * 64}
        workdir.check_text(tmp_path, before, changed, ["task.index"])


def test_rows_that_are_none_are_left_out(tmp_path):
    good = b'{"step": 1}\n'
    junk = b'5\n{"step": "a"}\n\xff\xfe\n{"loss": 1}\n[1]\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + junk + b'{"step": 2}')
    assert workdir.rows_up_to(tmp_path / "metrics.jsonl", 9) == [good.decode()]


def test_a_bucket_holds_a_workdir(bucket):
    from bertjax.checkpoints import manifest
    from bertjax.training.writer import JsonlWriter, TensorBoardWriter

    path = manifest.as_path("gs://bucket/run")
    assert atomic.is_remote(path)
    with directories.lock(path), directories.lock(path):
        pass  # a remote workdir is not locked

    def save(folder):
        with open(f"{folder}/vocab.txt", "w") as f:
            f.write("[MASK]\n")

    counts = np.arange(3)
    board = TensorBoardWriter(path, 0)
    board.write({"step": 1, "train/loss": 1.0})
    board.close()
    assert list((bucket / "run/tb").glob("events.*"))
    workdir.begin(path, {"config.json": "{}"}, {"total_steps": 2}, save, counts)
    assert (bucket / "run/tokenizer/vocab.txt").read_text() == "[MASK]\n"
    names = directories.read_directory(path / "tokenizer", os.listdir)
    assert names == ["vocab.txt"]
    assert workdir.read_json(path / "run.json")["total_steps"] == 2

    writer = JsonlWriter(path, 0)
    writer.write({"step": 1, "train/loss": 1.0})
    writer.flush()  # a checkpoint follows, which needs these rows
    writer.write({"step": 2, "train/loss": 1.0})
    writer.close()
    assert len((bucket / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert workdir.rows_up_to(path / "metrics.jsonl", 1) == [
        '{"step": 1, "train/loss": 1.0}\n'
    ]

    folder = path / "checkpoints" / "saving-2"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "data").write_text("x")
    manifest.write_manifest(folder)
    folder.rename(path / "checkpoints" / "2")
    assert manifest.newest_intact(path, print) == 2
    (path / "checkpoints" / "2" / "state" / "data").write_text("y")
    with pytest.raises(Exception, match="no checkpoint"):
        manifest.newest_intact(path, print)
    assert (bucket / "run/damaged/2").is_dir()

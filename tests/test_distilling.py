# SPDX-License-Identifier: Apache-2.0
"""From a teacher to a student by the commands: trained, resumed, refused, evaluated."""

import hashlib
import json

import numpy as np
import pytest
from conftest import read_rows, refused, succeeded
from resuming import parameters, without_last

from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import describe


def digest(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


@pytest.fixture(scope="module")
def student(command, arguments, trained, tmp_path_factory):
    """(arguments without the teacher, workdir, sha256 of the teacher before it)."""
    before, workdir = digest(trained), tmp_path_factory.mktemp("students") / "run"
    given = [a for a in arguments if not a.startswith("--config=")]
    given = ["--config=distilbert.py:smoke", *given, "--config.total.steps=8"]
    given.append(f"--workdir={workdir}")
    succeeded(command("train", *given, f"--config.teacher={trained}"))
    return given, workdir, before


def test_a_student_learns_and_its_teacher_does_not(student, trained):
    _, workdir, before = student
    rows = [r for r in read_rows(workdir) if "train/loss" in r]
    assert {"train/kl_loss", "train/cosine_loss", "train/mlm_loss"} <= rows[0].keys()
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    scores = [r for r in read_rows(workdir) if "eval/valid/kl_loss" in r]
    assert scores[-1]["step"] == 8
    assert digest(trained) == before


def test_checkpoints_hold_a_teachers_hash_alone(student):
    workdir = student[1]
    folder = workdir / "checkpoints/8"
    known = json.loads((workdir / "run.json").read_text())["teacher"]
    assert manifest.read_meta(folder)["teacher"] == known and len(known) == 64
    names = describe(folder)
    assert names and not any("teacher" in name for name in names)
    assert names["encoder/layers/mlp/up/bias"][0] == 1  # the teacher has two layers


def test_a_student_needs_no_teacher_any_more(command, student):
    given = ["--json", f"--workdir={student[1]}"]
    found = json.loads(succeeded(command("evaluate", *given)).stdout)
    assert np.isfinite(found["mlm_loss"]) and "kl_loss" not in found


@pytest.mark.parametrize("what", ["another", "none", "missing"])
def test_a_run_goes_on_with_its_teacher_alone(
    command, student, trained, tmp_path, what
):
    given, workdir, _ = student
    copy = without_last(workdir, tmp_path / "run")
    given = [*given[:-1], f"--workdir={copy}"]
    teacher = {
        "another": trained / "checkpoints/8",
        "none": "",
        "missing": tmp_path / "nobody",
    }[what]
    words = {"another": "is another model", "none": "learns from", "missing": "nobody"}
    words = words[what]
    refused(command("train", *given, f"--config.teacher={teacher}"), "teacher", words)
    assert manifest.steps(copy) == [4]


@pytest.mark.slow
def test_the_same_teacher_in_other_files_is_the_same(
    command, student, trained, tmp_path
):
    """A run resumed with its teacher as a Hugging Face directory ends with the same
    bits."""
    given, workdir, _ = student
    copy, exported = without_last(workdir, tmp_path / "run"), tmp_path / "hf"
    succeeded(
        command("convert", f"--from={trained}", f"--to={exported}", "--format=hf")
    )
    given = [*given[:-1], f"--workdir={copy}", f"--config.teacher={exported}"]
    succeeded(command("train", *given))
    assert parameters(copy) == parameters(workdir)


def test_what_does_not_go_together(command, arguments, student, trained, tmp_path):
    given = [*student[0][:-1], f"--workdir={tmp_path / 'x'}"]
    refused(command("train", *given), "learns from a teacher", "--config.teacher=DIR")
    given = [*arguments, f"--workdir={tmp_path / 'x'}"]
    teacher = f"--config.teacher={trained}"
    refused(command("train", *given, teacher), "has no effect with objective=mlm+nsp")
    assert not (tmp_path / "x").exists()

# SPDX-License-Identifier: Apache-2.0
"""Runs that freeze parts of a model: started from another run, resumed, refused."""

import re

import numpy as np
import pytest
from conftest import refused, succeeded
from resuming import parameters

from bertjax import UserError, sweep
from bertjax.assembly import command_line
from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import restore_params

# 900 of the word table's 1,000 rows, and the lower one of two layers.
FREEZE = (
    "encoder/embeddings/word[:900],encoder/layers/.*[:1],encoder/embeddings/norm/.*"
)


@pytest.fixture(scope="module")
def frozen(command, arguments, trained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("freezing") / "run"
    given = [*arguments, f"--config.init_from={trained}", "--config.total.steps=8"]
    given += [f"--config.optim.freeze={FREEZE}", f"--workdir={workdir}"]
    return given, workdir, succeeded(command("train", *given))


def read(workdir, step=None):
    folder = workdir / "checkpoints" / str(step or manifest.steps(workdir)[-1])
    return restore_params(folder)


def test_frozen_parts_do_not_move(frozen, trained):
    _, workdir, said = frozen
    assert "of them trained" in said.stderr
    a, b = (read(w)["encoder"] for w in (trained, workdir))
    same = np.testing.assert_array_equal
    words = [x["embeddings"]["word"] for x in (a, b)]
    same(words[0][:900], words[1][:900])
    assert (words[0][900:] != words[1][900:]).mean() > 0.5
    same(*(x["embeddings"]["norm"]["scale"] for x in (a, b)))
    up = [x["layers"]["mlp"]["up"]["kernel"] for x in (a, b)]
    same(up[0][0], up[1][0])
    assert (up[0][1] != up[1][1]).mean() > 0.5


@pytest.mark.slow
def test_it_resumes_to_the_same_bits(command, frozen, tmp_path):
    """A run resumed after step 4 ends with the same bits as an uninterrupted one."""
    given, workdir, _ = frozen
    again = tmp_path / "again"
    given = [a for a in given if "--workdir" not in a] + [f"--workdir={again}"]
    succeeded(command("train", *given))
    for step in manifest.steps(again)[1:]:
        (again / "checkpoints" / str(step)).rename(tmp_path / str(step))
    succeeded(command("train", *given))
    assert parameters(again) == parameters(workdir)


def test_what_no_parameter_has_is_refused(command, arguments, tmp_path):
    given = [*arguments, "--config.optim.freeze=nosuchpart/.*"]
    refused(command("train", *given, f"--workdir={tmp_path / 'x'}"), "nosuchpart/.*")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("key, value", [("optim.freeze", "mlm/.*"), ("teacher", "DIR")])
def test_a_sweep_has_no_frozen_parts(key, value):
    given = ["task.text=a", "task.label=b", "data.valid=c.tsv", f"{key}={value}"]
    given = [f"--config.{each}" for each in given]
    config = command_line.parse(["--config=finetune/classify.py:smoke", *given]).config
    with pytest.raises(UserError, match=f"{key}={re.escape(value)} does not go with"):
        sweep.check(config, {})

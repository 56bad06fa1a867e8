# SPDX-License-Identifier: Apache-2.0
"""Objectives from outside the package (tests/lab): what they may say, and are told."""

import json

import pytest
from conftest import read_rows

from bertjax import train
from bertjax.training import manifest

pytestmark = pytest.mark.usefixtures("no_listener")


def run(arguments, workdir, *more):
    """Train in this process; returns the workdir."""
    given = [*arguments, *(f"--config.{key}" for key in more)]
    assert train.main([*given, f"--workdir={workdir}"]) == 0
    return workdir


def test_a_loss_of_any_name_falls(arguments, tmp_path):
    """eval.best=auto keeps the lowest, and patience waits for lower ones."""
    more = "objective=lab.contrast", "eval.best=auto", "eval.patience=3"
    more += "eval.every.steps=1", "optim.lr=1e-3", "optim.warmup.steps=0"
    path = run(arguments, tmp_path / "run", *more)
    key = "eval/valid/contrast"
    scores = {r["step"]: r[key] for r in read_rows(path) if key in r}
    best = min(scores, key=scores.get)
    assert scores[best] < scores[1] and [*scores][-1] == min(best + 3, 12)
    told = json.loads((path / "run.json").read_text())
    assert told["best"] == {"metric": key, "step": best, "value": scores[best]}
    assert told["greater_is_better"] == {"contrast": False}
    assert best in manifest.steps(path)

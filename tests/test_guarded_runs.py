# SPDX-License-Identifier: Apache-2.0
"""Runs that skip updates and rewind, keep an average, or end by the clock."""

import json
import os
import shutil

import pytest
from conftest import read_rows, refused, succeeded, timeless
from resuming import parameters
from test_hosts import launch

from bertjax.assembly import batches, command_line, prepared_text
from bertjax.checkpoints import manifest

BAD = (1, 6, 7, 8)  # indices of batches: steps 2, 7, 8 and 9
POISON = """
import dataclasses, os
import jax.numpy as jnp
from bertjax.objectives import mlm

BAD = [int(x) for x in os.environ["POISON"].split()]

def sums(params, cfg, encoded, batch, rng):
    spoils = jnp.isin(jnp.sum(batch["mlm_ids"]), jnp.array(BAD)) & (rng is not None)
    found = mlm.make_head().sums(params, cfg, encoded, batch, rng)
    value, weight = found["mlm_loss"]
    return found | {"mlm_loss": (value * jnp.where(spoils, jnp.nan, 1.0), weight)}

def make_head():
    return dataclasses.replace(mlm.make_head(), sums=sums)
"""


@pytest.fixture(scope="module")
def poisoned(arguments, tmp_path_factory):
    """(arguments, env) of a run of 16 steps; the loss of some batches is not finite."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "poisoned").mkdir()
    (folder / "poisoned" / "head.py").write_text(POISON)
    more = ["objective=mlm", "total.steps=16", "checkpoint.every.steps=4"]
    more += ["model.num_hidden_layers=1"]
    more += ["checkpoint.keep_every=4", "guard.patience=3", "optim.ema=0.9"]
    more += ["eval.every.steps=16", "log.writers=jsonl"]
    given = [*arguments, *(f"--config.{m}" for m in more)]
    config = command_line.parse(given).config
    prepared = prepared_text.prepare(config, lambda text: None)
    run = batches.make_run(
        config,
        frozenset({"mlm"}),
        prepared.tokenizer,
        prepared.parts,
        batches.make_tables(config, prepared.tokenizer, None),
    )
    sums = [str(run.data.batch(i)["mlm_ids"].sum()) for i in range(16)]
    assert len({*sums}) == 16
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {"POISON": " ".join(sums[i] for i in BAD), "PYTHONPATH": path}
    return [*given, "--config.objective=poisoned.head"], env


@pytest.fixture(scope="module")
def whole(command, poisoned, tmp_path_factory):
    """(workdir, result) of the finished run of `poisoned`."""
    workdir = tmp_path_factory.mktemp("guarded") / "run"
    given, env = poisoned
    return workdir, succeeded(command("train", *given, f"--workdir={workdir}", env=env))


def cut(workdir, target, step):
    """Copy a workdir without the checkpoints after a step."""
    shutil.copytree(workdir, target)
    for checkpoint in (target / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    return target


def check_what_was_left_out(workdir, said):
    lines = [x for x in said.splitlines() if "back to step 4" in x]
    assert (
        len(lines) == 1 and "step 9: the guard skipped 3 updates in a row" in lines[0]
    )
    rows = [r for r in read_rows(workdir) if "train/loss" in r]
    assert [r["step"] for r in rows] == list(range(1, 17))
    assert [r["step"] for r in rows if r["train/loss"] is None] == [2]
    assert [r["guard/skipped"] for r in rows] == [0, *[1] * 15]
    run = json.loads((workdir / "run.json").read_text())
    assert run["rewinds"] == [{"from": 9, "to": 4}]
    before, after = run["phases"]
    assert (after["start"], after["first"]) == (4, 9 * before["batch_size"])
    meta = manifest.read_meta(workdir / "checkpoints/8")
    assert (meta["rewinds"], meta["phases"]) == (run["rewinds"], run["phases"])


def test_bad_batches_are_skipped_and_a_stretch_is_left_behind(whole):
    check_what_was_left_out(whole[0], whole[1].stderr)


@pytest.mark.slow
def test_two_processes_go_back_together(poisoned, environment, tmp_path):
    """They also resume exactly from the checkpoint before the rewind."""
    given, env = poisoned

    def train(workdir):
        code, said = launch(2, 1, [*given, f"--workdir={workdir}"], environment | env)
        assert code == 0, said
        return said

    workdir = tmp_path / "run"
    check_what_was_left_out(workdir, train(workdir))
    again = cut(workdir, tmp_path / "again", 4)
    check_what_was_left_out(again, train(again))
    assert timeless(read_rows(again)) == timeless(read_rows(workdir))
    for part in ("params", "ema"):
        assert parameters(again, part) == parameters(workdir, part)


@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_it_resumes_exactly_before_and_after(command, poisoned, whole, tmp_path, step):
    given, env = poisoned
    workdir = cut(whole[0], tmp_path / "run", step)
    succeeded(command("train", *given, f"--workdir={workdir}", env=env))
    assert timeless(read_rows(workdir)) == timeless(read_rows(whole[0]))
    for part in ("params", "ema"):
        assert parameters(workdir, part) == parameters(whole[0], part)


def test_going_back_has_a_limit(command, poisoned, whole, tmp_path):
    given, env = poisoned
    workdir = cut(whole[0], tmp_path / "run", 4)
    more = ["--config.guard.rewinds=0", "--allow_config_change"]
    done = command("train", *given, *more, f"--workdir={workdir}", env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    assert "guard.rewinds=0" in line and "checkpoint is 4" in line


@pytest.mark.slow
def test_the_average_is_used_unless_asked_otherwise(command, poisoned, whole):
    _, env = poisoned
    losses = {}
    for weights in ("", "ema", "raw"):
        flag = [f"--weights={weights}", "--json", f"--workdir={whole[0]}"]
        done = succeeded(command("evaluate", *flag, env=env))
        losses[weights] = json.loads(done.stdout)["mlm_loss"]
    (scored,) = [r for r in read_rows(whole[0]) if "eval/valid/mlm_loss" in r]
    assert losses[""] == losses["ema"] != losses["raw"]
    assert losses["ema"] == pytest.approx(scored["eval/valid/mlm_loss"], rel=1e-5)


def test_a_run_without_an_average(command, trained):
    done = command("evaluate", "--weights=ema", f"--workdir={trained}")
    refused(done, "--weights=ema", "no moving average")
    refused(command("evaluate", "--weights=em", f"--workdir={trained}"), "'ema'")


@pytest.mark.slow
def test_a_budget_and_its_repetition(command, arguments, tmp_path):
    """The schedule ends with the budget's clock; a resumed run has the same values."""
    more = ["budget_minutes=0.02", "total.steps=100_000", "log.writers=jsonl"]
    more += ["eval.every.steps=100_000", "checkpoint.every.steps=1"]
    more += ["optim.warmup.percent=10", "checkpoint.keep_every=1"]
    more += ["optim.average.percent=50"]
    given = [*arguments, *(f"--config.{m}" for m in more)]
    first = tmp_path / "first"
    succeeded(command("train", *given, f"--workdir={first}"))
    rows = [r for r in read_rows(first) if "train/loss" in r]
    times = [float(x) for x in (first / "clock.txt").read_text().split()]
    last = rows[-1]["step"]
    assert json.loads((first / "run.json").read_text())["total_steps"] == last
    assert rows[-1]["budget/share"] == 1 and rows[-1]["optim/lr"] == 0
    assert times == sorted(times) and times[-1] >= 1.2 and len(times) == last
    assert "is done" in succeeded(command("train", *given, f"--workdir={first}")).stderr
    for step in (1, last - 1):  # the last update follows the end of the budget
        again = cut(first, tmp_path / f"from-{step}", step)
        succeeded(command("train", *given, f"--workdir={again}"))
        assert timeless(read_rows(again)) == timeless(read_rows(first))
        for part in ("params", "ema"):
            assert parameters(again, part) == parameters(first, part)


@pytest.mark.parametrize(
    "more, words",
    [
        (["budget_minutes=1"], ["optim.warmup.steps", "optim.warmup.percent"]),
        (
            [
                "budget_minutes=1",
                "optim.warmup.percent=5",
                "phases=percent=9; length=16",
            ],
            ["phases: percent", "give steps"],
        ),
        (["budget_clock=cpu"], ["budget_clock=cpu", "budget_minutes"]),
        (["guard.nonfinite=skp"], ["guard.nonfinite", "did you mean 'skip'"]),
        (["guard.patience=0"], ["guard.patience=0"]),
        (["optim.ema=1"], ["optim.ema=1"]),
        (["optim.schedule=wds"], ["optim.schedule", "did you mean 'wsd'"]),
    ],
)
def test_what_is_refused(command, arguments, tmp_path, more, words):
    given = [*arguments, *(f"--config.{m}" for m in more), f"--workdir={tmp_path}/run"]
    refused(command("train", *given), *words)
    assert not (tmp_path / "run").exists()

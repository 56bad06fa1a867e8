# SPDX-License-Identifier: Apache-2.0
"""Runs that keep their best checkpoint and stop early without improvement."""

import csv
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import read_rows, timeless
from test_hosts import launch

from bertjax import UserError, predict, train
from bertjax.assembly import command_line, models
from bertjax.checkpoints import best, manifest
from bertjax.checkpoints.manager import restore_params
from bertjax.config import durations
from bertjax.training.signals import StopSignal

LOSS = "eval/valid/classify_loss"


@pytest.fixture(scope="module")
def wanted(vocabulary, tmp_path_factory):
    """Arguments of a run that gets worse: its training labels contradict data.valid."""
    folder = tmp_path_factory.mktemp("tables")
    words = (["clear", "simple", "fast"], ["wrong", "slow", "missing"])
    for name, labels in (("train", "yn"), ("valid", "ny")):
        draw = np.random.default_rng(0)
        texts = [" ".join(draw.choice(words[i % 2], 5)) for i in range(24)]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = zip(texts, labels * 12, strict=True)
            csv.writer(file).writerows([("text", "label"), *rows])
    return [
        "--config=finetune/classify.py:smoke",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.train={folder / 'train.csv'}",
        f"--config.data.valid={folder / 'valid.csv'}",
        "--config.task.text=text",
        "--config.task.label=label",
        "--config.data.length=16",
        "--config.model.hidden_size=32",
        "--config.model.num_hidden_layers=1",
        "--config.batch_size=8",
        "--config.total.steps=40",
        "--config.optim.lr=1e-2",
        "--config.log.writers=jsonl",
        "--config.checkpoint.every.steps=3",
        "--config.eval.every.steps=2",
        "--config.eval.best=classify_loss",
        "--config.eval.patience=4",
    ]


@pytest.fixture(scope="module", autouse=True)
def no_handlers():
    """Keep runs from installing signal handlers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "install", lambda self: None)
        yield


@pytest.fixture(scope="module")
def ended(wanted, tmp_path_factory):
    """The workdir of the run of `wanted`, which stopped early."""
    workdir = tmp_path_factory.mktemp("ended") / "run"
    assert train.main([*wanted, f"--workdir={workdir}"]) == 0
    return workdir


def test_long_runs_are_soon_compared():
    """The tracker searches all past scores once per evaluation, not once per score."""
    scores = [(step, 1.0 / step) for step in range(1, 20_001)]
    tracker = best.BestTracker("eval/v/mlm_loss", 3, {}, scores)
    looks = []
    known = best.find_best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "find_best", lambda *args: looks.append(1) or known(*args))
        assert not tracker.out_of_patience and len(looks) == 1


def scores(workdir):
    return [(r["step"], r[LOSS]) for r in read_rows(workdir) if LOSS in r]


def test_it_ends_and_keeps_the_best(ended, capsys):
    step, value = min(scores(ended), key=lambda score: score[1])
    last = step + 4 * 2
    assert scores(ended)[-1][0] == last < 40
    assert manifest.steps(ended) == [step, (last - 1) // 3 * 3, last]
    run = json.loads((ended / "run.json").read_text())
    assert run["best"] == {"metric": LOSS, "step": step, "value": value}
    assert run["total_steps"] == last
    capsys.readouterr()
    for place, found in ((ended, step), (models.at_step(str(ended), last), last)):
        assert models.open_model(str(place), "--model")[3]["step"] == found
    said = capsys.readouterr().err
    assert f"step {step} is the best by {LOSS}" in said and said.count("best") == 1
    with pytest.raises(UserError, match=f"--step=1: .* there are {step}, .*{last}$"):
        predict.main([f"--model={ended}", "--input=-", "--step=1"])


def test_an_ended_run_does_nothing_more(wanted, ended, capsys):
    before = {p: p.read_bytes() for p in ended.rglob("*") if p.is_file()}
    assert train.main([*wanted, f"--workdir={ended}"]) == 0
    assert "is done: step" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in ended.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("side", ["train", "valid"])
def test_an_ended_run_of_other_data(wanted, ended, tmp_path, side, capsys):
    """The refusal names the key; a file with another name and the same rows is fine."""
    given = dict(x.split("=", 1) for x in wanted)
    rows = Path(given[f"--config.data.{side}"]).read_text()
    file = tmp_path / "rows.csv"
    again = [*wanted, f"--config.data.{side}={file}", f"--workdir={ended}"]
    before = {p: p.read_bytes() for p in ended.rglob("*") if p.is_file()}
    file.write_text(rows)
    assert train.main(again) == 0
    assert "is done: step" in capsys.readouterr().err
    file.write_text(rows.replace("clear", "slow", 1))
    said = rf"^data\.{side}: the text .* changed: .*; take another workdir$"
    with pytest.raises(UserError, match=said):
        train.main(again)
    new = f"--config.data.valid=valid={given['--config.data.valid']},more={file}"
    assert train.main([*wanted, new, f"--workdir={ended}"]) == 0
    assert "; data.valid: more: not scored, bertjax.evaluate" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"another config: seed: 0 -> 1;"):
        train.main([*wanted, "--config.seed=1", f"--workdir={ended}"])
    assert {p: p.read_bytes() for p in ended.rglob("*") if p.is_file()} == before


def test_killed_and_gone_on_with_it_is_the_same(wanted, ended, tmp_path, capsys):
    """A run ends the same if it was killed after its best evaluation, or just before it
    recorded its end."""
    again = tmp_path / "again"
    shutil.copytree(ended, again)
    kept, *later = manifest.steps(ended)
    for step in later:
        shutil.rmtree(again / f"checkpoints/{step}")
    (again / "checkpoints/saving-3").mkdir()
    run = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps(run | {"total_steps": 40}))
    assert models.open_model(str(again), "--model")[3]["step"] == kept
    train.main([*wanted, f"--workdir={again}"])
    assert timeless(read_rows(again)) == timeless(read_rows(ended))
    assert manifest.steps(again) == manifest.steps(ended)
    for step in manifest.steps(ended):
        one, two = (restore_params(w / f"checkpoints/{step}") for w in (again, ended))
        jax.tree.map(np.testing.assert_array_equal, one, two)
        told = [manifest.read_meta(w / f"checkpoints/{step}") for w in (again, ended)]
        assert told[0]["best"] == told[1]["best"]

    rows = (again / "metrics.jsonl").read_bytes()
    (again / "run.json").write_text(json.dumps(run | {"total_steps": 40, "best": {}}))
    capsys.readouterr()
    train.main([*wanted, f"--workdir={again}"])
    assert f"done: step {later[-1]}" in capsys.readouterr().err
    assert (again / "metrics.jsonl").read_bytes() == rows
    after = json.loads((again / "run.json").read_text())
    assert after["best"] == run["best"] and after["total_steps"] == later[-1]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("eval.best=acuracy", ["eval.best", "did you mean 'eval/valid/accuracy'"]),
        ("eval.patience=0", ["eval.patience=0"]),
        ("data.valid=", ["eval.best=classify_loss", "data.valid is empty"]),
        ("eval.every.steps=none", ["eval.every.steps"]),
    ],
)
def test_what_is_refused(wanted, tmp_path, key, words):
    with pytest.raises(UserError) as e:
        train.main([*wanted, f"--config.{key}", f"--workdir={tmp_path / 'w'}"])
    assert all(word in str(e.value) for word in words), e.value
    assert not (tmp_path / "w").exists()


def test_an_interval_that_is_not_set():
    made = command_line.parse(["--config=bert.py:smoke"]).config
    made.eval.every.steps = None
    with pytest.raises(UserError, match=r"eval\.every needs one of"):
        durations.resolve_durations(made, {})


@pytest.mark.slow
def test_two_processes_end_together(arguments, environment, tmp_path):
    """Pretraining at a learning rate of 0, whose loss does not change, stops early."""
    more = ["optim.lr=0", "eval.every.steps=2", "eval.patience=2", "eval.best=auto"]
    given = [*arguments, *(f"--config.{m}" for m in more)]
    code, said = launch(2, 1, [*given, f"--workdir={tmp_path}"], environment)
    assert code == 0, said
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["best"]["metric"] == "eval/valid/mlm_loss" and run["best"]["step"] == 2
    assert run["total_steps"] == 6 and manifest.steps(tmp_path) == [2, 4, 6]
    assert launch(2, 1, [*given, f"--workdir={tmp_path}"], environment)[0] == 0


def test_scores():
    sets = {"m": ["f1", "loss"], "mm": ["loss"]}
    with pytest.raises(UserError, match="did you mean"):
        best.full_metric_name("eval/mm/f1", sets)
    assert best.full_metric_name("auto", sets) == "eval/m/f1"
    assert best.full_metric_name("eval/mm/loss", sets) == "eval/mm/loss"
    up = [(1, 0.2), (2, math.nan), (3, 0.9), (4, 0.9), (5, 0.3)]
    assert best.find_best("eval/loss/f1", up).step == 3
    assert best.find_best("eval/v/mlm_loss", up).step == 1
    assert best.find_best("eval/v/f1", [(2, math.nan)]) is None
    tracker = best.BestTracker("eval/v/f1", 2)
    over = []
    for step, value in up:
        tracker.scores.append((step, value))
        over.append(tracker.out_of_patience)
    assert over == [False, False, False, False, True]
    tracker.scores = up[:2]
    assert tracker.step == 1 and tracker.facts["best"]["value"] == 0.2
    assert (
        not best.BestTracker("", None).out_of_patience
        and not best.BestTracker("", None).facts
    )


def test_a_term_that_a_run_knows_to_be_a_loss():
    """run.json says whether a term is a loss; without that (earlier versions) its name
    does."""
    known = {"contrast": False, "entropy": True}
    names = "eval/v/contrast", "eval/v/entropy", "eval/contrast/f1", "eval/v/mlm_loss"
    assert [best.falls(name, known) for name in names] == [True, False, False, True]
    assert [best.falls(name) for name in names] == [False, True, False, True]
    scores = [(1, 3.0), (2, 1.0), (3, 2.0)]
    tracker = best.BestTracker("eval/v/contrast", 2, known, scores)
    assert tracker.step == 2 and not tracker.out_of_patience


def test_what_is_not_kept_is_not_taken(tmp_path):
    """A best step without a checkpoint (the run was killed before) is not used."""
    rows = [{"step": n, "eval/v/f1": v} for n, v in ((2, 0.5), (4, 0.7), (6, 0.9))]
    text = "\n".join(map(json.dumps, rows)) + "\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    assert best.best_saved(tmp_path, [2, 4]) is None
    (tmp_path / "run.json").write_text('{"best": {"metric": "eval/v/f1"}}')
    assert best.best_saved(tmp_path, [2, 4]) == ("eval/v/f1", 4, 0.7)
    assert best.best_saved(tmp_path, [5]) is None
    facts = {"best": {"metric": "eval/v/f1"}, "greater_is_better": {"f1": False}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert best.best_saved(tmp_path, [4, 6]) == ("eval/v/f1", 4, 0.7)

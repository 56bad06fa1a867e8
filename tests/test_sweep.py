# SPDX-License-Identifier: Apache-2.0
"""A sweep trains the same runs as separate commands would, and can resume."""

import csv
import functools
import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest

from bertjax import UserError, predict, sweep, train
from bertjax.assembly import command_line, models
from bertjax.checkpoints import workdir_kinds
from bertjax.sweeps import score_spread, stacked_runs
from bertjax.sweeps.trainer import SweepLoop
from bertjax.training.signals import Stopped, StopSignal

pytestmark = pytest.mark.usefixtures("no_listener")
RUNS = [(0, 3e-3), (1, 3e-3), (0, 1e-3), (1, 1e-3)]


@pytest.fixture(scope="module")
def wanted(vocabulary, tmp_path_factory):
    """Arguments of runs of 8 steps on 24 rows."""
    table = tmp_path_factory.mktemp("table") / "rows.csv"
    draw = np.random.default_rng(0)
    words = (["clear", "simple", "fast"], ["wrong", "slow", "missing"])
    rows = [(" ".join(draw.choice(words[i % 2], 5)), "yn"[i % 2]) for i in range(24)]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return [
        "--config=finetune/classify.py:smoke",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.train={table}",
        f"--config.data.valid={table}",
        "--config.task.text=text",
        "--config.task.label=label",
        "--config.data.length=16",
        "--config.model.hidden_size=32",
        "--config.batch_size=8",
        "--config.total.steps=8",
        "--config.eval.every.steps=4",
        "--config.model.num_hidden_layers=1",
    ]


def run(wanted, path, at_once=None, runs=RUNS):
    made = command_line.parse(wanted).config
    return sweep.sweep(made, path, runs, at_once, {})


def get_worse(wanted, folder):
    """Return arguments of runs whose training labels contradict data.valid."""
    table = next(a for a in wanted if "data.valid" in a).partition("=")[2]
    with open(table, newline="") as file:
        head, *rows = csv.reader(file)
    with (folder / "opposite.csv").open("w", newline="") as file:
        turned = [(text, "yn"[label == "y"]) for text, label in rows]
        csv.writer(file).writerows([head, *turned])
    keys = {"data.valid": f"valid={folder / 'opposite.csv'}", "total.steps": 12}
    keys |= {"eval.every.steps": 1, "eval.patience": 3, "eval.best": "classify_loss"}
    return [*wanted, *(f"--config.{key}={value}" for key, value in keys.items())]


def read_best(path):
    opened = models.open_model(str(path), "--model")
    return opened[3]["step"], models.read_params(opened[2])


def losses(found):
    return [row["classify_loss"] for row in found["runs"]]


@pytest.fixture(scope="module")
def swept(wanted, tmp_path_factory):
    path = tmp_path_factory.mktemp("swept") / "run"
    real, made = stacked_runs.make_programs, []

    def make_programs(*arguments):
        made.append(real(*arguments))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_runs, "make_programs", make_programs)
        found = run(wanted, path)
    (programs,) = made  # one compilation for all seeds, rates and steps
    assert programs.advance._cache_size() == programs.evaluate._cache_size() == 1
    return path, found


def test_a_member_is_the_run_that_train_makes(wanted, swept, tmp_path):
    seed, rate = RUNS[3]
    more = [f"--config.seed={seed}", f"--config.optim.lr={rate}"]
    train.main([*wanted, *more, f"--workdir={tmp_path / 'one'}"])
    rows = (tmp_path / "one/metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["eval/valid/classify_loss"] == pytest.approx(
        losses(swept[1])[3], rel=1e-5
    )
    assert len({*losses(swept[1])}) == 4


def test_its_workdir_says_what_a_run_s_says(wanted, swept, tmp_path):
    """It has tokens, parameters and devices, so that report lists it beside runs."""
    path, found = swept
    seed, rate = found["best"]["seed"], found["best"]["lr"]
    more = [f"--config.seed={seed}", f"--config.optim.lr={rate}"]
    train.main([*wanted, *more, f"--workdir={tmp_path / 'one'}"])
    ours, alone = (
        json.loads((p / "run.json").read_text()) for p in (path, tmp_path / "one")
    )
    for key in ("parameters", "devices", "device_kind", "total_steps"):
        assert ours[key] == alone[key], key
    rows = (tmp_path / "one/metrics.jsonl").read_text().splitlines()
    assert found["best"]["tokens"] == json.loads(rows[-1])["tokens"] > 0
    meta = json.loads((path / "checkpoints/8/meta.json").read_text())
    assert meta["tokens"] == found["best"]["tokens"]


def test_a_run_that_never_trained_has_no_score(wanted, tmp_path, capsys):
    """A diverged run has no accuracy, although the argmax of NaN is a class, which half
    of the rows have."""
    made = command_line.parse([*wanted, "--config.guard.patience=3"]).config
    runs = [(0, 3e-3), (0, 1e30)]
    found = sweep.sweep(made, tmp_path / "run", runs, None, {})
    good, bad = found["runs"]
    assert good["skipped"] == 0 and good["accuracy"] is not None
    assert bad["skipped"] >= 3 and bad["accuracy"] is bad["classify_loss"] is None
    rows = {row["lr"]: row for row in found["spread"] if row["metric"] == "accuracy"}
    assert (rows[1e30]["n"], rows[1e30]["lost"], rows[3e-3]["n"]) == (0, 1, 1)
    assert found["best"] == good
    assert "seed 0, lr 1e+30: 3 updates in a row were not finite" in told(capsys)
    assert re.search(
        r"lr 1e\+30: \d of 8 .* lost", "\n".join(score_spread.describe(found))
    )
    assert json.loads((tmp_path / "run" / workdir_kinds.RESULTS).read_text()) == found


@pytest.mark.slow  # compiles again, half a minute
@pytest.mark.parametrize("runs, at_once", [(4, 2), (5, 4), (3, 3)])
def test_groups_change_nothing(wanted, swept, tmp_path, runs, at_once):
    """Also if the last group is not full: five runs in two groups of three."""
    mine = [*RUNS, (2, 1e-3)][:runs]
    found = run(wanted, tmp_path / "some", at_once, mine)
    alone = losses(swept[1])
    assert len(losses(found)) == runs and found["spread"]
    assert losses(found)[:4] == pytest.approx(alone[:runs], rel=1e-5)
    if runs == 5:
        one = run(wanted, tmp_path / "alone", 1, mine[4:])
        assert losses(found)[4:] == pytest.approx(losses(one), rel=1e-5)
        assert (found["best"]["seed"], found["best"]["lr"]) in mine


def test_a_finished_one_does_nothing_more(wanted, swept, tmp_path, capsys):
    """Nor does a sweep of a version with fewer keys; another sweep is refused."""
    path = tmp_path / "run"
    path.mkdir()
    found = json.loads((swept[0] / workdir_kinds.RESULTS).read_text())
    found["facts"]["config"]["task"].pop("stride")
    found["facts"]["size"] = 1
    (path / workdir_kinds.RESULTS).write_text(json.dumps(found))
    assert run(wanted, path) == found
    assert "is done" in told(capsys)
    with pytest.raises(
        UserError, match=r"another sweep: optim\.wd: 0\.01 -> 0\.5; take"
    ):
        run([*wanted, "--config.optim.wd=0.5"], path)
    with pytest.raises(UserError, match=r"holds another sweep: .*other runs; take"):
        run(wanted, path, runs=RUNS[:3])
    others = [(0, 3e-3), (2, 3e-3)]
    with pytest.raises(
        UserError, match=r"seeds: 0, 1 -> 0, 2; rates: 0.003, 0.001 -> "
    ):
        run(wanted, path, runs=others)
    (path / workdir_kinds.RESULTS).write_text("{")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read: "):
        run(wanted, path)


@pytest.mark.parametrize("first", [slice(0, 1), slice(1, 2)])
def test_runs_join_a_finished_one(wanted, tmp_path, monkeypatch, first):
    """Whichever of the runs is best, and also after a kill at the last moment."""
    path, whole = tmp_path / "run", run(wanted, tmp_path / "whole", None, RUNS[:2])
    with monkeypatch.context() as patch:  # killed before it removed its states
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        run(wanted, path, None, RUNS[first])
    assert (path / "members").exists()
    if whole["best"]["seed"] != RUNS[first][0][0]:
        (_, kept), learn = read_best(path), "bertjax.sweeps.trainer.tasks.learn"
        with monkeypatch.context() as patch:  # killed while the best is saved
            patch.setattr(learn, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(wanted, path, None, RUNS[:2])
        jax.tree.map(np.testing.assert_array_equal, read_best(path)[1], kept)
    real = SweepLoop.write_best

    def write_best(loop, found, overrides):
        real(loop, found, overrides)
        (path / workdir_kinds.RESULTS).write_text(before)
        raise KeyboardInterrupt

    before = (path / workdir_kinds.RESULTS).read_text()
    monkeypatch.setattr(SweepLoop, "write_best", write_best)
    with pytest.raises(KeyboardInterrupt):
        run(wanted, path, None, RUNS[:2])
    monkeypatch.setattr(SweepLoop, "write_best", real)
    assert run(wanted, path, None, RUNS[first]) == json.loads(before)
    assert (path / "members").exists()
    found = run(wanted, path, None, RUNS[:2])
    assert losses(found) == pytest.approx(losses(whole), rel=1e-6)
    for key in ("seed", "lr", "step"):
        assert found["best"][key] == whole["best"][key]
    assert [row["n"] for row in found["spread"]] == [2] * len(found["spread"])
    assert found["facts"] == whole["facts"]
    (step, params), (_, same) = read_best(path), read_best(tmp_path / "whole")
    assert step == found["best"]["step"]
    jax.tree.map(np.testing.assert_array_equal, params, same)
    told_config = json.loads((path / "config.json").read_text())
    assert told_config["seed"] == found["best"]["seed"]
    assert (
        not (path / "members").exists() and run(wanted, path, None, RUNS[:2]) == found
    )


def test_nothing_else_trains_in_its_workdir(wanted, swept, tmp_path, monkeypatch):
    """Nor does a sweep use a checkpoint there that it did not write."""
    for more in ([], ["--allow_config_change"], ["--config.optim.lr=0.1"]):
        with pytest.raises(UserError, match=r"holds a sweep, no state .*init_from="):
            train.main([*wanted, *more, f"--workdir={swept[0]}"])
    path, real = tmp_path / "cut", SweepLoop.write_best
    monkeypatch.setattr(SweepLoop, "write_best", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(wanted, path)
    monkeypatch.setattr(SweepLoop, "write_best", real)
    with pytest.raises(UserError, match="holds a sweep under way: repeat its command"):
        train.main([*wanted, f"--workdir={path}"])
    with pytest.raises(UserError, match="holds a sweep under way: repeat its command"):
        models.open_model(str(path), "--model")
    other = [*wanted, "--config.optim.wd=0.5"]
    with pytest.raises(
        UserError, match=r"another sweep: optim\.wd: 0\.01 -> 0\.5; take"
    ):
        run(other, path)
    more = [*RUNS, (2, 3e-3)]
    with pytest.raises(UserError, match="seeds: 0, 1 -> 0, 1, 2; finish it first, by"):
        run(wanted, path, runs=more)
    with pytest.raises(UserError, match=r"optim\.wd.*seeds: 0, 1 -> 0, 1, 2; take"):
        run(other, path, runs=more)
    with pytest.raises(UserError, match=r"other runs; take another"):
        run(wanted, path, runs=RUNS[:3])
    mine = swept[0] / "checkpoints"
    shutil.copytree(mine, path / "checkpoints")  # as if killed after its last save
    (meta,) = (path / "checkpoints").glob("*/meta.json")
    whole = meta.read_text()
    said = json.loads(whole)
    del said["runs"]
    meta.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"checkpoints/8 is not of the sweep under way"):
        run(wanted, path)
    meta.write_text(whole)
    with pytest.raises(UserError, match=r"another sweep: seeds: .*; finish it"):
        run(wanted, path, runs=more)
    assert run(wanted, path)["best"] == swept[1]["best"]
    (path / workdir_kinds.RESULTS).unlink()
    with pytest.raises(UserError, match="holds a sweep: take another workdir"):
        run(wanted, path)


def test_a_relative_workdir(wanted, tmp_path, monkeypatch):
    """It is made absolute, as orbax needs; with a relative one every save failed."""
    monkeypatch.chdir(tmp_path)

    def look(given, seeds, rates, at_once, path, stop):
        raise UserError(str(path))

    monkeypatch.setattr(sweep, "run", look)
    with pytest.raises(UserError, match=str(tmp_path / "here")):
        sweep.main([*wanted, "--workdir=here"])


def test_sizes_of_groups():
    sizes = {
        n: stacked_runs.group_size(n, lambda size: size <= 4) for n in range(1, 14)
    }
    assert sizes == {1: 1, 2: 2, 3: 3, 4: 4, 5: 3, 6: 3, 7: 4, 8: 4, 9: 3, 10: 4,
                     11: 4, 12: 4, 13: 4}  # fmt: skip
    for runs, size in sizes.items():
        assert len(stacked_runs.fill(range(runs), size)) % size == 0
        assert size * -(-runs // size) - runs < -(-runs // size)
    assert stacked_runs.group_size(7, lambda size: False) == 1


@pytest.mark.slow  # a minute; test_score_spread.py and test_best.py test the rules
def test_the_best_evaluation_is_kept(wanted, tmp_path, monkeypatch, capsys):
    """Each run keeps the step that train keeps, also after a kill between two saves."""
    worse, path = get_worse(wanted, tmp_path), tmp_path / "swept"
    runs = [(0, 3e-4), (1, 1e-3)]
    found = run(worse, path, runs=runs)
    assert found["at"] == "best" and found["steps"] < 12
    step, params = read_best(path)
    for (seed, rate), row in zip(runs, found["runs"], strict=True):
        one = tmp_path / str(seed)
        more = [f"--config.seed={seed}", f"--config.optim.lr={rate}"]
        train.main([*worse, *more, f"--workdir={one}"])
        alone = json.loads((one / "run.json").read_text())
        assert alone["best"]["step"] == row["step"]
        assert alone["best"]["value"] == pytest.approx(row["classify_loss"], rel=1e-5)
        last = [r["step"] for r in found["curve"] if r["seed"] == seed][-1]
        assert alone["total_steps"] == last == row["step"] + 3
        if found["best"] == row:
            same = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
            assert read_best(one)[0] == step == row["step"]
            jax.tree.map(same, read_best(one)[1], params)
    # They end at different steps.
    assert len({row["step"] for row in found["runs"]}) == 2
    mine = json.loads((path / "run.json").read_text())
    assert mine["best"]["value"] == found["best"]["classify_loss"]
    assert "ends early (eval.patience): step" in told(capsys)
    assert run(worse, path, runs=runs) == json.loads(
        (path / workdir_kinds.RESULTS).read_text()
    )
    assert "is done" in told(capsys)

    again, real, calls = tmp_path / "again", stacked_runs.score, []

    def some(*arguments):
        calls.append(1)
        if len(calls) > step + 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(stacked_runs, "score", some)
    with pytest.raises(KeyboardInterrupt):
        run(worse, again, runs=runs)
    monkeypatch.setattr(stacked_runs, "score", real)
    shutil.rmtree(again / f"members/1/checkpoints/{step + 2}")
    resumed = run(worse, again, runs=runs)
    assert f"resuming after step {step + 1}" in told(capsys)
    changed = {"seconds", "facts"}
    for key in found.keys() - changed:
        assert resumed[key] == found[key], key
    assert read_best(again)[0] == step
    jax.tree.map(np.testing.assert_array_equal, read_best(again)[1], params)


@pytest.mark.slow
def test_it_goes_on_where_it_was(wanted, swept, tmp_path, monkeypatch):
    path, real, calls = tmp_path / "cut", stacked_runs.score, []

    def once(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(stacked_runs, "score", once)
    with pytest.raises(KeyboardInterrupt):
        run(wanted, path)
    monkeypatch.setattr(stacked_runs, "score", real)
    assert not (path / workdir_kinds.RESULTS).exists()
    other = [*wanted, "--config.optim.wd=0.5"]
    with pytest.raises(UserError, match="holds another sweep"):
        run(other, path)
    found = run(wanted, path)
    assert found["curve"] == swept[1]["curve"] and found["best"] == swept[1]["best"]
    assert not (path / "members").exists()
    assert run(wanted, path) == json.loads((path / workdir_kinds.RESULTS).read_text())
    # Another sweep overwrites nothing of a finished one.
    before = (path / "config.json").read_text()
    with pytest.raises(UserError, match="take another workdir"):
        run(other, path)
    assert (path / "config.json").read_text() == before


class After(StopSignal):
    """A signal that comes at the n-th check, overdue at once or never."""

    def __init__(self, looks, late):
        super().__init__()
        self.looks, self.late = looks, late

    @property
    def number(self):
        self.looks -= self.training
        return signal.SIGTERM if self.looks < 0 else 0

    @number.setter
    def number(self, value):
        """Ignore the value."""

    @property
    def overdue(self):
        return self.late and bool(self.number)


@pytest.mark.slow
@pytest.mark.parametrize("looks, late", [(2, False), (4, True)])
def test_a_signal_saves_all(wanted, swept, tmp_path, capsys, looks, late):
    """Between two evaluations, and during one."""
    path, stop = tmp_path / "cut", After(looks, late)
    made = command_line.parse(wanted).config
    with pytest.raises(Stopped) as stopped:
        sweep.sweep(made, path, RUNS, None, {}, stop)
    assert stopped.value.status == 143
    (said,) = re.findall(r"stopped .* after step (\d+), which is saved", told(capsys))
    assert said == ("4" if late else "3")
    assert not (path / workdir_kinds.RESULTS).exists()
    if late:  # again, during the evaluation that it repeats
        with pytest.raises(Stopped):
            sweep.sweep(made, path, RUNS, None, {}, After(1, late))
        assert f"after step {said}, which is saved" in told(capsys)
    found = run(wanted, path)
    assert f"resuming after step {said}" in told(capsys)
    assert found["curve"] == swept[1]["curve"] and found["best"] == swept[1]["best"]


def told(capsys):
    done = capsys.readouterr()
    return done.out + done.err


def test_the_best_one_answers(swept, wanted, capsys):
    path, found = swept
    best = found["best"]
    assert best["accuracy"] == max(row["accuracy"] for row in found["runs"])
    table = next(a for a in wanted if "data.valid" in a).partition("=")[2]
    capsys.readouterr()
    predict.main([f"--model={path}", f"--input={table}"])
    said = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    right = np.mean([a == "yn"[i % 2] for i, a in enumerate(said)])
    assert right == best["accuracy"]


def test_what_is_refused(wanted, tmp_path):
    place = f"--workdir={tmp_path / 'w'}"
    for more, said in {
        ("--lrs=1e-3,x",): "--lrs=1e-3,x",
        ("--lrs=1e-3,1e-3",): "different numbers",
        ("--config.optim.ema=0.9",): "optim.ema",
        ("--config.optim.average.steps=2",): r"optim\.average\.steps=2 does not go",
        ("--config.eval.patience=0",): r"eval\.patience=0 must be from 1",
        ("--config.eval.best=acuracy",): "eval.best.*did you mean 'eval/valid/accur",
        ("--config.log.writers=jsonl",): "log.writers=jsonl has no effect in a sweep",
        ("--config.checkpoint.keep_last=5",): "checkpoint.keep_last=5 has no effect",
        ("--config.guard.rewinds=1",): "guard.rewinds=1",
        ("--config.data.valid=",): "data.valid",
    }.items():
        with pytest.raises(UserError, match=said):
            sweep.main([*wanted, *more, place])
    assert not (tmp_path / "w").exists()

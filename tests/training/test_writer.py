# SPDX-License-Identifier: Apache-2.0
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from bertjax import RunError, UserError
from bertjax.checkpoints.manifest import as_path
from bertjax.training import writer as w


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


OLD = line(1) + line(2) + line(2, **{"eval/x": 1.0}) + line(3) + '{"step": 4, "tr'


@pytest.mark.parametrize("step, lines", [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
def test_later_rows_and_the_unfinished_line_are_dropped(tmp_path, step, lines):
    path = tmp_path / "metrics.jsonl"
    path.write_text(OLD)
    jsonl = w.JsonlWriter(tmp_path, step)
    kept = "".join(OLD.splitlines(keepends=True)[:lines])
    assert path.read_text() == kept
    jsonl.write({"step": 10, "train/loss": 0.5})
    assert path.read_text() == kept + line(10, **{"train/loss": 0.5}), "not flushed"
    jsonl.close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_met_once(tmp_path):
    """Rows that could not be written are not tried again at exit."""
    jsonl = w.JsonlWriter(tmp_path, 0)
    jsonl.file.close()
    with Path("/dev/full").open("a") as jsonl.file:
        with pytest.raises(RunError, match="cannot be written"):
            w.write([jsonl], {"step": 1}, tmp_path)
        assert jsonl.file.closed


def test_an_unfinished_line_that_happens_to_be_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1) + line(2).rstrip())
    w.JsonlWriter(tmp_path, 5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == line(1)


def test_a_new_file(tmp_path):
    w.JsonlWriter(tmp_path, 0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_remote_rows_appear_at_a_flush(bucket):
    file = bucket / "run/metrics.jsonl"
    file.parent.mkdir()
    file.write_text(OLD)
    jsonl = w.JsonlWriter(as_path("gs://bucket/run"), 1)
    jsonl.write({"step": 2})
    assert file.read_text() == OLD
    jsonl.flush()
    assert file.read_text() == line(1) + line(2)
    jsonl.write({"step": 3})
    jsonl.close()
    assert file.read_text() == line(1) + line(2) + line(3)


# ---------------------------------------------------------------- progress
def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = w.ProgressWriter(total=100, step=0, seconds=1e9)
    for step in range(1, 101):
        rate = {"perf/tokens_per_second": 2000.0} if step > 1 else {}
        progress.write({"step": step, "train/loss": 1 / step, **rate})
    progress.write({"step": 100, "tokens": 9, "eval/valid/mlm_loss": 1.25})
    progress.close()
    first, last, scores = sys.stderr.getvalue().splitlines()
    assert first == "step 1/100  loss 1.0000"
    assert last.startswith("step 100/100  loss 0.0100  2,000 tokens/s  0.0 min left")
    assert scores == "step 100: eval/valid/mlm_loss 1.2500"


def test_a_resumed_run_says_its_first_step(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = w.ProgressWriter(total=100, step=50, seconds=1e9)
    for step in (51, 52):
        progress.write({"step": step, "train/loss": 0.5})
    assert sys.stderr.getvalue() == "step 51/100  loss 0.5000\n"


class Clock:
    def __init__(self):
        self.now = 500.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("total", "left"),
    [(1_000_000, 4.0), (200, 1.5), (125, 0.4)],  # budget; steps; steps
)
def test_the_time_left_is_the_budgets_or_the_steps(monkeypatch, total, left):
    """One fifth of the budget of 5 minutes has passed after 100 steps of 0.9 s."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = Clock()
    progress = w.ProgressWriter(total, 0, seconds=10, budget=300.0, now=now)
    now.now += 90
    row = {"step": 100, "train/loss": 0.5, "perf/tokens_per_second": 2000.0}
    progress.write({**row, "budget/share": 0.2})
    said = sys.stderr.getvalue()
    assert said == (
        f"step 100/{total}  loss 0.5000  2,000 tokens/s  {left:.1f} min left\n"
    )


def test_the_time_left_is_without_compilation(monkeypatch):
    """Compilation takes 90 s; then come steps of half a second, then of one."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = Clock()
    progress = w.ProgressWriter(1210, 0, seconds=0, now=now)
    row = {"train/loss": 0.5, "perf/tokens_per_second": 2000.0}
    now.now += 95
    progress.write({**row, "step": 10, "perf/step_seconds": 0.5})
    now.now += 10
    progress.write({**row, "step": 20, "perf/step_seconds": 0.75})
    said = sys.stderr.getvalue().splitlines()
    assert [line.rpartition("/s  ")[2] for line in said] == [
        "10.0 min left",  # 1,200 steps of half a second
        "19.8 min left",  # 1,190 steps of one
    ]


# ---------------------------------------------------------------- by name
class ListWriter:
    """A writer from outside the package."""

    rows: ClassVar[list] = []

    def __init__(self, workdir, step):
        self.at = (workdir, step)

    def write(self, row):
        self.rows.append(row)

    def flush(self):
        pass

    def close(self):
        pass


def test_names(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "their.writers", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "their", sys.modules[__name__])
    made = w.make_writers("jsonl, their.writers.ListWriter,,jsonl", tmp_path, 3)
    assert [type(x).__name__ for x in made] == ["JsonlWriter", "ListWriter"]
    assert made[1].at == (tmp_path, 3)
    (only,) = w.make_writers("", tmp_path, 0)
    assert isinstance(only, w.JsonlWriter), "metrics.jsonl is written in any case"


def test_a_service_that_refuses_is_told_in_a_line(tmp_path, monkeypatch):
    """For example wandb.init without an API key."""

    def init(**settings):
        raise ValueError("api_key not configured\n(no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=1))
    words = (
        r"log\.writers: 'wandb' cannot begin: ValueError: api_key not .* \(no-tty\)$"
    )
    with pytest.raises(UserError, match=words):
        w.make_writers("wandb", tmp_path, 0)

    def broken(**settings):
        raise RunError("the disk is full")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=broken, __spec__=1))
    with pytest.raises(RunError, match="the disk is full"):
        w.make_writers("wandb", tmp_path, 0)


def test_a_service_out_of_reach_does_not_end_a_run(tmp_path, monkeypatch):
    """The first failure and the number of lost rows are reported; metrics.jsonl has
    all rows."""

    class Faulty(ListWriter):
        rows: ClassVar[list] = []

        def write(self, row):
            if row["step"] in (2, 3):
                raise ConnectionError("502\nBad Gateway")
            super().write(row)

    said = []
    jsonl = w.JsonlWriter(tmp_path, 0)
    service = w.ServiceWriter(Faulty(tmp_path, 0), said.append)
    for step in range(1, 5):
        w.write([service, jsonl], {"step": step}, tmp_path)
    service.flush()
    service.close()
    jsonl.close()
    assert said == [
        "Faulty: ConnectionError: 502 Bad Gateway; the run continues, metrics.jsonl "
        "has all rows",
        "Faulty: 2 rows are not written",
    ]
    assert [row["step"] for row in Faulty.rows] == [1, 4]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4

    # Nor does a service that cannot be opened again after a rewind.
    def refuse(**_):
        raise ConnectionError("503")  # an OSError, but not the workdir's

    wandb = SimpleNamespace(init=refuse, __spec__=1)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (only,) = w.make_writers("wandb", tmp_path, 0, said.append)
    assert isinstance(only, w.JsonlWriter)
    assert said[-1].endswith("ConnectionError: 503; the run continues without it")


@pytest.mark.parametrize(
    "name, word",
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ("no.such.Writer", "cannot be imported"),
        ("json.NoWriter", "cannot be imported"),
        (".their.Writer", "cannot be imported: TypeError"),
        ("unfinished_writer.Writer", "cannot be imported: SyntaxError"),
        ("logging.Handler", "is not a class with a method `write`"),
        ("half_a_writer.Writer", "is not a class with a method `flush`"),
    ],
)
def test_unknown_writers(name, word, tmp_path, monkeypatch):
    (tmp_path / "unfinished_writer.py").write_text("class Writer(\n")
    half = "class Writer:\n    def write(self, row): pass\n"
    (tmp_path / "half_a_writer.py").write_text(half)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=word):
        w.find_writer(name)


def test_tensorboard_hides_later_rows(tmp_path):
    pytest.importorskip("tensorboardX")
    for step in (0, 1):
        tb = w.TensorBoardWriter(tmp_path, step)
        tb.write({"step": step + 1, "train/loss": 1.0})
        tb.close()
    assert len(list((tmp_path / "tb").glob("events.*"))) >= 1

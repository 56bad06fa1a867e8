# SPDX-License-Identifier: Apache-2.0
"""Time and scores of a speedrun, from a workdir and over seeds."""

import json
import math

import pytest

from bertjax import UserError
from bertjax.speedruns import records
from bertjax.speedruns.tracks import TRACKS

TRACK = TRACKS["cpu3h"]._replace(minutes=10.0, loss=4.0, pairs=0.6)


def record(seed, **values):
    usual = {"minutes": 9.0, "tokens": 1e6, "passes": 1.0, "right": 0.3}
    scores = {"loss": 3.9, "pairs": 0.65 + seed / 1e3}
    return {"seed": seed} | scores | usual | values


def write_run(path, n, steps=100):
    phase = {"start": 0, "batch_size": 32, "n": n}
    run = {"total_steps": steps, "phases": [phase], "parameters": 7, "git": "abc"}
    run |= {"device_kind": "cpu", "devices": 1, "starts": [{"versions": {"jax": "1"}}]}
    (path / "run.json").write_text(json.dumps(run))
    timed = {"perf/step_seconds": 0.6, "perf/processor_seconds": 1.2}
    rows = [{"step": s, "tokens": 10 * s} | timed for s in (50, 100)]
    # A row of evaluation has no time. A row after the last step does not count.
    rows += [{"step": 100, "tokens": 1000, "eval/valid/mlm_loss": 4.0}]
    rows += [{"step": 150, "tokens": 1500} | timed]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))


def test_what_a_run_took(tmp_path):
    write_run(tmp_path, n=800)
    found = records.measure(tmp_path, TRACK)
    assert found["wall"] == pytest.approx(1.0)
    assert found["minutes"] == found["processor"] == pytest.approx(2.0)
    assert (found["passes"], found["tokens"], found["steps"]) == (4.0, 1000, 100)
    wall = records.measure(tmp_path, TRACKS["h200-25min"])
    assert wall["minutes"] == wall["wall"]


def test_more_passes_than_allowed(tmp_path):
    write_run(tmp_path, n=300)
    with pytest.raises(UserError, match=r"10\.7 passes over the text.* allow 10"):
        records.measure(tmp_path, TRACK)


def test_a_target_is_reached_by_its_seeds():
    found = records.summarize(
        [record(s, loss=3.9 + 0.01 * (s == 1)) for s in range(3)], TRACK
    )
    assert found["loss"]["mean"] == pytest.approx(3.9033, abs=1e-4)
    # t = (3.9033 - 4) / (0.00577 / sqrt 3) = -29 with two degrees of freedom.
    assert found["loss"]["reached"] and found["loss"]["p"] == pytest.approx(6e-4, 0.05)
    assert found["in_time"]


def test_a_mean_beyond_the_target_may_show_nothing():
    losses = 3.0, 3.95, 4.9
    runs = [record(seed, loss=loss) for seed, loss in enumerate(losses)]
    found = records.summarize(runs, TRACK)
    assert found["loss"]["mean"] < 4 and found["loss"]["reached"] is False
    text = "\n".join(records.describe("cpu3h", TRACK, found))
    assert "the target, 4.000, is not shown to be reached: p = 0.47" in text


def test_pairs_are_better_when_more():
    few = records.summarize(
        [record(s, pairs=0.5 + s**2 / 1e3) for s in range(3)], TRACK
    )
    assert not few["pairs"]["reached"] and few["pairs"]["p"] > 0.99


@pytest.mark.parametrize("seeds", [[4], [3, 4]])
def test_fewer_than_three_seeds_show_nothing(seeds):
    runs = [record(seed, minutes=11.0) for seed in seeds]
    found = records.summarize(runs, TRACK)
    assert found["pairs"]["reached"] is None and not found["in_time"]
    text = "\n".join(records.describe("cpu3h", TRACK, found))
    assert "than 3 seeds show nothing" in text and "4:" in text
    assert "more than the track has" in text


def test_equal_scores_show_nothing():
    """Their t is undefined or infinite, so that p is null."""
    same = [record(s, pairs=0.5) for s in range(3)]
    found = records.summarize(same, TRACK)
    assert found["pairs"]["p"] is found["pairs"]["reached"] is None
    text = "\n".join(records.describe("cpu3h", TRACK, found))
    assert "equal scores show nothing" in text
    assert records.compare(same, same)["pairs"] == {"difference": 0, "p": None}


def test_two_entries():
    ours = [record(s, loss=3.8 + 0.01 * s) for s in range(3)]
    theirs = [record(s, loss=3.9 + 0.02 * s) for s in range(3)]
    found = records.compare(ours, theirs)["loss"]
    assert found["difference"] == pytest.approx(-0.11)
    # Welch: t = -0.11 / sqrt(1e-4 / 3 + 4e-4 / 3), 2.94 degrees of freedom.
    t = -0.11 / math.sqrt(5e-4 / 3)
    assert found["p"] == pytest.approx(0.0018, rel=0.2) and t < -8
    with pytest.raises(UserError, match="several seeds"):
        records.compare(ours, theirs[:1])


def test_no_records(tmp_path):
    with pytest.raises(UserError, match=r"--against=.*no speedrun\.json"):
        records.read_records(tmp_path, "--against", "cpu3h")


@pytest.mark.parametrize(
    "found",
    [
        [{"seed": 0}], {"a": 1}, "abc", [1, 2], [record(0, loss=None)],
        [record(0), record(1, pairs=math.nan)],
    ],
)  # fmt: skip
def test_records_that_are_not_whole(tmp_path, found):
    text = json.dumps({"track": "cpu3h", "records": found})
    (tmp_path / records.FILE).write_text(text)
    with pytest.raises(UserError, match=r"there is no speedrun\.json with whole"):
        records.read_records(tmp_path, "--against", "cpu3h")


def test_records_of_another_track(tmp_path):
    text = json.dumps({"track": "cpu20m", "records": [record(0), record(1)]})
    (tmp_path / records.FILE).write_text(text)
    assert len(records.read_records(tmp_path, "--against", "cpu20m")) == 2
    with pytest.raises(UserError, match="is an entry of --track=cpu20m, and this one"):
        records.read_records(tmp_path, "--against", "cpu3h")

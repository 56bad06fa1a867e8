# SPDX-License-Identifier: Apache-2.0
"""The spread of a sweep's runs, and which of them is best."""

import pytest

from bertjax import UserError
from bertjax.sweeps import score_spread


def scored(**values):
    return {"step": 4, "seed": 0, "lr": 1e-3, "skipped": 0} | values


def standings(rows, runs, metric, best=False, patience=None):
    made = score_spread.SweepScores(runs, metric, best, patience)
    made.add(rows)
    return made


def test_of_losses_the_smallest_is_best():
    rows = [dict(step=2, seed=i, lr=1.0, valid="v", mse=x) for i, x in enumerate("312")]
    rows = [row | {"mse": float(row["mse"])} for row in rows]
    runs = [(row["seed"], 1.0) for row in rows]
    assert standings(rows, runs, "eval/v/mse").summarize()["best"]["seed"] == 1


def test_what_the_objective_minimises_is_known_whatever_its_name():
    runs = [(0, 1.0), (1, 1.0)]
    made = score_spread.SweepScores(
        runs, "eval/v/contrast", True, 1, {"contrast": False}
    )
    for step, values in enumerate([(3.0, 2.0), (2.0, 4.0)], 1):
        for seed, value in enumerate(values):
            one = dict(step=step, seed=seed, lr=1.0, valid="v", skipped=0)
            made.add([one | {"contrast": value}])
    assert made.ended == {1}
    found = made.summarize()
    assert [row["contrast"] for row in found["runs"]] == [2.0, 2.0]
    assert found["greater_is_better"] == {"contrast": False}


def test_the_best_evaluation_of_each_run_counts_where_it_is_asked_for():
    scores = [
        scored(step=2, valid="v", f1=0.9),
        scored(step=2, valid="w", f1=0.0),
        scored(step=4, valid="v", f1=0.5),
        scored(step=4, valid="w", f1=1.0),
        scored(step=2, valid="v", f1=0.6, seed=1),
        scored(step=4, valid="v", f1=0.6, seed=1),
        scored(step=2, valid="v", f1=0.9, seed=2),
        scored(step=4, valid="v", f1=None, seed=2),  # not finite
        scored(step=4, valid="v", f1=None, seed=3),
    ]
    runs = [(seed, 1e-3) for seed in range(4)]
    found = standings(scores, runs, "eval/v/f1").summarize()
    assert found["at"] == "end" and found["best"] == scores[5]
    assert found["runs"] == [scores[i] for i in (2, 5, 7, 8, 3)]
    found = standings(scores, runs, "eval/v/f1", best=True).summarize()
    assert found["at"] == "best" and found["best"] == scores[0]
    assert found["runs"] == [scores[i] for i in (0, 4, 6, 8, 1)]
    assert {r["valid"]: (r["n"], r["lost"]) for r in found["spread"]}["v"] == (3, 1)


def test_when_runs_end():
    runs = [(0, 1e-3), (1, 1e-3)]
    made = standings([], runs, "eval/v/mlm_loss", True, 2)
    ended = []
    for step, values in enumerate([(3, 3), (2, 4), (2, 5), (2, 1)], 1):
        for seed, value in enumerate(values):
            if seed not in made.ended:
                one = scored(step=step, seed=seed, valid="v", mlm_loss=value)
                made.add([one])
        ended.append({*made.ended})
    assert ended == [set(), set(), {1}, {0, 1}]
    assert (made.best["step"], made.best["seed"]) == (2, 0)
    assert not standings(made.rows, runs, "eval/v/mlm_loss").ended


def test_how_scores_scatter():
    assert score_spread.scatter([0.5, 0.7, 0.9]) == {
        "n": 3, "lost": 0, "median": 0.7, "mean": pytest.approx(0.7),
        "std": pytest.approx(0.2),
        "min": 0.5, "max": 0.9,
    }  # fmt: skip
    assert score_spread.scatter([0.5])["std"] is None
    found = score_spread.scatter([0.5, None])
    assert found["n"] == found["lost"] == 1 and found["mean"] == 0.5
    assert score_spread.scatter([None])["median"] is None


def test_sets_have_scores_of_their_own():
    rows = [
        scored(valid="v2", f1=0.5, best_f1=0.6),
        scored(valid="v1", f1=0.7),
        scored(valid="v2", f1=None, best_f1=0.9) | {"seed": 1},
        scored(valid="v1", f1=0.8) | {"seed": 1},
    ]
    runs = [(0, 1e-3), (1, 1e-3)]
    found = standings(rows, runs, "eval/v2/f1").summarize()
    told = {(r["valid"], r["metric"]): (r["n"], r["lost"]) for r in found["spread"]}
    assert told == {
        ("v2", "best_f1"): (2, 0), ("v2", "f1"): (1, 1), ("v1", "f1"): (2, 0),
    }  # fmt: skip
    assert found["best"] == rows[0]
    assert "1 not finite" in "".join(score_spread.describe(found))
    with pytest.raises(UserError, match="v2's f1 is not finite"):
        standings([rows[2]], runs[1:], "eval/v2/f1").summarize()


def test_rates_are_written_as_they_were_given():
    """1.25e-5 is not rounded to 1.2e-5, which may be another rate of the sweep."""
    rows = [scored(valid="v", f1=0.5, lr=rate) for rate in (1.25e-5, 1.2e-5)]
    found = standings(rows, [(0, row["lr"]) for row in rows], "eval/v/f1").summarize()
    cells = [line.split()[1] for line in score_spread.describe(found)][1:3]
    assert cells == ["1.25e-05", "1.2e-05"]

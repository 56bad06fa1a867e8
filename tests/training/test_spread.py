# SPDX-License-Identifier: Apache-2.0
"""How the runs of a sweep scatter, and which of them is best."""

import pytest

from bertjax import UserError
from bertjax.training import spread


def scored(**values):
    return {"step": 4, "seed": 0, "lr": 1e-3, "skipped": 0} | values


def test_of_losses_the_smallest_is_best():
    rows = [dict(step=2, seed=i, lr=1.0, valid="v", mse=x) for i, x in enumerate("312")]
    rows = [row | {"mse": float(row["mse"])} for row in rows]
    runs = [(row["seed"], 1.0) for row in rows]
    assert spread.summarise(rows, runs, 2, "v", "mse")["best"]["seed"] == 1


def test_the_best_evaluation_of_each_run_is_told():
    scores = [
        scored(step=2, valid="v", f1=0.9),
        scored(step=2, valid="w", f1=1.0),
        scored(step=4, valid="v", f1=0.5),
        scored(step=2, valid="v", f1=0.6, seed=1),
        scored(step=4, valid="v", f1=0.6, seed=1),
        scored(step=2, valid="v", f1=1.0, seed=2),
        scored(step=4, valid="v", f1=None, seed=2),  # it is lost
    ]
    runs = [(seed, 1e-3) for seed in range(3)]
    found = spread.summarise(scores, runs, 4, "v", "f1")
    assert found["bests"] == [scores[0], scores[3]] and found["best"] == scores[4]


def test_how_scores_scatter():
    assert spread.scatter([0.5, 0.7, 0.9]) == {
        "n": 3, "lost": 0, "median": 0.7, "mean": pytest.approx(0.7),
        "std": pytest.approx(0.2),
        "min": 0.5, "max": 0.9,
    }  # fmt: skip
    assert spread.scatter([0.5])["std"] is None
    found = spread.scatter([0.5, None])
    assert found["n"] == found["lost"] == 1 and found["mean"] == 0.5
    assert spread.scatter([None])["median"] is None


def test_sets_have_scores_of_their_own():
    rows = [
        scored(valid="v2", f1=0.5, best_f1=0.6),
        scored(valid="v1", f1=0.7),
        scored(valid="v2", f1=None, best_f1=0.9) | {"seed": 1},
        scored(valid="v1", f1=0.8) | {"seed": 1},
    ]
    found = spread.summarise(rows, [(0, 1e-3), (1, 1e-3)], 4, "v2", "f1")
    told = {(r["valid"], r["metric"]): (r["n"], r["lost"]) for r in found["spread"]}
    assert told == {
        ("v2", "best_f1"): (2, 0), ("v2", "f1"): (1, 1), ("v1", "f1"): (2, 0),
    }  # fmt: skip
    assert found["best"] == rows[0]
    assert "1 not finite" in "".join(spread.describe(found))
    with pytest.raises(UserError, match="v2's f1 is not finite"):
        spread.summarise([rows[2]], [(1, 1e-3)], 4, "v2", "f1")

# SPDX-License-Identifier: Apache-2.0
"""Objectives from outside the package (tests/lab): what they may say, and are told."""

import json

import jax
import numpy as np
import optax
import pytest
from conftest import read_rows
from test_objectives import CFG, B, L, make_batch

from bertjax import UserError, train
from bertjax.objectives.base import make_objective
from bertjax.training import manifest
from bertjax.training.state import make_state
from bertjax.training.step import make_eval_step, make_train_step, run_eval

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


@pytest.mark.parametrize("flag", ["--dry_run", "--workdir={}"])
def test_two_heads_with_one_term(arguments, tmp_path, flag):
    """The masked LM under another name: one of two losses would not be trained."""
    given = [*arguments, "--config.objective=mlm+lab.again"]
    with pytest.raises(UserError) as e:
        train.main([*given, flag.format(tmp_path / "run")])
    said = "the heads mlm and again both return 'mlm_loss'"
    assert said in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_logged_is_what_is_optimised(accumulate):
    """Whatever weight the Sum of a loss has; metrics keep their own."""
    objective, _ = make_objective("mlm+lab.weighted", CFG)
    params = objective.init(jax.random.key(0))
    batch = make_batch()
    lengths = np.array([16, 4, 8, 2])
    batch["attention_mask"] = (np.arange(L) < lengths[:, None]).astype(np.int32)
    update = make_train_step(
        objective.sums,
        objective.weights,
        {"mlm_loss": 0.0},
        optax.sgd(1.0),
        lambda step: 1.0,
        seed=0,
        accumulate=accumulate,
    )
    after, metrics = jax.jit(update)(make_state(params, optax.sgd(1.0)), batch)
    own = objective.sums(params, batch, None)
    loss = float(own["weighted"].value) / B  # by `weights`, not by the Sum's weight
    assert float(own["weighted"].weight) < 1.0
    assert float(metrics["train/weighted"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["train/loss"]) == pytest.approx(loss, rel=1e-5)
    length = metrics["train/mean_length"]
    assert float(length) == pytest.approx(B / np.sum(1 / lengths), rel=1e-5)

    def optimised(params):
        return objective.sums(params, batch, None)["weighted"].value / B

    moved = jax.tree.map(np.subtract, params, after.params)["weighted"]
    wanted = jax.grad(optimised)(params)["weighted"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3), moved, wanted)

    evaluate = jax.jit(make_eval_step(objective.sums, objective.weights))
    halves = [{k: v[half::2] for k, v in batch.items()} for half in range(2)]
    for batches in ([batch], halves):
        found = run_eval(evaluate, params, batches)
        assert found["weighted"] == pytest.approx(loss, rel=1e-5)
        assert found["mean_length"] == pytest.approx(float(length), rel=1e-5)

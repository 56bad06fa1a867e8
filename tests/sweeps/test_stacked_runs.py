# SPDX-License-Identifier: Apache-2.0
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.checkpoints import manifest
from bertjax.objectives.base import Sum
from bertjax.objectives.metrics import binary_metrics
from bertjax.parallel.mesh import make_mesh
from bertjax.sweeps import stacked_runs
from bertjax.training import step
from bertjax.training.state import State


def test_runs_of_a_sweep_score_as_one_run_does():
    """A mean is a quotient of sums, or the sum's own mean(); without weight, NaN."""

    def evaluate(params, batch):
        weights = jnp.ones_like(batch["x"])
        told = binary_metrics(params * batch["x"], batch["y"], weights)
        none = jnp.zeros(())
        rows = {"scores": params * batch["x"]}
        return {**told, "nothing": Sum(none, none), "outputs": rows}

    draw = np.random.default_rng(0)
    x = draw.normal(size=(3, 8)).astype(np.float32)
    batches = [{"x": row, "y": row > draw.normal()} for row in x]
    params = np.float32([[1, -1, 0.3], [2, -2, 0.5]])  # two groups of three runs
    mapped = jax.jit(stacked_runs.over_runs(evaluate, (0, None)))
    found = stacked_runs.score(mapped, params, batches)
    assert len(found) == 6
    for (means, outputs), own in zip(found, params.ravel(), strict=True):
        told = []
        alone = step.run_eval(jax.jit(evaluate), own, batches, outputs=told)
        assert means == pytest.approx(alone, rel=1e-6, nan_ok=True)
        assert 0 <= means["auc"] <= 1 and np.isnan(means["nothing"])
        for ours, others in zip(outputs, told, strict=True):
            np.testing.assert_allclose(ours["scores"], others["scores"], rtol=1e-6)
    assert found[0][0]["auc"] > 0.5 > found[1][0]["auc"]


def test_a_sweep_killed_in_its_first_save_begins_anew(tmp_path):
    """The states of one group were written, those of the other not."""

    def begin(seeds):
        return State(jnp.zeros(1, jnp.int32), {"x": jnp.ones((1, 2))}, ())

    def open_groups():
        runs, mesh = [(0, 1e-3), (1, 1e-3)], make_mesh(devices=jax.devices()[:1])
        programs = SimpleNamespace(begin=begin)
        made = stacked_runs.Groups(programs, runs, 1, mesh, tmp_path, False)
        made.begin({})
        return made

    for at in (2, 4):
        groups = open_groups()
        groups.done = at
        groups.save({})
        groups.close()
        assert groups.newest == at
        shutil.rmtree(tmp_path / "1/checkpoints" / str(at))
        assert groups.newest == 0
    assert manifest.steps(tmp_path / "0") == [4]
    groups = open_groups()
    groups.done = 4
    groups.save({})
    groups.close()
    assert groups.newest == 4

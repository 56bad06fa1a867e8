# SPDX-License-Identifier: Apache-2.0
"""Replaced-token detection trains the same on any mesh, with any micro-batches."""

import jax
import numpy as np
import pytest
from conftest import train_steps
from test_electra import CFG, NAME, make_batch

from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh

pytestmark = pytest.mark.slow  # parallel/test_layouts.py tests masked LMs in this way


def run(mesh, accumulate=1, steps=6):
    objective, _ = make_objective(NAME, CFG)
    batches = [make_batch(step) for step in range(steps)]
    return train_steps(objective, mesh, batches, accumulate)


@pytest.fixture(scope="module")
def one_device():
    return run(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    "layout, accumulate",
    [
        ((8, 1, 1), 1),
        ((2, 4, 1), 1),
        ((1, 1, 1), 4),
    ],
)
def test_meshes_and_micro_batches_agree(one_device, layout, accumulate):
    devices = jax.devices()[: int(np.prod(layout))]
    got = run(make_mesh(*layout, devices=devices), accumulate)
    for a, b in zip(got[0], one_device[0], strict=True):
        for name in ("loss", "mlm_loss", "rtd_loss", "rtd_positive", "rtd_auc"):
            key = f"train/{name}"
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-4), key
    flat = [
        np.concatenate([x.ravel() for x in jax.tree.leaves(r[1])])
        for r in (got, one_device)
    ]
    assert np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]) < 1e-4


def test_it_learns_both(one_device):
    rows, _ = one_device
    assert float(rows[-1]["train/rtd_loss"]) < float(rows[0]["train/rtd_loss"])
    assert all(np.isfinite(float(v)) for row in rows for v in row.values())

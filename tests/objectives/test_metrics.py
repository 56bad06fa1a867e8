# SPDX-License-Identifier: Apache-2.0
"""Compare the metrics of binary predictions with their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.objectives.metrics import Ranking, binary_metrics
from bertjax.training.step import mean, mean_on_host


def exact_auc(logits, labels, weights):
    pos, neg = logits[labels & (weights > 0)], logits[~labels & (weights > 0)]
    away = pos[:, None] - neg
    return float(((away > 0) + 0.5 * (away == 0)).mean())


def test_metrics_against_their_definitions():
    draw = np.random.default_rng(0)
    labels = draw.random((8, 200)) < 0.15
    logits = (draw.normal(size=labels.shape) * 4 - 3 + 3 * labels).astype(np.float32)
    weights = (draw.random(labels.shape) < 0.9).astype(np.float32)
    got = binary_metrics(jnp.asarray(logits), jnp.asarray(labels), weights)
    real, said = weights > 0, logits > 0
    quotient = {k: float(s.value / s.weight) for k, s in got.items() if k != "auc"}
    assert quotient == pytest.approx(
        {
            "accuracy": (said == labels)[real].mean(),
            "precision": labels[real & said].mean(),
            "recall": said[real & labels].mean(),
            "positive": labels[real].mean(),
        }
    )
    auc = exact_auc(logits, labels, real)
    assert float(got["auc"].mean()) == pytest.approx(auc, abs=2e-3)
    on_host = jax.tree.map(np.float64, jax.device_get(got["auc"]))
    assert isinstance(on_host, Ranking)
    assert float(on_host.mean()) == pytest.approx(float(got["auc"].mean()), abs=1e-6)


@pytest.mark.parametrize("shift, auc", [(50.0, 1.0), (-50.0, 0.0), (0.0, 0.5)])
def test_auc_at_its_corners(shift, auc):
    labels = np.arange(10) < 3
    got = binary_metrics(jnp.asarray(shift * labels), jnp.asarray(labels), np.ones(10))
    assert float(got["auc"].mean()) == auc


def test_what_nobody_guessed_is_0_and_no_nan():
    """As in training; in evaluations the mean of nothing once was NaN."""
    nothing = jnp.zeros(4, bool)
    got = binary_metrics(jnp.full(4, -1.0), nothing, np.ones(4))
    rest = {name: mean_on_host(jax.device_get(one)) for name, one in got.items()}
    assert rest == {k: mean(v) for k, v in got.items()}
    assert rest == {"accuracy": 1, "precision": 0, "recall": 0, "auc": 0, "positive": 0}

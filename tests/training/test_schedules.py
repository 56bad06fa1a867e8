# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules, compared with values by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.training import SCHEDULES
from bertjax.training.schedules import make_schedule

RISE = [0.25, 0.5, 0.75, 1.0]  # warm-up, 4 of 10 updates
HALF = np.sqrt(0.5)


@pytest.mark.parametrize(
    "name, after",
    [
        ("linear", [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0]),
        ("polynomial", [1.0, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36, 0.0, 0.0]),
        # (1 - cos(pi f)) / 2 at f = 1, 5/6, ... 0
        ("cosine", [1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873, 0.0, 0.0]),
        # 1 - (1/4)^2, ...
        ("wsd", [1.0, 1.0, 1.0, 15 / 16, 3 / 4, 7 / 16, 0.0, 0.0]),
        ("constant", [1.0] * 8),
    ],
)
def test_corners(name, after):
    lr = make_schedule(name, 2.0, warmup=4, total=10, decay=4, power=2.0)
    values = lr(jnp.arange(12))
    np.testing.assert_allclose(values, 2 * np.array(RISE + after), atol=1e-6)


def test_a_cool_down_by_the_root():
    """A decay of 4 updates with power 0.5 is 1 - sqrt(0/4), 1 - sqrt(1/4), ... from
    update 6 on."""
    lr = make_schedule("wsd", 2.0, warmup=4, total=10, decay=4, power=0.5)
    after = [1.0, 1.0, 1.0, 0.5, 1 - HALF, 1 - np.sqrt(0.75), 0.0, 0.0]
    np.testing.assert_allclose(lr(jnp.arange(12)), 2 * np.array(RISE + after), 1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup, total", [(0, 5), (5, 5), (0, 1), (1, 1)])
def test_edges(name, warmup, total):
    lr = make_schedule(name, 2.0, warmup, total)
    values = np.asarray(lr(jnp.arange(total)))
    assert (values > 0).all() and values.max() == 2


def test_over_millions_of_steps():
    lr = make_schedule("linear", 1e-4, warmup=10_000, total=1_000_000)
    step = jnp.int32(999_999)
    assert float(lr(step)) == pytest.approx(1e-4 / 990_000, rel=1e-3)


def test_what_is_refused():
    with pytest.raises(UserError, match=r"optim\.warmup is 6 steps, more than"):
        make_schedule("linear", 1.0, 6, 5)
    with pytest.raises(UserError, match=r"optim\.decay is 3 steps after optim\.warmup"):
        make_schedule("wsd", 1.0, 3, 5, decay=3)
    with pytest.raises(UserError, match=r"optim\.power=0 with optim\.schedule=wsd"):
        make_schedule("wsd", 1.0, 1, 5, decay=3, power=0.0)

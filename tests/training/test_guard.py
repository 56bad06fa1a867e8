# SPDX-License-Identifier: Apache-2.0
"""The guard and the moving average in a step: a skipped update changes only counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.training.guard import WINDOW, check_update, make_guard
from bertjax.training.optim import make_optimizer
from bertjax.training.schedules import make_schedule
from bertjax.training.state import make_state
from bertjax.training.step import average, make_train_step

DECAY = 0.9


@pytest.fixture(scope="module")
def update():
    """A step on the loss (kernel - target)^2; the batch's target sets the gradient."""
    schedule = make_schedule("constant", 0.1, 0, 10)
    tx = make_optimizer("adamw", schedule, wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=1.0)

    def sums(params, batch, rng):
        value = jnp.sum((params["kernel"] - batch["target"].sum()) ** 2)
        return {"loss": (value, jnp.float32(1))}

    step = make_train_step(
        sums,
        lambda batch: {"loss": jnp.float32(1)},
        {},
        tx,
        schedule,
        seed=0,
        accumulate=2,
        guard_factor=10.0,
        ema=DECAY,
    )
    params = {"kernel": jnp.array([1.0, 2.0])}
    first = make_state(params, tx, guarded=True, averaged=True)

    def run(targets, state=first):
        rows = []
        for target in targets:
            batch = {"target": jnp.array([target, 0.0]), "attention_mask": jnp.ones(2)}
            state, metrics = jitted(state, batch)
            rows.append(jax.device_get(metrics))
        return state, rows

    jitted = jax.jit(step)
    return run


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_bad_batch_changes_nothing_but_the_count(update, bad):
    with_bad, rows = update([0.5, 0.6, bad, 0.7])
    assert [int(r["guard/skipped"]) for r in rows] == [0, 0, 1, 1]
    assert [int(r["streak"]) for r in rows] == [0, 0, 1, 0]
    before, _ = update([0.5, 0.6])
    skipped, _ = update([bad], before)
    for part in ("params", "opt_state"):
        same = jax.tree.map(
            np.array_equal, getattr(before, part), getattr(skipped, part)
        )
        assert jax.tree.all(same)
    np.testing.assert_array_equal(before.ema["kernel"], skipped.ema["kernel"])
    assert int(skipped.step) == 3 and int(with_bad.step) == 4
    after, _ = update([0.7], skipped)
    np.testing.assert_array_equal(after.params["kernel"], with_bad.params["kernel"])


def test_the_average(update):
    state, _ = update([])
    kernel = ema = np.array([1.0, 2.0])
    for step, target in enumerate((0.5, 0.6, 0.7)):
        state, _ = update([target], state)
        decay = min(DECAY, (1 + step) / (10 + step))
        kernel = np.asarray(state.params["kernel"], np.float64)
        ema = decay * ema + (1 - decay) * kernel
    np.testing.assert_allclose(state.ema["kernel"], ema, rtol=1e-6)
    late = average({"a": jnp.zeros(1)}, {"a": jnp.ones(1)}, DECAY, jnp.int32(10**6))
    np.testing.assert_allclose(late["a"], 1 - DECAY, rtol=1e-5)


def test_spikes():
    """Once WINDOW norms are known, norms above factor x the running mean are skipped,
    and skipped norms do not change the mean."""
    judged = jax.jit(lambda guard, norm: check_update(guard, jnp.float32(1), norm, 3.0))
    norms = np.random.default_rng(0).uniform(1, 2, WINDOW).astype("f4")
    guard = make_guard()
    good, guard = judged(guard, jnp.float32(50))  # nothing to compare it with yet
    assert good
    for norm in norms[1:]:
        good, guard = judged(guard, norm)
        assert good
    mean = np.mean([50, *norms[1:]])
    np.testing.assert_allclose(guard.norm, mean, rtol=1e-5)
    for count, norm in enumerate((3.1 * mean, np.nan), 1):
        good, guard = judged(guard, jnp.float32(norm))
        assert not good and int(guard.streak) == int(guard.skipped) == count
        np.testing.assert_allclose(guard.norm, mean, rtol=1e-5)
    good, guard = judged(guard, jnp.float32(2.9 * mean))
    assert good and (int(guard.streak), int(guard.skipped)) == (0, 2)
    np.testing.assert_allclose(guard.norm, mean * (1 + 1.9 / WINDOW), rtol=1e-5)

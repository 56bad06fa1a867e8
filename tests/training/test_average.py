# SPDX-License-Identifier: Apache-2.0
"""The average of a run's tail: in a step, by the clock, in a resumed run."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError, train
from bertjax.assembly import command_line, train_step, validate
from bertjax.checkpoints.manager import restore_params
from bertjax.training.optim import make_optimizer
from bertjax.training.schedules import CLOCK_UPDATES, make_schedule
from bertjax.training.state import make_state
from bertjax.training.step import make_train_step


def steps_from(average_from):
    """Make run(targets, times) -> the states after each update of (kernel - target)^2.

    times: the schedule's times by the clock; None if steps are the time.
    """
    schedule = make_schedule("constant", 0.1, 0, 10)
    tx = make_optimizer("adamw", schedule, wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=1.0)

    def sums(params, batch, rng):
        value = jnp.sum((params["kernel"] - batch["target"].sum()) ** 2)
        return {"loss": (value, jnp.float32(1))}

    one = jnp.float32(1)
    weights = {"loss": one}
    step = make_train_step(
        sums, lambda batch: weights, {}, tx, schedule, seed=0, average_from=average_from
    )
    jitted = jax.jit(step)

    def run(targets, times=None):
        params = {"kernel": jnp.array([1.0, 2.0])}
        states = [make_state(params, tx, guarded=True, tail=True)]
        for i, target in enumerate(targets):
            batch = {"target": jnp.array([target]), "attention_mask": jnp.ones(1)}
            if times is not None:
                batch["at"] = jnp.array([times[i], 0.0], jnp.float32)
            states.append(jitted(states[-1], batch)[0])
        return states[1:]

    return run


def check(states, inside):
    """Check the averages: means of the parameters after each update in `inside`."""
    kept = []
    for i, state in enumerate(states):
        kept += [np.float64(state.params["kernel"])] * (i in inside)
        if kept:
            assert int(state.averaged) == len(kept)
            mean = np.mean(kept, axis=0)
            np.testing.assert_allclose(state.ema["kernel"], mean, rtol=1e-6)
        else:
            assert int(state.averaged) == 0
            np.testing.assert_array_equal(state.ema["kernel"], state.params["kernel"])


TARGETS = [0.5, 0.6, -3.0, 0.7, 5.0, -2.0, 1.0, 4.0]


def test_the_tail_is_averaged_uniformly_and_a_copy_before():
    states = steps_from(3)(TARGETS)
    check(states, range(3, 8))
    moved = states[-1].params["kernel"] - states[-1].ema["kernel"]
    assert np.all(np.abs(moved) > 1e-3)


def test_a_skipped_update_is_not_in_the_mean():
    states = steps_from(3)([*TARGETS[:5], np.nan, *TARGETS[6:]])
    np.testing.assert_array_equal(
        states[5].ema["kernel"], states[4].ema["kernel"], strict=True
    )
    assert int(states[5].averaged) == int(states[4].averaged) == 2
    kept = [np.float64(states[i].params["kernel"]) for i in (3, 4, 6, 7)]
    np.testing.assert_allclose(
        states[7].ema["kernel"], np.mean(kept, axis=0), rtol=1e-6
    )


def test_the_clock_says_when_it_begins():
    """Half of the time has passed at the third update, so averaging begins with it."""
    shares = [0.0, 0.45, 0.5, 0.51, 0.9, 1.0]
    times = [CLOCK_UPDATES * share for share in shares]
    states = steps_from(CLOCK_UPDATES // 2)(TARGETS[:6], times)
    check(states, range(2, 6))


def lengths(*flags, total=40):
    made = command_line.parse(["--config=bert.py:smoke", *flags]).config
    return train_step.schedule_lengths(made, [], total)


def test_how_long_it_is():
    assert lengths()[3] == 0
    assert lengths("--config.optim.average.percent=20")[1:] == (40, 4, 8)
    assert lengths("--config.optim.average.steps=7")[3] == 7
    timed = ["--config.budget_minutes=5", "--config.optim.average.percent=20"]
    assert lengths(*timed)[1::2] == (CLOCK_UPDATES, CLOCK_UPDATES // 5)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["optim.ema=0.9", "optim.average.percent=20"], "optim.ema=0.9 and optim.aver"),
        (
            ["budget_minutes=5", "optim.warmup.percent=1", "optim.average.steps=9"],
            "optim.average.steps cannot be used with budget_minutes",
        ),
    ],
)
def test_what_is_refused(flags, words):
    given = ["--config=bert.py:smoke", "--config.data.train=x", "--config.data.vocab=x"]
    made = command_line.parse([*given, *(f"--config.{flag}" for flag in flags)]).config
    with pytest.raises(UserError, match=words):
        validate.check(made)
    with pytest.raises(UserError, match="average is 41 steps, more than total"):
        train_step.check_average(41, 40)


def stored(workdir, step, part):
    folder = workdir / "checkpoints" / str(step)
    return jax.tree.leaves(restore_params(folder, part=part))


@pytest.mark.slow
def test_a_run_and_its_continuation(arguments, tmp_path):
    """The average is the mean of the saved parameters. A run resumed within its tail
    ends with the parameters and the average of an uninterrupted one."""
    more = ["total.steps=6", "checkpoint.every.steps=1", "checkpoint.keep_every=1"]
    more += ["eval.every.steps=6", "optim.average.percent=50", "log.writers=jsonl"]
    given = [*arguments, *(f"--config.{one}" for one in more)]
    whole = tmp_path / "whole"
    assert train.main([*given, f"--workdir={whole}"]) == 0

    def flat(step, part):
        return np.concatenate(
            [np.float64(x).ravel() for x in stored(whole, step, part)]
        )

    kept = {step: flat(step, "params") for step in range(1, 7)}
    for step, of in ((3, [3]), (4, [4]), (6, [4, 5, 6])):
        mean = np.mean([kept[i] for i in of], axis=0)
        np.testing.assert_allclose(flat(step, "ema"), mean, rtol=1e-6, atol=1e-7)
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "6")
    assert train.main([*given, f"--workdir={again}"]) == 0
    for part in ("params", "ema"):
        pairs = zip(stored(again, 6, part), stored(whole, 6, part), strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)

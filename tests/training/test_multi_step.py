# SPDX-License-Identifier: Apache-2.0
import functools
import itertools
import shutil

import jax
import numpy as np
import pytest
from conftest import read_rows, refused, succeeded, timeless

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.mesh import make_mesh
from bertjax.training import multi_step, optim, schedules, state, step

STEPS, B, L, P, V = 11, 8, 12, 3, 64


def test_calls_end_where_something_is_due():
    calls = multi_step.Calls(4, 30, every=(10, 15), starts=(0, 21))
    assert [*calls.sizes(0)] == [4, 4, 2, 4, 1, 4, 1, 1, 4, 4, 1]
    ends = set(itertools.accumulate(calls.sizes(0)))
    assert {10, 15, 20, 21, 30} <= ends
    for end in ends:  # a resumed run makes the same calls
        assert {end + e for e in itertools.accumulate(calls.sizes(end))} <= ends
    assert [*multi_step.Calls(1, 3, (2,), (0,)).sizes(0)] == [1, 1, 1]
    with pytest.raises(UserError, match="steps_per_call=4 is more than the 3 steps"):
        multi_step.Calls(4, 30, every=(10, 3), starts=(0,)).check()


def make_batch(i):
    draw = np.random.default_rng(i)
    return {
        "input_ids": draw.integers(0, V, (B, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < draw.integers(4, L, (B, 1))).astype(np.int32),
        "mlm_positions": draw.integers(0, 4, (B, P)).astype(np.int32),
        "mlm_ids": draw.integers(0, V, (B, P)).astype(np.int32),
        "mlm_weights": draw.integers(0, 2, (B, P)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def run():
    """Return run(sizes) -> (rows of metrics, state); sizes: updates per call, None for
    the program of one update."""
    mesh = make_mesh(2, 2, devices=jax.devices()[:4])
    cfg = EncoderConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=L, pooler=False,
    )  # fmt: skip
    objective, _ = make_objective("mlm", cfg)
    schedule = schedules.make_schedule("linear", 3e-3, 2, STEPS)
    tx = optim.make_optimizer(
        "adamw", schedule, wd=0.01, b1=0.9, b2=0.999, eps=1e-6, clip=1.0
    )

    def init():
        return objective.init(jax.random.key(0))

    _, shardings = state.plan_state(init, tx, mesh, objective.shardings)
    first = jax.device_get(state.init_sharded(init, tx, mesh, shardings))
    update = step.make_train_step(
        objective.sums, objective.weights, objective.coefficients, tx, schedule, seed=1
    )
    compiled = functools.partial(
        jax.jit, donate_argnums=0, out_shardings=(shardings, None)
    )
    one, many = compiled(update), compiled(multi_step.many_steps(update))

    def run(sizes):
        current = jax.device_put(first, shardings)
        source, batches = (make_batch(i) for i in range(STEPS)), itertools.repeat(B)
        if sizes is None:
            sizes, call = [1] * STEPS, one
            fed = feed.to_devices(source, mesh, batches)
        else:
            call, fed = many, multi_step.to_devices(source, mesh, batches, sizes, 4)
        rows = []
        with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
            for size, batch in zip(sizes, fed, strict=False):
                batch["stop"] = feed.value_per_device(mesh, np.int32(len(rows) == 4))
                current, metrics = call(current, batch)
                rows += multi_step.rows(jax.device_get(metrics), size)
        assert call._cache_size() == 1, "compiled more than once"
        return rows, jax.device_get(current)

    return run


@pytest.mark.slow
def test_many_steps_are_the_same_steps(run):
    single, alone = run(None)
    rows, together = run([4, 4, 3])
    other, resumed = run([4, 1, 2, 4])
    stops = [[r.pop("stop") for r in some] for some in (single, rows, other)]
    assert [[i for i, n in enumerate(some) if n] for some in stops] == [
        [4], [4, 5, 6, 7], [4]
    ]  # fmt: skip
    assert stops[0][4] == 4 and len(rows) == STEPS
    # Equal bit for bit: one program runs calls of all sizes, and its updates are those
    # of the program of one update.
    assert rows == single and other == single
    for leaf, *same in zip(
        *map(jax.tree.leaves, (alone, together, resumed)), strict=True
    ):
        assert all(np.array_equal(leaf, s) for s in same)


@pytest.mark.slow
def test_a_run_with_several_steps_a_call(command, arguments, trained, tmp_path):
    """Its rows are those of a run with one step per call, also after it resumes."""
    arguments = [
        *arguments,
        "--config.log.every.steps=4",
        "--config.eval.every.steps=4",
    ]
    arguments += ["--config.log.writers=jsonl", f"--workdir={tmp_path / 'run'}"]
    many = "--config.steps_per_call=3"
    refused(
        command("train", *arguments, "--config.steps_per_call=5"), "steps_per_call=5"
    )
    succeeded(command("train", *arguments, many))
    shutil.rmtree(tmp_path / "run/checkpoints/12")
    succeeded(command("train", *arguments, many))
    rows = {r["step"]: r for r in read_rows(trained) if "train/loss" in r}
    found = [r for r in read_rows(tmp_path / "run") if "train/loss" in r]
    assert [r["step"] for r in found] == [4, 8, 12]
    for row, single in zip(timeless(found), map(rows.get, (4, 8, 12)), strict=True):
        assert row == pytest.approx({k: single[k] for k in row}, rel=1e-6)

# SPDX-License-Identifier: Apache-2.0
"""A state whose leaves are sharded over two processes, so that neither has it whole.

In other tests the models are so small that every leaf is replicated
(parallel/sharding.py SMALL).
"""

import re
import shutil
import signal

import jax
import numpy as np
import pytest
from conftest import read_rows, succeeded, timeless
from test_faults import strike
from test_hosts import NO_DROPOUT, launch

from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import restore_params

STEPS = 40
LAYOUTS = {  # (flags for two processes, flags for all)
    "data": ([], []),  # sharded by parallel/sharding.py stored_spec
    "fsdp": (["--config.mesh.data=1", "--config.mesh.fsdp=2"], []),
    "tensor": (["--config.mesh.data=1", "--config.mesh.tensor=2"], []),
    "calls": ([], ["--config.steps_per_call=2", "--config.log.every.steps=2"]),
}


@pytest.fixture(scope="module")
def wide(arguments):
    """Arguments of a model 128 wide: its matrices have more than SMALL elements."""
    return [
        *arguments,
        *NO_DROPOUT,
        "--config.model.hidden_size=128",
        f"--config.total.steps={STEPS}",
        "--config.eval.every.steps=20",
        "--config.checkpoint.every.steps=4",
        "--config.log.writers=jsonl",
        "--config.hosts.timeout=10",  # less than the launcher's --grace
    ]


def saved(workdir):
    """Return the parameters and moments of the last checkpoint."""
    (*_, last) = manifest.steps(workdir)
    folder = workdir / "checkpoints" / str(last)
    return [restore_params(folder, part=part) for part in ("params", "opt_state")]


def bytes_of(workdir, process):
    (*_, last) = manifest.steps(workdir)
    folder = workdir / "checkpoints" / str(last) / "state" / f"ocdbt.process_{process}"
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def check_equal(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_state_survives(wide, layout, command, environment, tmp_path):
    """A run survives SIGTERM and SIGKILL of one process, resumed by two and by one."""
    whole, struck, alone = (tmp_path / n for n in ("whole", "struck", "alone"))
    mesh, more = LAYOUTS[layout]
    two = [*wide, *mesh, *more]
    code, said = launch(2, 1, [*two, f"--workdir={whole}"], environment)
    assert code == 0, said
    # Each process wrote its part of the state.
    parts = [bytes_of(whole, process) for process in range(2)]
    assert min(parts) > 0.3 * max(parts), parts
    for number, status, words in (
        (signal.SIGTERM, 143, "stopped by a signal"),
        (signal.SIGKILL, 137, r"error: host 1 gives no sign of life .*resumes\n"),
    ):
        code, said, _ = strike(struck, 2, 1, number, two, environment)
        assert code == status and re.search(words, said), said
        assert "Traceback" not in said
        last = manifest.steps(struck)[-1]
        assert 0 < last < STEPS
        assert manifest.problem(struck / "checkpoints" / str(last)) is None
        if number == signal.SIGTERM:
            shutil.copytree(struck, alone)
    code, said = launch(2, 1, [*two, f"--workdir={struck}"], environment)
    assert code == 0 and "resuming after step" in said, said
    check_equal(saved(struck), saved(whole), rtol=0)
    assert timeless(read_rows(struck)) == timeless(read_rows(whole))
    succeeded(command("train", *wide, *more, f"--workdir={alone}"))
    check_equal(saved(alone)[0], saved(whole)[0], rtol=1e-3, atol=2e-5)
    a, b = (timeless(read_rows(w))[-1] for w in (alone, whole))
    assert a == pytest.approx(b, rel=1e-4)

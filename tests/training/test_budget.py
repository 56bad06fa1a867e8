# SPDX-License-Identifier: Apache-2.0
"""The clock of a budget: times are recorded before each update and read on resume."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from bertjax import RunError
from bertjax.parallel.mesh import make_mesh
from bertjax.training.budget import CLOCKS, Clock, describe_budget, least_seconds
from bertjax.training.schedules import CLOCK_UPDATES


class Time:
    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock(tmp_path):
    def open_clock(step, now):
        made = Clock(tmp_path, 10.0, make_mesh(devices=jax.devices()[:1]), step, now)
        return made

    return open_clock


def take(clock, now, step, pauses):
    """Start an update after each pause; return the updates' times in seconds."""
    batches = clock.stamp(({} for _ in pauses), step)
    out = []
    for pause in pauses:
        now.seconds += pause
        out.append(float(np.asarray(next(batches)["at"]).max()) * 10 / CLOCK_UPDATES)
    return out


def test_times_are_repeated_and_go_on(clock, tmp_path):
    now = Time()
    first = clock(0, now)
    assert take(first, now, 0, [0, 2, 2, 2]) == pytest.approx([0, 2, 4, 6])
    assert first.see(CLOCK_UPDATES * 0.6) == 0.6 and not first.over
    # The run was killed in the middle of a line. It resumes much later, after update 2.
    with (tmp_path / "clock.txt").open("a") as file:
        file.write("7.")
    now = Time()
    now.seconds = 9e6
    second = clock(2, now)
    times = take(second, now, 2, [50, 60, 1, 4])
    # Updates 2 and 3 have their recorded times; the next comes one second after update
    # 3, and the last at the end of the budget.
    assert times == pytest.approx([4, 6, 7, 10])
    assert second.see(CLOCK_UPDATES) == 1 and second.over
    second.close()
    lines = (tmp_path / "clock.txt").read_text().split()
    assert [*map(float, lines)] == pytest.approx([0, 2, 4, 6, 7, 11])
    assert clock(6, now).over and not clock(5, now).over
    # The run has ended after the update that follows the end of the budget.
    assert clock(7, now).ended and not clock(6, now).ended


def test_a_run_that_goes_on_with_a_budget(clock, tmp_path):
    """Untimed updates, before a budget or between two, use none of the budget."""
    now = Time()
    first = clock(3, now)
    assert not first.over
    assert take(first, now, 3, [1, 2]) == pytest.approx([1, 3])
    first.close()
    second = clock(9, now)
    assert take(second, now, 9, [2]) == pytest.approx([5])
    second.close()
    lines = (tmp_path / "clock.txt").read_text().split()
    assert [*map(float, lines)] == pytest.approx([0] * 3 + [1] + [3] * 5 + [5])


def test_going_back_spends_time(clock):
    now = Time()
    made = clock(0, now)
    take(made, now, 0, [0, 2, 2])
    made.cut(1)
    assert take(made, now, 1, [3, 1]) == pytest.approx([7, 8])


def test_a_full_disk_is_said_in_a_line(clock):
    now = Time()
    made = clock(0, now)
    made.close()
    made.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"clock\.txt cannot be written: .*No space"):
        take(made, now, 0, [1])


def test_a_budget_is_said():
    said = describe_budget(5.0, 1_000_000)
    assert "after 5 minutes" in said and "1,000,000 steps (total)" in said
    assert "processor time" not in said
    assert "5 minutes of processor time" in describe_budget(5.0, 100, "cpu")
    assert "mask" not in said
    told = describe_budget(5.0, 100, ramps=["mask_rate=0.3:0.15", "the strength"])
    assert told.endswith("the steps, up to total: mask_rate=0.3:0.15, the strength")


def test_the_time_of_the_processor_does_not_pass_while_others_work():
    before = CLOCKS["cpu"](), CLOCKS["wall"]()
    with subprocess.Popen([sys.executable, "-c", "print(sum(range(10**6)))"]) as other:
        other.wait()
    cpu, wall = CLOCKS["cpu"]() - before[0], CLOCKS["wall"]() - before[1]
    assert 0 <= cpu < wall
    assert least_seconds(60.0, "wall") == 60
    assert 0 < least_seconds(60.0, "cpu") <= 60

# SPDX-License-Identifier: Apache-2.0
"""The meter's values, with a clock that the test advances."""

import pytest

from bertjax.training.meter import Meter


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("bertjax.training.meter.time.monotonic", made)
    # The processor is busy half of the time.
    processor = "bertjax.training.meter.time.process_time"
    monkeypatch.setattr(processor, lambda: made.seconds / 2)
    return made


def alone(values):
    return [values]


def work(meter, clock):
    """Take two steps in 10 s: wait 2 s for data, 5 s for devices, work for 3 s."""
    for _ in range(2):
        meter.timed("waited", clock.sleep, 1.0)
        clock.sleep(1.5)
        meter.timed("blocked", clock.sleep, 2.5)
        meter.count(tokens=300, slots=400, flops=5e9)


def test_a_window(clock):
    meter = Meter(peak=1e10, memory=lambda: 3 * 2**30)
    assert meter.row(alone) == {}
    work(meter, clock)
    assert meter.row(alone) == {
        "perf/step_seconds": 5.0,
        "perf/processor_seconds": 2.5,
        "perf/tokens_per_second": 60.0,
        "perf/memory_gib": 3.0,
        "perf/mfu": 0.1,
        "data/wait_seconds": 1.0,
        "data/fill": 0.75,
    }
    assert meter.row(alone) == {}, "the window begins anew"


def test_windows_follow_each_other(clock):
    """A step of 4 s that runs while a row is gathered counts in the next window."""
    meter = Meter(None, lambda: 0)

    def gather(values):
        clock.sleep(3.0)
        return [values]

    work(meter, clock)
    assert meter.row(gather)["perf/step_seconds"] == 5
    clock.sleep(1.0)
    meter.count(tokens=400, slots=400, flops=0.0)
    row = meter.row(gather)
    assert row["perf/step_seconds"] == 4 and row["perf/tokens_per_second"] == 100
    assert row["perf/processor_seconds"] == 2
    assert meter.blocked == 3.0, "nor is it this host's own work"


def test_pauses_do_not_count(clock):
    meter = Meter(None, lambda: 0)
    work(meter, clock)
    with meter.pause():
        clock.sleep(90)
    row = meter.row(alone)
    assert row["perf/step_seconds"] == 5 and row["perf/processor_seconds"] == 2.5
    assert "perf/mfu" not in row


@pytest.mark.parametrize(
    "others, waited, own, slowest",
    [
        ([[0.5, 1.0], [0.0, 0.0]], 1.0, 1.5, 0),
        ([[4.0, 0.0], [0.1, 3.0]], 4.0, 3.0, 1),
        ([[2.0, 0.0], [0.2, 6.0]], 2.0, 6.0, 2),
    ],
)
def test_hosts(clock, others, waited, own, slowest):
    """The row has seconds per step of each host and the maxima; the slowest host has
    the largest sum of data wait and own work."""
    sent = []

    def gather(values):
        sent.extend(values)
        return [values, *others]

    meter = Meter(None, lambda: 0)
    work(meter, clock)
    row = meter.row(gather)
    assert sent == [1.0, 1.5], "waited for data, own work"
    found = {k: v for k, v in row.items() if k.startswith("hosts/")}
    names = "data_wait_seconds", "own_seconds"
    each = enumerate([[1.0, 1.5], *others])
    assert found == {
        **{
            f"hosts/{i}/{name}": value
            for i, pair in each
            for name, value in zip(names, pair, strict=True)
        },
        "hosts/data_wait_seconds_max": waited,
        "hosts/own_seconds_max": own,
        "hosts/slowest": slowest,
    }

# SPDX-License-Identifier: Apache-2.0
"""Thinning of a long series for a chart keeps every outlier."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.reporting import charts
from bertjax.reporting.read_runs import Series

VALUES = st.floats(allow_infinity=False, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), VALUES), min_size=1, max_size=300),
    st.integers(1, 20),
)
def test_every_bucket_keeps_its_extremes_ends_and_gaps(points, buckets):
    steps = np.cumsum([gap for gap, _ in points]).astype(float)
    values = np.array([value for _, value in points])
    kept = charts.thin(steps, values, buckets)
    assert np.all(np.diff(kept) > 0)
    assert {0, len(steps) - 1} <= {*kept.tolist()}
    if len(steps) <= 4 * buckets:
        assert len(kept) == len(steps)
        return
    assert len(kept) <= 5 * buckets
    share = (steps - steps[0]) / max(steps[-1] - steps[0], 1)
    bucket = np.minimum((share * buckets).astype(int), buckets - 1)
    for b in np.unique(bucket):
        here, drawn = values[bucket == b], values[kept][bucket[kept] == b]
        assert np.isnan(here).any() == np.isnan(drawn).any()
        if np.isfinite(here).any():
            assert np.nanmin(here) == np.nanmin(drawn)
            assert np.nanmax(here) == np.nanmax(drawn)


def test_a_spike_in_a_hundred_thousand_rows_stays():
    values = np.full(100_000, 2.0)
    values[54_321], values[77_777], values[88_888] = 900.0, -1.0, np.nan
    steps = np.arange(1, 100_001) * 10.0
    drawn = charts.points(Series(steps, steps * 7, values))
    assert len(drawn["step"]) <= 5 * charts.BUCKETS
    at = drawn["value"].index(900)
    assert drawn["step"][at] == 543_220 and drawn["tokens"][at] == 7 * 543_220
    assert drawn["value"].count(-1) == 1
    assert drawn["step"][drawn["value"].index(None)] == 888_890


@pytest.mark.parametrize("n", [20, 57, 1000])
def test_smoothing_is_the_mean_of_a_window_that_skips_gaps(n):
    values = np.random.default_rng(n).normal(size=n)
    values[3:9] = np.nan
    got = charts.smooth(values)
    half = max(1, round(n * charts.SPAN / 2))
    for i in range(n):
        reach = min(half, i, n - 1 - i)
        window = values[i - reach : i + reach + 1]
        window = window[np.isfinite(window)]
        if len(window):
            assert got[i] == pytest.approx(window.mean())
        else:
            assert np.isnan(got[i])


def test_short_series_are_drawn_as_they_are():
    drawn = charts.points(Series(*np.array([[1.0, 2], [8, 16], [0.5, 1 / 3]])))
    assert drawn == {"step": [1, 2], "tokens": [8, 16], "value": [0.5, 0.333333]}

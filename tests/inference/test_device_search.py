# SPDX-License-Identifier: Apache-2.0
"""Search on one device and on eight finds what the host finds, and never padding."""

import jax
import numpy as np
import pytest

from bertjax.inference import device_search
from bertjax.inference.device_search import DeviceIndex
from bertjax.models import nearest
from bertjax.tasks.search import Dense


@pytest.mark.parametrize("devices", [1, 8])
def test_as_on_the_host(devices, monkeypatch):
    monkeypatch.setattr(nearest, "TILE", 16)
    monkeypatch.setattr(device_search, "QUERIES", 8)
    draw = np.random.default_rng(0)
    passages = draw.integers(-2, 3, (83, 4)).astype(np.float32)
    # All products of the first queries are below 0, which is that of padding.
    passages[:, 0] = -9
    passages[5] = np.nan
    queries = draw.integers(-2, 3, (11, 4)).astype(np.float32)
    queries[:4] = [1, 0, 0, 0]
    leave = draw.integers(-1, 83, 11)
    index = DeviceIndex(passages, jax.devices()[:devices])
    found, scores = index.search(Dense(queries), leave, 7)
    want, best = Dense(passages).search(Dense(queries), leave, 7)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(scores, best)
    everything = index.search(Dense(queries[:1]), k=100)[0]
    assert sorted(everything[0].tolist()) == [-1, *(i for i in range(83) if i != 5)]
    assert index.search(Dense(queries[:0]), k=3)[0].shape == (0, 3)


def test_accelerators_search_where_there_are_some(monkeypatch):
    index = Dense(np.eye(3, dtype=np.float32))
    assert device_search.place(index) is index
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert isinstance(device_search.place(index), DeviceIndex)
    assert device_search.place("another kind") == "another kind"

# SPDX-License-Identifier: Apache-2.0
"""Paths as people write them."""

from pathlib import Path

import pytest

from bertjax import UserError
from bertjax.storage.paths import expand


def test_a_home_and_none(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    for given, path in {
        "~": "/home/ann",
        "~/runs": "/home/ann/runs",
        "runs/~nobody-here": "runs/~nobody-here",
        "./~nobody-here": "~nobody-here",
        "": ".",
    }.items():
        assert expand(given) == Path(path)
    wanted = "^~nobody-here/x: there is no directory ~nobody-here: give the whole path$"
    with pytest.raises(UserError, match=wanted):
        expand("~nobody-here/x")

# SPDX-License-Identifier: Apache-2.0
"""Paths in the forms that people write."""

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


def test_where_nothing_can_be(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for given in ("file/x", "nothing/x"):
        assert expand(tmp_path / given) == tmp_path / given
    for given, why in {
        "a text " * 50: "'a text .{53}' is no path here: File name too long",
        "x/" * 3000: "File name too long",
        "a\0b": "embedded null",
        tmp_path / "loop": "Too many levels of symbolic links",
    }.items():
        with pytest.raises(UserError, match=why):
            expand(given)

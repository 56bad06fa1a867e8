# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import subprocess
import sys

import pytest

from bertjax import UserError
from bertjax.measuring import topologies


def test_names_of_slices():
    assert topologies.parse("v5e:2x4") == (1, "v5e:2x4", {})
    assert topologies.parse("2xv5p:2x2x2") == (2, "v5p:2x2x2", {})
    slices, name, more = topologies.parse("v4:2x2x1")
    assert (slices, name) == (1, "v4:2x2x1") and more  # two cores are one device


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v5e",
        "v5e-8",
        "v5litepod-8",
        "v9:2x4",
        "v5e:8",
        "0xv5e:2x4",
        "v5e:0x4",
        "x:2x4",
    ],
)
def test_unknown_slices_are_refused_with_examples(name):
    with pytest.raises(UserError, match="--topology") as error:
        topologies.parse(name)
    said = str(error.value)
    assert name in said and "\n" not in said


def test_the_compiler_may_be_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install libtpu"):
        topologies.prepare()


def test_jax_does_not_cache_what_it_cannot_load(monkeypatch):
    """Formerly jax warned of each entry in the cache, and saved no time."""
    monkeypatch.setattr(os, "environ", {"JAX_COMPILATION_CACHE_DIR": "/tmp/cache"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    topologies.prepare()
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"


@pytest.mark.slow  # starts the compiler
def test_the_shapes_that_are_named_are_the_compilers():
    pytest.importorskip("libtpu")
    code = """
from bertjax.measuring import topologies as t
t.prepare()
for kind, shapes in t.SHAPES.items():
    for shape in shapes:
        assert t.find_devices(f"{kind}:{shape}")
"""
    subprocess.run([sys.executable, "-c", code], check=True)

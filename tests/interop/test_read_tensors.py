# SPDX-License-Identifier: Apache-2.0
"""pytorch_model.bin is read without executing it, and refused if it contains code."""

import io
import json
import os
import pickle
import sys
import types
import zipfile

import numpy as np
import pytest
from test_hf_read import LAYOUTS

from bertjax import UserError
from bertjax.interop import hf_read


class Storage:
    """Stands for torch.FloatStorage in pickles that these tests write."""


class Tensor:
    def __init__(self, key, array):
        self.key, self.array = key, array

    def __reduce__(self):
        a = self.array
        strides = tuple(s // a.itemsize for s in a.strides)
        storage = Place(self.key, a.size)
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (
            storage,
            0,
            a.shape,
            strides,
            False,
            {},
        )


class Place:
    def __init__(self, key, size):
        self.key, self.size = key, size


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        if isinstance(obj, Place):
            torch = sys.modules["torch"]
            return ("storage", torch.FloatStorage, obj.key, "cpu", obj.size)
        return None


@pytest.fixture
def names(monkeypatch):
    """Install modules with torch's names, so that pickle can write them."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    class FloatStorage:
        __module__, __qualname__ = "torch", "FloatStorage"

    def _rebuild_tensor_v2(*given):
        raise AssertionError("called")

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    torch.FloatStorage, utils._rebuild_tensor_v2 = FloatStorage, _rebuild_tensor_v2
    torch._utils = utils
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)


def write(folder, state, arrays):
    folder.mkdir(exist_ok=True)
    text = io.BytesIO()
    Pickler(text, protocol=2).dump(state)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        for key, array in arrays.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    config = json.dumps(LAYOUTS["bert"]["config"])
    (folder / "config.json").write_text(config)


def test_tensors_are_read(names, tmp_path):
    rng = np.random.default_rng(3)
    made = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in LAYOUTS["bert"]["shapes"].items()
    }
    keys = {name: str(i) for i, name in enumerate(made)}
    state = {name: Tensor(keys[name], array) for name, array in made.items()}
    write(tmp_path / "a", state, {keys[n]: a for n, a in made.items()})
    params = hf_read.open_model(tmp_path / "a", "x").params()
    word = made["bert.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(params["encoder"]["embeddings"]["word"], word)
    up = made["bert.encoder.layer.1.intermediate.dense.weight"]
    kernel = params["encoder"]["layers"]["mlp"]["up"]["kernel"][1]
    np.testing.assert_array_equal(kernel, up.T)


class Code:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("call", [(os.system, "touch {}"), (exec, "open('{}', 'w')")])
def test_code_is_never_run(names, tmp_path, call):
    mark = tmp_path / "mark"
    function, text = call
    write(tmp_path / "a", {"x": Code(function, (text.format(mark),))}, {})
    with pytest.raises(UserError, match="nothing of it was run") as e:
        hf_read.open_model(tmp_path / "a", "x")
    assert "\n" not in str(e.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}q\0.", b"PK\x03\x04 cut", b"no zip at all"]
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(LAYOUTS["bert"]["config"]))
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        hf_read.open_model(folder, "x")


def test_tensors_beyond_their_bytes_are_refused(names, tmp_path):
    array = np.zeros((4, 4), np.float32)
    write(tmp_path / "a", {"x": Tensor("0", array)}, {"0": array[:2]})
    with pytest.raises(UserError, match="longer than its bytes"):
        hf_read.open_model(tmp_path / "a", "x")
    write(tmp_path / "a", {"x": Tensor("0", array.T[:, ::2])}, {"0": array})
    with pytest.raises(UserError, match="not contiguous"):
        hf_read.open_model(tmp_path / "a", "x")

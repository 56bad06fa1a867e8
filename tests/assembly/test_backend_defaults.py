# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.assembly import resolve, train_step
from bertjax.config import base


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("flags\t: fpu avx512_bf16 clzero\n", "bfloat16"),
        ("flags\t: fpu amx_bf16\n", "bfloat16"),
        ("Features\t: fp asimd i8mm bf16 bti\n", "bfloat16"),
        ("flags\t: fpu avx512f avx512_vnni\n", "float32"),
    ],
)
def test_fast_is_bfloat16_where_the_cpu_multiplies_it(flags, wanted, tmp_path):
    facts = tmp_path / "cpuinfo"
    facts.write_text(flags)
    found = resolve.cpu_multiplies_bfloat16(str(facts))
    assert found == (wanted == "bfloat16")
    assert not resolve.cpu_multiplies_bfloat16(str(tmp_path / "nothing"))


def test_dtypes_by_backend(monkeypatch):
    monkeypatch.setattr(resolve, "cpu_multiplies_bfloat16", lambda: True)
    assert resolve.dtype_of("fast", "cpu") == "bfloat16"
    monkeypatch.setattr(resolve, "cpu_multiplies_bfloat16", lambda: False)
    assert resolve.dtype_of("fast", "cpu") == "float32"
    assert resolve.dtype_of("fast", "tpu") == "bfloat16"
    assert resolve.dtype_of("auto", "cpu") == "float32"
    assert resolve.dtype_of("auto", "gpu") == "bfloat16"
    assert resolve.dtype_of("float32", "tpu") == "float32"


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_up_to_twelve_layers_are_no_loop_on_an_accelerator(backend):
    config = base()
    config.model.num_hidden_layers = 12
    assert resolve.encoder_config(config, 100, backend).unroll == 0
    config.model.num_hidden_layers = 13
    assert resolve.encoder_config(config, 100, backend).unroll == 1
    assert resolve.encoder_config(config, 100, "cpu").unroll == 0
    config.model.unroll = 2
    assert resolve.encoder_config(config, 100, backend).unroll == 2


def test_updates_are_made_for_the_devices_of_the_mesh(monkeypatch):
    """preflight's topologies have devices that this machine lacks."""
    config, made = base(), []
    config.optim.name, config.optim.ns_dtype = "muon", "fast"

    def make_optimizer(*given, ns_dtype, **settings):
        made.append(ns_dtype)
        raise StopIteration

    monkeypatch.setattr(resolve, "cpu_multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(train_step.optim, "make_optimizer", make_optimizer)
    for platform in ("tpu", "cpu"):
        mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        with pytest.raises(StopIteration):
            objective = SimpleNamespace(whole_batch=None)
            train_step.make_update(config, objective, mesh, 1, 10)
    assert made == ["bfloat16", "float32"]

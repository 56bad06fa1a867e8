# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/python_api.md run in order on a small corpus and eight devices."""

import re

import jax
import numpy as np
from conftest import ROOT, train_losses

PAGE = ROOT / "docs/python_api.md"
SMALL = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "optim.name": "adamw",
    "optim.ns_dtype": "float32",
    "total.steps": 8,
}


def test_the_page_runs(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").symlink_to(corpus)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python"}
    config = 'config = load_config("quickstart.py:smoke")'
    assert text.count(config) == 1
    for key, value in SMALL.items():  # compiles faster
        config += f"; config.{key} = {value!r}"
    names = {}
    for _, code in blocks:
        assert all(len(line) <= 88 for line in code.splitlines())
        code = code.replace(config.partition(";")[0], config)
        exec(compile(code, f"{PAGE.name}: {code[:60]!r}", "exec"), names)
    assert (tmp_path / "runs/mine-hf/model.safetensors").exists()
    # The page's own loop has the losses of bertjax.fit.
    losses = jax.device_get(names["losses"])
    np.testing.assert_allclose(losses, train_losses(tmp_path / "runs/mine"), rtol=1e-4)
    np.testing.assert_allclose(names["maps"].sum(-1), 1.0, rtol=1e-5)
    real = names["batch"]["attention_mask"] == 1
    states = np.concatenate(names["states"])
    for encoded in (names["encoded"], names["again"]):
        np.testing.assert_allclose(encoded.hidden[real], states, atol=1e-4)
    assert np.abs(names["dropped"].hidden[real] - states).max() > 1e-2
    assert np.abs(names["gradients"]["mine"]["kernel"]).max() > 1e-4
    assert len(names["parted"].hidden.sharding.device_set) == jax.device_count()

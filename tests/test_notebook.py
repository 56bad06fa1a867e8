# SPDX-License-Identifier: Apache-2.0
"""launch/colab.ipynb: its cells run in order, as a notebook runs them."""

import ast
import json
import subprocess
import sys

import pytest
from conftest import ROOT, succeeded

NOTEBOOK = ROOT / "launch" / "colab.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]


def test_its_form():
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert found["nbformat"] == 4
    assert not any(x.get("outputs") for x in found["cells"])
    for source in code_cells():
        ast.parse(source)
        assert all(len(line) <= 88 for line in source.splitlines())


@pytest.mark.slow
def test_it_runs(arguments, environment, tmp_path):
    """On the CPU, with the tests' text: train, evaluate, ask, resume, export."""
    given = [a for a in arguments if a.startswith("--config.data.")]
    given += ["--config.model.hidden_size=32", "--config.eval.every.steps=20"]
    done = subprocess.run(
        [sys.executable, "-c", "\n\n".join(code_cells())],
        cwd=tmp_path,
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "BERTJAX_RUN": str(tmp_path / "run"),
            "BERTJAX_MORE": " ".join(given),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = succeeded(done).stdout
    assert "runtime: cpu" in said and "pip install" not in said
    for words in ("done: step 20", "is done: step 20", "done: step 24", "mlm_loss"):
        assert words in said, said[-4000:]
    assert "model.safetensors" in said and "config.json" in said

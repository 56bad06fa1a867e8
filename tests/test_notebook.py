# SPDX-License-Identifier: Apache-2.0
"""The cells of launch/colab.ipynb run in order, as in a notebook."""

import ast
import importlib.util
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


def test_where_it_installs_from(tmp_path, monkeypatch):
    setup, _, install, *_ = code_cells()
    given = {}
    monkeypatch.delenv("BERTJAX_REPOSITORY", raising=False)
    exec(setup, given)
    said = []
    given |= {"runtime": "cuda", "run": lambda *words: said.append(words[-1])}
    missing = lambda name: None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="BERTJAX_REPOSITORY"):
        exec(install, given)
    monkeypatch.chdir(NOTEBOOK.parent)
    exec(install, given)
    exec(install, {**given, "REPOSITORY": "https://host/bertjax"})
    assert said == [f"{ROOT}[cuda]", "bertjax[cuda] @ git+https://host/bertjax"]


@pytest.mark.slow
def test_it_runs(arguments, environment, tmp_path):
    """It trains, evaluates, fills blanks, resumes and exports on a CPU, with the tests'
    text. Then the cells that write files run again in the same directories."""
    given = [a for a in arguments if a.startswith("--config.data.")]
    given += ["--config.model.hidden_size=32", "--config.eval.every.steps=20"]
    cells = code_cells()
    writes = ("import os", "runtime =", '"train"', "convert")
    again = [x for x in cells if any(word in x for word in writes)]
    assert len(again) < len(cells)
    done = subprocess.run(
        [sys.executable, "-c", "\n\n".join([*cells, "print('again')", *again])],
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
    first, second = said.split("\nagain\n")
    assert "is done: step 20" in second and "done: step 24" in second, second
    for part in (first, second):
        assert "model.safetensors" in part and "config.json" in part

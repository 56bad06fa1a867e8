# SPDX-License-Identifier: Apache-2.0
"""docs/notebooks: the form of the notebooks, and that their cells run in order."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, succeeded

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]
# Words that each prints if its model has learned its task.
SAID = {
    "1_pretrain_and_fill_blanks": r"camel lives in the \[MASK\] \. \[\('desert'",
    "2_finetune_and_compare_seeds": r"good 0\.\d+ the food was lovely",
    "3_continue_a_hugging_face_model": r"after: [56] of 6 true sentences",
    "4_look_inside": r"same number between: (9\d|100)% right",
    "5_write_texts": r"<extra_id_0> pond [\s\S]*a call: the eagle lives in the cliff",
}


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]


def test_each_has_a_test():
    assert IDS == sorted(SAID)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_its_form(path):
    """A notebook has the keys of nbformat 4.5, different ids, no outputs, and a first
    cell that installs bertjax."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"]["kernelspec"]["name"] == "python3"
    cells = found["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert "pip install" in "".join(cells[0]["source"])
    assert 'find_spec("bertjax")' in code_cells(path)[0]
    assert "config.dtype" in "".join(code_cells(path))  # a T4 has no bfloat16
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
            assert cell["execution_count"] is None and cell["outputs"] == []
        assert cell.keys() == keys and cell["cell_type"] in ("code", "markdown")
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        lines = "".join(cell["source"]).splitlines(keepends=True)
        assert cell["source"] == lines and cell["metadata"] == {}
        assert all(len(line.rstrip("\n")) <= 92 for line in lines)
    for number, source in enumerate(code_cells(path)):
        compile(source, f"{path.name}, code cell {number}", "exec")
        assert all(len(line) <= 88 for line in source.splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_its_links(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    assert all((path.parent / link).exists() for link in links), links


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_runs(path, environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "\n\n".join(code_cells(path))],
        cwd=tmp_path,
        # They run thousands of steps, so optimizing the programs pays off.
        env={**environment, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert re.search(SAID[path.stem], succeeded(done).stdout), done.stdout[-4000:]

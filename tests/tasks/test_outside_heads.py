# SPDX-License-Identifier: Apache-2.0
"""Heads from outside the package (tests/lab) that learn from labeled rows."""

import dataclasses
import json
import re

import numpy as np
import pytest
from conftest import ROOT, read_rows, refused, succeeded
from lab import contrast, focal

from bertjax import UserError, evaluate, predict, train
from bertjax.checkpoints.manager import restore_params
from bertjax.tasks.task_type import (
    find_task_type,
    load_task_type,
    task_type_names,
    with_options,
)

pytestmark = pytest.mark.usefixtures("no_listener")
WORDS = {"no": ["wrong", "slow"], "so": ["some", "other"], "yes": ["clear", "fast"]}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Write 24 rows whose words determine which of three labels they have."""
    draw = np.random.default_rng(0)
    rows = [f"{' '.join(draw.choice(WORDS[x], 5))}\t{x}" for x in [*WORDS] * 8]
    file = tmp_path_factory.mktemp("tables") / "rows.tsv"
    file.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    return file


@pytest.fixture(scope="module")
def wanted(table, vocabulary):
    keys = "data.length=16", "model.hidden_size=32", "model.num_hidden_layers=1"
    keys += f"data.train={table}", f"data.valid={table}", f"data.vocab={vocabulary}"
    keys += "task.text=text", "task.label=label", "batch_size=8", "optim.lr=1e-2"
    keys += "total.steps=30", "eval.every.steps=15", "eval.best=auto"
    keys += ("objective=lab.focal:gamma=1",)
    return [
        "--config=finetune/classify.py:smoke",
        *(f"--config.{key}" for key in keys),
    ]


@pytest.fixture(scope="module")
def finetuned(command, wanted, tmp_path_factory):
    """Return the workdir of a run with the focal loss, and its messages."""
    path = tmp_path_factory.mktemp("finetuned") / "run"
    env = {"PYTHONPATH": str(ROOT / "tests")}
    done = succeeded(command("train", *wanted, f"--workdir={path}", env=env))
    return path, done.stderr


def test_it_learns_the_rows_of_its_task(finetuned):
    """It has one class per label, and the metrics of classification."""
    path, said = finetuned
    assert "3 labels: no, so, yes" in said
    last = read_rows(path)[-1]
    assert last["eval/valid/accuracy"] == 1.0 and last["eval/valid/focal"] < 0.5
    run = json.loads((path / "run.json").read_text())
    assert run["greater_is_better"] == {"focal": False}
    assert run["best"]["metric"] == "eval/valid/accuracy"
    params = restore_params(path / "checkpoints/30")
    assert params["focal"]["kernel"].shape == (32, 3)


def test_others_open_it(finetuned, table, tmp_path, capsys):
    path, _ = finetuned
    out = tmp_path / "answers.jsonl"
    predict.main([f"--model={path}", f"--input={table}", f"--out={out}"])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["label"] for answer in answers] == [*WORDS] * 8
    capsys.readouterr()
    evaluate.main([f"--workdir={path}", "--json"])
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0


def test_a_model_whose_module_is_elsewhere(command, finetuned, table):
    path, _ = finetuned
    told = command("predict", f"--model={path}", f"--input={table}")
    refused(told, "objective='lab.focal': there is no module of that name", "PYTHON")


def head_of(**changed):
    made = focal.make_head

    def make_head(classes=2, gamma=2.0):
        return dataclasses.replace(made(classes, gamma), **changed)

    return make_head


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"task_type": None},
            "objective=lab.focal:gamma=1 does not say which",
        ),
        ({"task_type": "tags"}, "task_type='tags' is unknown; did you mean 'tag'?"),
        ({"outputs": None}, "a head for rows of classify needs `outputs`"),
        (
            {"outputs": lambda params, cfg, encoded, batch: {"x": encoded.pooled}},
            "`outputs` of a head for rows of classify lacks scores; it returns x",
        ),
    ],
)
def test_what_is_refused(wanted, monkeypatch, changed, said):
    monkeypatch.setattr(focal, "make_head", head_of(**changed))
    with pytest.raises(UserError) as e:
        train.main([*wanted, "--dry_run"])
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_head_takes_the_number_of_classes(wanted, monkeypatch):
    make_head = focal.make_head
    monkeypatch.setattr(focal, "make_head", lambda gamma: make_head(3, gamma))
    with pytest.raises(UserError, match=r"option of lab\.focal='classes' is unknown"):
        train.main([*wanted, "--dry_run"])


def test_the_page_names_what_outputs_return():
    page = (ROOT / "docs/add_an_objective.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\|$", page, re.MULTILINE)
    told = {kind: tuple(re.findall(r"`(\w+)`", names)) for kind, names in told}
    types = {name: load_task_type(name).outputs for name in task_type_names()}
    # The page lists all types with the outputs that they need.
    assert told == types


def test_what_objectives_learn_from():
    for name in task_type_names():
        assert find_task_type(name) is load_task_type(name)
    others = "mlm", "mlm+nsp", "electra:generator=0.25"
    assert {find_task_type(name) for name in others} == {None}
    assert find_task_type("classify:classes=3") is load_task_type("classify")
    assert find_task_type("lab.focal") is load_task_type("classify")
    assert find_task_type("lab.contrast") is None and contrast.make_head()
    options = find_task_type("lab.focal").head_options(None, "abc")
    assert with_options("lab.focal", **options) == "lab.focal:classes=3"
    found = with_options("lab.focal:gamma=1", **options)
    assert found == "lab.focal:gamma=1,classes=3"

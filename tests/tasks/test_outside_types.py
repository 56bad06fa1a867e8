# SPDX-License-Identifier: Apache-2.0
"""A task type from outside the package (tests/lab/levels.py), from table to answers."""

import json

import numpy as np
import pytest
from conftest import ROOT, read_rows, succeeded
from lab import levels

from bertjax import UserError, evaluate, predict, train
from bertjax.assembly import command_line
from bertjax.checkpoints.manager import restore_params
from bertjax.tasks.prepare_task import with_head_options
from bertjax.tasks.task_type import find_task_type, load_task_type

pytestmark = pytest.mark.usefixtures("no_listener")
WORDS = {"bad": ["wrong", "slow"], "fair": ["some", "other"], "good": ["clear", "fast"]}
ORDER = "bad,fair,good"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Write 24 rows whose words determine which of three levels they have."""
    draw = np.random.default_rng(0)
    rows = [f"{level}\t{' '.join(draw.choice(WORDS[level], 5))}" for level in WORDS]
    file = tmp_path_factory.mktemp("tables") / "rows.tsv"
    file.write_text("\n".join(["level\tremark", *rows * 8]) + "\n")
    return file


@pytest.fixture(scope="module")
def arguments(table, vocabulary):
    keys = "data.length=16", "model.hidden_size=32", "model.num_hidden_layers=1"
    keys += f"data.train={table}", f"data.valid={table}", f"data.vocab={vocabulary}"
    keys += "task.text=remark", f"task.labels={ORDER}", "batch_size=8", "optim.lr=1e-2"
    keys += "total.steps=30", "eval.every.steps=30", "objective=lab.ordinal"
    return ["--config=finetune/classify.py:smoke", *(f"--config.{k}" for k in keys)]


@pytest.fixture(scope="module")
def finetuned(command, arguments, tmp_path_factory):
    """Return the workdir of a run."""
    path = tmp_path_factory.mktemp("finetuned") / "run"
    env = {"PYTHONPATH": str(ROOT / "tests")}
    succeeded(command("train", *arguments, f"--workdir={path}", env=env))
    return path


def test_it_is_trained_and_scored_by_its_own_metric(finetuned):
    last = read_rows(finetuned)[-1]
    assert last["eval/valid/levels_off"] == 0.0 and last["eval/valid/ordinal"] < 1.0
    params = restore_params(finetuned / "checkpoints/30")
    assert params["ordinal"]["kernel"].shape == (32, 2)  # three levels
    config = json.loads((finetuned / "config.json").read_text())
    assert config["task"]["label"] == "level"  # the type's default column


def test_the_commands_evaluate_and_answer(finetuned, table, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    predict.main([f"--model={finetuned}", f"--input={table}", f"--out={out}"])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["level"] for answer in answers] == [*WORDS] * 8
    assert all(len(answer["above"]) == 2 for answer in answers)
    capsys.readouterr()
    evaluate.main([f"--workdir={finetuned}", "--json"])
    assert json.loads(capsys.readouterr().out)["levels_off"] == 0.0


def test_it_is_found_by_its_dotted_name(arguments):
    assert load_task_type("lab.levels") is levels.TASK_TYPE
    assert find_task_type("lab.ordinal") is levels.TASK_TYPE
    config = command_line.parse(arguments).config
    assert with_head_options(config, ["a", "b"]) == "lab.ordinal:levels=2"
    with pytest.raises(UserError, match=r"'lab\.blanks': the module has no TASK_TYPE"):
        load_task_type("lab.blanks")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("task.labels=", "task.labels is empty: name the levels"),
        ("task.text_pair=b", "task.text_pair=b has no effect with objective=lab.ord"),
        ("task.metrics=f1", "task.metrics='f1' is unknown"),
        ("task.stride=9", "task.stride=9 has no effect with objective=lab.ordinal"),
    ],
)
def test_what_it_has_no_use_for_is_refused(arguments, key, expected):
    with pytest.raises(UserError, match=expected):
        train.main([*arguments, f"--config.{key}", "--dry_run"])

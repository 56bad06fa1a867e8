# SPDX-License-Identifier: Apache-2.0
"""Multiple choice by the commands: from tables to answers."""

import json

import pytest
from conftest import read_rows

from bertjax import UserError, predict, show, train
from bertjax.assembly import command_line
from bertjax.config import schema
from bertjax.tasks import prepare_task, tables
from bertjax.tasks.catalog import TASKS
from bertjax.tasks.task_rows import Form
from bertjax.training.signals import StopSignal


@pytest.fixture(scope="module")
def wanted(vocabulary, tmp_path_factory):
    """Arguments of a run of 3 steps on two tables, with 2 and 3 choices per row."""
    folder = tmp_path_factory.mktemp("tables")
    for name, size in (("a", 2), ("b", 3)):
        rows = [
            {
                "given": "The statement ends",
                "ends": ["with a name", "at the line", "in an error"][:size],
                "right": "AB"[i % 2],
            }
            for i in range(8)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return [
        "--config=finetune/choose.py:smoke",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.train=a={folder}/a.jsonl,b={folder}/b.jsonl",
        f"--config.data.valid={folder}/b.jsonl",
        "--config.task.text=given",
        "--config.task.choices=ends",
        "--config.task.label=right",
        "--config.data.length=16",
        "--config.model.hidden_size=32",
        "--config.model.num_hidden_layers=1",
        "--config.batch_size=8",
        "--config.total.steps=3",
        "--config.log.writers=jsonl",
    ]


@pytest.mark.slow  # compiles for eight devices, 15 seconds
def test_from_tables_to_answers(wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    workdir = tmp_path / "run"
    assert train.main([*wanted, f"--workdir={workdir}"]) == 0
    *rows, last = read_rows(workdir)
    assert 0 <= last["eval/valid/accuracy"] <= 1 and last["eval/valid/choose_loss"] > 0
    fills = [row["data/fill"] for row in rows if "data/fill" in row]
    assert fills and 0 < min(fills) and max(fills) <= 1
    asked = [{"given": "x", "ends": ["a", "b", "c", "d"][:n]} for n in (4, 2)]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, asked)))
    capsys.readouterr()
    predict.main([f"--model={workdir}", f"--input={tmp_path / 'new.jsonl'}"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(t["scores"]) for t in told] == [4, 2]
    for row, one in zip(asked, told, strict=True):
        assert one["choice"] == row["ends"][one["label"]]
        assert one["score"] == max(one["scores"]) and sum(
            one["scores"]
        ) == pytest.approx(1)


def test_batches_are_shown(wanted, capsys):
    show.main([*wanted, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 8 and 16 < found["sequences"] < 24


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("task.choices=", "task.choices is empty"),
        ("task.choices=end", "a.jsonl:1: task.choices[0]='end'"),
        (
            "objective=classify",
            "task.choices=ends has no effect with objective=",
        ),
        ("task.metrics=f1", "task.metrics"),
    ],
)
def test_what_is_refused(wanted, tmp_path, monkeypatch, key, words):
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    with pytest.raises(UserError) as e:
        train.main([*wanted, f"--config.{key}", f"--workdir={tmp_path / 'w'}"])
    assert words in str(e.value) and not (tmp_path / "w").exists()


def test_columns_of_a_table():
    made = schema.base()
    prepare_task.fill_in_task(made, "choose", (), 64)
    for asked, columns in (
        ("given", ("given", "", "choices")),
        ("given,ends", ("given", "", "ends")),
        ("first+second,a,b", ("first", "second", "a", "b")),
    ):
        prepare_task.rename(made, asked)
        assert prepare_task.make_form(made).columns == columns
    with pytest.raises(UserError, match=r"--columns=a\+b\+c,d names 3 texts: rows"):
        prepare_task.rename(made, "a+b+c,d")


def test_a_column_that_is_not_there():
    said = r"--columns: CHOICE\[0\]='ends' is unknown; known: given, right$"
    form = Form(("given", "", "ends"), "right", (), 1, ())
    keys = form.keys(labelled=False, flags=True)
    with pytest.raises(UserError, match=said):
        tables.parse_text("given\tright\nx\tA\n", "a", keys)


def test_named_tasks():
    for name in ("swag", "hellaswag", "race", "copa"):
        made = command_line.parse(
            [f"--config=finetune/choose.py:task={name}", "--config.data.vocab=x"]
        ).config
        assert made.objective == "choose" and made.task.text
        assert made.task.choices == ",".join(TASKS[name].choices)

# SPDX-License-Identifier: Apache-2.0
"""Question answering by the commands: predict uses the checkpoint's threshold."""

import json
import shutil

import pytest
from conftest import read_rows

from bertjax import UserError, convert, predict, train
from bertjax.assembly import workdirs
from bertjax.checkpoints import manifest
from bertjax.inference import predict_rows
from bertjax.tasks import hf_task_config
from bertjax.tasks.task_rows import Limits

pytestmark = pytest.mark.usefixtures("no_listener")
CONTEXT = "The interpreter reads a file. A module is a file with statements."


def write(path):
    """Write five questions, the last two without an answer."""
    answers = ["reads", "a file", "a module", "", ""]
    qas = []
    for i, text in enumerate(answers):
        place = CONTEXT.lower().find(text)
        gold = [{"text": CONTEXT[place : place + len(text)], "answer_start": place}]
        gold[0]["answer_start"] += i == 1
        qas.append({"id": str(i), "question": f"What is {i}?"})
        qas[-1]["answers"] = gold if text else []
    paragraph = {"context": CONTEXT, "qas": qas}
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("asking") / "asked.json")


@pytest.fixture(scope="module")
def questions_arguments(vocabulary, table):
    return [
        "--config=finetune/qa.py:smoke",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.train={table}",
        f"--config.data.valid={table}",
        "--config.data.length=96",
        "--config.batch_size=8",
        "--config.model.num_hidden_layers=1",
        "--config.model.hidden_size=32",
        "--config.total.steps=2",
        "--config.optim.lr=3e-2",
        "--config.data.engine=python",
        "--config.task.answer_length=2",
        "--config.task.stride=9",
        "--config.task.question_length=70",
    ]


@pytest.fixture(scope="module")
def run(questions_arguments, table):
    """A run of two steps: (its workdir, the questions)."""
    path = table.parent / "run"
    train.main([*questions_arguments, f"--workdir={path}"])
    return path, table


def said(capsys, *arguments):
    capsys.readouterr()
    predict.main([*map(str, arguments)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predict_answers_by_the_threshold_of_the_evaluation(run, tmp_path, capsys):
    path, table = run
    kept = manifest.read_meta(path / "checkpoints/2")["task"]["threshold"]
    assert kept == read_rows(path)[-1]["eval/valid/threshold"] != 0
    model, questions = f"--model={path}", f"--input={table}"
    found = said(capsys, model, questions)
    whole = said(capsys, model, questions, "--threshold=1e9")
    assert all(row["answer"] for row in whole)
    for row, other in zip(found, whole, strict=True):
        doubt = row["null_score"] - row["score"]
        assert row["answer"] == ("" if doubt > kept else other["answer"])
    # With a threshold below all differences no question gets an answer.
    assert not any(
        row["answer"] for row in said(capsys, model, questions, "--threshold=-1e9")
    )
    theirs = tmp_path / "hf"
    convert.main([f"--from={path}", f"--to={theirs}", "--format=hf"])
    assert (
        json.loads((theirs / "config.json").read_text())[hf_task_config.THRESHOLD]
        == kept
    )
    again = said(capsys, f"--model={theirs}", questions)
    assert [row["answer"] for row in again] == [row["answer"] for row in found]
    assert all(len(row["answer"].split()) < 3 for row in whole)
    for model in (str(path), str(theirs)):
        limits = predict_rows.open_finetuned(model).form.limits
        assert limits == (9, 70, 2) and limits != Limits()


def test_a_last_evaluation_that_a_signal_broke_off_has_its_threshold(
    run, questions_arguments, tmp_path
):
    path = tmp_path / "run"
    shutil.copytree(run[0], path)
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(rows[:-1]))
    checkpoint = path / "checkpoints/2"
    meta = manifest.read_meta(checkpoint)
    kept, meta["task"]["threshold"] = meta["task"]["threshold"], 0.0
    (checkpoint / manifest.META).write_text(json.dumps(meta))
    manifest.write_manifest(checkpoint)
    train.main([*questions_arguments, f"--workdir={path}"])
    assert read_rows(path)[-1]["eval/valid/threshold"] == kept
    assert predict_rows.open_finetuned(str(path)).threshold == kept != 0


def test_answers_that_are_elsewhere_are_all_in_a_file(run):
    path, table = run
    (line,) = (path / workdirs.FINDINGS).read_text().splitlines()
    assert line.startswith(f"{table}: data[0]") and "is at 22, not at 23" in line


def test_standard_input(run, pipe, capsys):
    """It may be SQuAD's JSON or JSON lines, with a byte order mark, but not empty."""
    path, table = run
    found = said(capsys, f"--model={path}", f"--input={table}")
    asked = json.loads(table.read_text())["data"][0]["paragraphs"][0]["qas"]
    lines = "".join(
        json.dumps({"question": q["question"], "context": CONTEXT}) + "\n"
        for q in asked
    )
    for given in (table.read_bytes(), lines, lines.encode("utf-8-sig")):
        pipe(given)
        assert said(capsys, f"--model={path}", "--input=-") == found
    for given, words in {
        "": "--input=-: there are no rows",
        '{"question": "x"}': "standard input:1: the question has no context that could",
        '[{"paragraphs": []}]': r"input:\[0\] has 'paragraphs' of SQuAD's form",
        '[{"context": "x", "qas": []}]': r"input:\[0\] has 'qas' of SQuAD's form",
        "x": "standard input: is not JSON",
    }.items():
        pipe(given)
        with pytest.raises(UserError, match=words):
            predict.main([f"--model={path}", "--input=-"])

# SPDX-License-Identifier: Apache-2.0
"""Finetuning by the commands: from a pretrained run and a table to answers."""

import csv
import json
import os

import jax
import numpy as np
import pytest
from conftest import read_rows, refused, succeeded
from resuming import check_resuming

from bertjax import UserError, convert, evaluate, predict, train
from bertjax.checkpoints.manager import restore_params
from bertjax.training.signals import StopSignal

GOOD = ["clear", "useful", "simple", "fast", "exact"]
BAD = ["wrong", "slow", "unclear", "broken", "missing"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """32 rows whose words determine the label: text, second text, label, score."""
    folder = tmp_path_factory.mktemp("tables")
    draw = np.random.default_rng(0)
    rows = []
    for i in range(32):
        words = (GOOD, BAD)[i % 2]
        a, b = (" ".join(draw.choice(words, 4)) for _ in "ab")
        rows.append((f"The result is {a}", b, ("good", "bad")[i % 2], 5 - 4 * (i % 2)))
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "more", "label", "score"), *rows])
    lines = "\n".join("\t".join(map(str, r)) for r in rows)
    (folder / "bare.tsv").write_text(lines + "\n")
    return folder


@pytest.fixture(scope="module")
def wanted(tables, trained):
    """Arguments of a run that memorizes the table, from the pretrained run."""
    return [
        "--config=finetune/classify.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={tables / 'rows.csv'}",
        f"--config.data.valid={tables / 'rows.csv'}",
        "--config.task.text=text",
        "--config.task.text_pair=more",
        "--config.task.label=label",
        "--config.data.length=32",
        "--config.model.unroll=1",  # compiles faster
        "--config.batch_size=8",
        "--config.total.steps=40",
        "--config.optim.lr=3e-3",
        "--config.optim.wd=0",
        "--config.eval.every.steps=20",
        "--config.checkpoint.every.steps=20",
    ]


@pytest.fixture(scope="module")
def finetuned(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finetuned") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}"))
    assert "2 labels: bad, good" in said.stderr
    return workdir


def test_it_learns_32_rows_by_heart(finetuned):
    scores = [r for r in read_rows(finetuned) if "eval/valid/accuracy" in r]
    assert [r["step"] for r in scores] == [20, 40]
    assert scores[-1]["eval/valid/accuracy"] == 1.0
    assert (
        scores[-1]["eval/valid/classify_loss"] < scores[0]["eval/valid/classify_loss"]
    )


def learnt_between(workdir, first, last):
    """Return the trained parts, and check that each of their leaves changed between two
    checkpoints.

    For runs without weight decay, which also changes leaves that have no gradient.
    """
    assert json.loads((workdir / "config.json").read_text())["optim"]["wd"] == 0
    one, two = (restore_params(workdir / f"checkpoints/{n}") for n in (first, last))
    same = jax.tree.map(np.array_equal, one, two)
    kept = [path for path, is_same in jax.tree.leaves_with_path(same) if is_same]
    assert not kept
    return one


def test_every_parameter_changes(finetuned):
    one = learnt_between(finetuned, 20, 40)
    assert "classify" in one and one["encoder"].keys() >= {"pooler", "layers"}


def test_resuming_is_exact(command, wanted, finetuned, tmp_path):
    check_resuming(command, wanted, finetuned, tmp_path / "again")


def answers(command, model, *arguments):
    result = succeeded(command("predict", f"--model={model}", *arguments))
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_predictions_come_in_order(command, finetuned, tables, tmp_path):
    table = tables / "rows.csv"
    found = answers(command, finetuned, f"--input={table}", "--batch_size=5")
    assert [r["label"] for r in found] == ["good", "bad"] * 16
    assert all(0.5 < r["score"] <= 1 for r in found)
    # A row has the same answer among other rows, and in JSON lines, written to a file.
    rows = [{"text": "The result is fast", "more": "clear"}]
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(rows[0]) + "\n")
    given = f"--model={finetuned}", f"--input={one}", f"--out={one}"
    refused(command("predict", *given), "is --input")
    assert json.loads(one.read_text()) == rows[0]
    (tmp_path / "out").mkdir()
    out = tmp_path / "out/answers.jsonl"
    answers(command, finetuned, f"--input={one}", f"--out={out}")
    with (tmp_path / "more.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("text", "more"), *[("x " * 60, "y")] * 3, tuple(rows[0].values())]
        )
    among = answers(command, finetuned, f"--input={tmp_path / 'more.csv'}")
    alone = json.loads(out.read_text())
    assert alone["label"] == among[-1]["label"] == "good"
    assert alone["score"] == pytest.approx(among[-1]["score"], abs=1e-6)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["answers.jsonl"]


def test_predict_reads_standard_input(finetuned, tables, pipe, capsys):
    """It may be TSV, one column of texts or JSON lines, with a byte order mark, but not
    empty."""
    text, other = "The result is fast", "clear"
    line = json.dumps({"text": text, "more": other})
    table = f"text\tmore\n{text}\t{other}\n"
    found = []
    for given, more in (
        (table, []),
        (line, []),
        (f"\n{line}\n\n", []),
        (table.encode("utf-8-sig"), []),
        (line.encode("utf-8-sig"), []),
        (f"text\n\n{text}\n", ["--columns=text"]),  # the first text is empty
    ):
        pipe(given)
        capsys.readouterr()
        predict.main([f"--model={finetuned}", "--input=-", *more])
        said = capsys.readouterr().out.splitlines()
        found.append([json.loads(one) for one in said])
    assert [len(rows) for rows in found] == [1, 1, 1, 1, 1, 2]
    assert all(rows == found[0] for rows in found[:5])
    assert {rows[-1]["label"] for rows in found} == {"good"}
    for given, words in {
        b"": "--input=-: there are no rows",
        "text\tmore\n": "--input=-: there are no rows",
        "text\nx\n": "standard input: --columns: TEXT_PAIR='more' is unknown",
        b"text\tmore\nx\t\xff\n": "standard input:2: is not UTF-8",
        '{"text": "x"': "standard input:1: is not JSON",
    }.items():
        pipe(given)
        with pytest.raises(UserError, match=words):
            predict.main([f"--model={finetuned}", "--input=-"])
    for given in (table, line):
        reader, writer = os.pipe()
        os.write(writer, given.encode())
        os.close(writer)
        capsys.readouterr()
        predict.main([f"--model={finetuned}", f"--input=/dev/fd/{reader}"])
        os.close(reader)
        assert [json.loads(capsys.readouterr().out)] == found[0]


def test_evaluate_says_what_training_said(command, finetuned):
    said = succeeded(command("evaluate", f"--workdir={finetuned}", "--json"))
    last = read_rows(finetuned)[-1]["eval/valid/accuracy"]
    assert json.loads(said.stdout) == {
        "model": str(finetuned), "step": 40, "accuracy": last,
    }  # fmt: skip
    refused(command("evaluate", f"--workdir={finetuned}", "--rates=0.3"), "--rates")
    with pytest.raises(UserError, match=r"--what=mlm: .* has no masked-LM head; witho"):
        evaluate.main([f"--workdir={finetuned}", "--what=mlm"])
    with pytest.raises(UserError, match="--columns: TEXT=text and --label=text are o"):
        evaluate.main([f"--workdir={finetuned}", "--label=text"])


def test_there_and_back(finetuned, tables, tmp_path, capsys):
    """Its export as a Hugging Face directory and the import of that answer the same."""
    theirs, ours = tmp_path / "hf", tmp_path / "ours"
    convert.main([f"--from={finetuned}", f"--to={theirs}", "--format=hf"])
    convert.main([f"--from={theirs}", f"--to={ours}"])
    new = tmp_path / "new.tsv"  # the last row is cut at 32 tokens
    rows = ["The result is fast\tclear", "x\tbroken wrong", f"{'x ' * 60}\tclear"]
    new.write_text("\n".join(["text\tmore", *rows]))
    table = f"--input={new}"
    said = []
    for model in (finetuned, theirs, ours):  # all know the columns' names
        capsys.readouterr()
        predict.main([f"--model={model}", table])
        lines = capsys.readouterr().out.splitlines()
        said.append([json.loads(line) for line in lines])
    for other in said[1:]:
        assert [r["label"] for r in other] == [r["label"] for r in said[0]]
        scores = [[r["score"] for r in rows] for rows in (other, said[0])]
        np.testing.assert_allclose(*scores, atol=1e-6)
    text = f"--text={tables / 'rows.csv'}"
    evaluate.main([f"--model={theirs}", text, "--json"])
    told = capsys.readouterr()
    whose = {"model": str(theirs), "step": 0}
    assert json.loads(told.out) == {**whose, "accuracy": 1.0}
    assert told.err.count("matched") == 1
    with pytest.raises(UserError, match="--label='x' is unknown"):
        evaluate.main([f"--model={theirs}", text, "--label=x"])
    for flag in "--label=", "--columns=":
        with pytest.raises(UserError, match=f"{flag[:-1]} is empty: give the name"):
            evaluate.main([f"--model={theirs}", text, flag])
    with pytest.raises(UserError, match="--columns=, names no column"):
        predict.main([f"--model={theirs}", table, "--columns=,"])
    with pytest.raises(UserError, match="--text"):
        evaluate.main([f"--model={theirs}"])
    with pytest.raises(
        UserError,
        match="--columns=a,b,c names 3 texts: rows of objective=classify have 2",
    ):
        predict.main([f"--model={theirs}", table, "--columns=a,b,c"])


@pytest.mark.slow
def test_scores_of_columns_without_names(command, wanted, tables, tmp_path):
    """Regression on a table without a header, whose columns are given by number."""
    arguments = [
        *wanted,
        "--config.objective=regress",
        f"--config.data.train={tables / 'bare.tsv'}",
        f"--config.data.valid={tables / 'bare.tsv'}",
        "--config.task.text=1",
        "--config.task.text_pair=2",
        "--config.task.label=4",
        f"--workdir={tmp_path / 'run'}",
    ]
    succeeded(command("train", *arguments))
    assert "regress" in learnt_between(tmp_path / "run", 20, 40)
    last = read_rows(tmp_path / "run")[-1]
    assert last["eval/valid/pearson"] > 0.9 and last["eval/valid/spearman"] > 0.5
    found = answers(command, tmp_path / "run", f"--input={tables / 'bare.tsv'}")
    values = np.array([r["value"] for r in found])
    assert values[::2].min() > values[1::2].max()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("task.text=txt", ["task.text='txt'", "rows.csv"]),
        ("data.valid={}/odd.tsv", ["odd.tsv:3", "task.labels", "fine"]),
        ("objective=mlm", ["objective=mlm learns from running text", "classify"]),
        ("task.metrics=acuracy", ["did you mean 'accuracy'"]),
        ("task.name=rtee", ["did you mean 'rte'"]),
        ("init_from=", ["data.vocab is empty", "init_from"]),
        ("data.packed=True", ["data.packed"]),
        ("data.mask_rate=0.3", ["data.mask_rate=0.3 is for running text"]),
        ("data.plan=document", ["data.plan=document"]),
        ("data.extra_ids=100", ["data.extra_ids=100 is for running text"]),
        ("eval.mask_rate=0.3", ["eval.mask_rate=0.3"]),
        ("task.stride=64", ["task.stride=64", "objective=classify"]),
    ],
)
def test_what_training_refuses(wanted, tmp_path, monkeypatch, argument, words):
    (tmp_path / "odd.tsv").write_text("text\tmore\tlabel\nx\ty\tgood\nx\ty\tfine\n")
    given = f"--config.{argument.format(tmp_path)}"
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    with pytest.raises(UserError) as e:
        train.main([*wanted, given, f"--workdir={tmp_path / 'w'}"])
    assert all(word in str(e.value) for word in words), e.value
    assert not (tmp_path / "w").exists()


def test_what_predict_refuses(command, trained, finetuned, tables, tmp_path):
    (tmp_path / "b.tsv").write_text("text\nx\n")
    with pytest.raises(UserError, match="not finetuned"):
        predict.main([f"--model={trained}", f"--input={tables / 'rows.csv'}"])
    told = command("predict", f"--model={finetuned}", f"--input={tmp_path / 'b.tsv'}")
    refused(told, "b.tsv", "--columns: TEXT_PAIR='more' is unknown")


@pytest.mark.slow
def test_spans_are_learnt(command, trained, tmp_path):
    """Questions whose answer follows one word are learned from SQuAD's JSON."""
    draw = np.random.default_rng(0)
    qas = []
    for i in range(16):
        word = draw.choice(GOOD + BAD)
        context = f"{draw.choice(GOOD)} text. The name is {word} now."
        gold = {"text": word, "answer_start": context.rindex(word)}
        one = {"id": str(i), "question": "What is the name?", "answers": [gold]}
        qas.append({"context": context, "qas": [one]})
    table = tmp_path / "asked.json"
    table.write_text(json.dumps({"data": [{"paragraphs": qas}]}))
    arguments = [
        "--config=finetune/qa.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={table}",
        f"--config.data.valid={table}",
        "--config.data.length=96",
        "--config.batch_size=8",
        "--config.total.steps=50",
        "--config.optim.lr=3e-3",
        "--config.optim.wd=0",
        "--config.eval.every.steps=50",
        "--config.checkpoint.every.steps=25",
        f"--workdir={tmp_path / 'run'}",
    ]
    succeeded(command("train", *arguments))
    assert "span" in learnt_between(tmp_path / "run", 25, 50)
    last = read_rows(tmp_path / "run")[-1]
    assert last["eval/valid/exact"] > 0.5
    found = answers(command, tmp_path / "run", f"--input={table}")
    right = [
        a["answer"] == q["qas"][0]["answers"][0]["text"]
        for a, q in zip(found, qas, strict=True)
    ]
    assert np.mean(right) == pytest.approx(last["eval/valid/exact"])
    theirs = tmp_path / "hf"
    convert.main([f"--from={tmp_path / 'run'}", f"--to={theirs}", "--format=hf"])
    again = answers(command, theirs, f"--input={table}")
    assert [a["answer"] for a in again] == [a["answer"] for a in found]
    for key in ("score", "null_score"):
        scores = [[a[key] for a in rows] for rows in (again, found)]
        np.testing.assert_allclose(*scores, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["task.label=score"], "take --config.objective=regress"),
        (["task.text=label", "task.label=text"], "nearly each row would be a class"),
    ],
)
def test_columns_that_cannot_be_meant(wanted, tmp_path, monkeypatch, keys, words):
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    rows = [f"text {i}\t{i % 30 / 8}\t{i % 2}" for i in range(90)]
    table = tmp_path / "rows.tsv"
    table.write_text("\n".join(["text\tscore\tlabel", *rows]) + "\n")
    given = [f"data.train={table}", f"data.valid={table}", "task.text_pair=", *keys]
    with pytest.raises(UserError) as e:
        train.main(
            [*wanted, *(f"--config.{k}" for k in given), f"--workdir={tmp_path / 'w'}"]
        )
    assert words in str(e.value) and not (tmp_path / "w").exists()


def test_a_header_among_rows_by_number_is_said(finetuned, tables, tmp_path, capsys):
    given = ["--columns=1,2", f"--out={tmp_path / 'out.jsonl'}"]
    predict.main([f"--model={finetuned}", f"--input={tables / 'rows.csv'}", *given])
    said = capsys.readouterr().err
    assert "rows.csv:1: columns are given by number" in said
    assert "text | more | label | score" in said and "--columns=text,more" in said
    assert "33 rows of text=1, text_pair=2; the first: text " in said
    predict.main([f"--model={finetuned}", f"--input={tables / 'bare.tsv'}", *given])
    assert "by number" not in capsys.readouterr().err

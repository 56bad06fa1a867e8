# SPDX-License-Identifier: Apache-2.0
"""Sequence to sequence by the commands: from a pretrained run and a table to scores."""

import json
import math

import numpy as np
import pytest
from conftest import read_rows, succeeded

import bertjax
from bertjax import UserError, evaluate, predict
from bertjax.assembly import command_line, init_from
from bertjax.inference import predict_rows
from bertjax.tasks.task_type import get_task_type

WORDS = ["clear", "useful", "simple", "fast", "exact", "wrong", "slow", "broken"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """16 texts of three words; the target is the last word and the first."""
    draw = np.random.default_rng(0)
    rows = [draw.choice(WORDS, 3).tolist() for _ in range(16)]
    lines = [{"text": " ".join(r), "target": f"{r[2]} {r[0]}"} for r in rows]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def wanted(table, trained):
    return [
        "--config=finetune/seq2seq.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={table}",
        f"--config.data.valid={table}",
        "--config.task.target_length=12",
        "--config.data.length=32",
        "--config.model.unroll=1",  # compiles faster
        "--config.total.steps=120",
        "--config.optim.lr=2e-2",
        "--config.eval.every.steps=60",
        "--config.checkpoint.every.steps=60",
        "--config.eval.best=auto",
    ]


@pytest.fixture(scope="module")
def finetuned(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finetuned") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}")).stderr
    # The head over the vocabulary comes from the pretrained run.
    assert "newly initialized" not in said and "parameters matched" in said
    assert "in it, not used: encoder/pooler" in said
    return workdir


def test_it_learns_and_says_its_perplexity(finetuned, capsys):
    scores = [row for row in read_rows(finetuned) if "eval/valid/lm_loss" in row]
    assert [row["step"] for row in scores] == [60, 120]
    last = {key.rpartition("/")[2]: value for key, value in scores[-1].items()}
    assert last["perplexity"] < scores[0]["eval/valid/perplexity"] < 40
    assert last["perplexity"] == pytest.approx(math.exp(last["lm_loss"]), rel=1e-4)
    assert last["accuracy"] == pytest.approx(last["lm_accuracy"]) and last["tokens"]
    best = json.loads((finetuned / "run.json").read_text())["best"]
    assert best["metric"] == "eval/valid/perplexity" and best["step"] == 120
    evaluate.main([f"--workdir={finetuned}", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["perplexity"] == pytest.approx(last["perplexity"], rel=1e-4)
    assert told["accuracy"] == pytest.approx(last["accuracy"])


def test_other_columns_and_bad_rows(finetuned, tmp_path, capsys):
    other = tmp_path / "other.tsv"
    other.write_text("a\tb\nfast slow exact\texact fast\n")
    given = [f"--workdir={finetuned}", "--json", f"--text={other}"]
    evaluate.main([*given, "--columns=a", "--label=b"])
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1
    with pytest.raises(UserError, match=r"other\.tsv: --columns: TEXT='text' is unk"):
        evaluate.main(given)
    other.write_text("text\ttarget\nfast\t\n")
    with pytest.raises(UserError, match=r"other\.tsv:2: the target is empty"):
        evaluate.main(given)


def test_texts_are_written_in_order(finetuned, table, capsys):
    """By predict, the command and Python, and for metrics that need texts."""
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    predict.main([f"--model={finetuned}", f"--input={table}", "--batch_size=5"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one.keys() for one in found] == [{"text", "score"}] * len(rows)
    right = [one["text"] == row["target"] for one, row in zip(found, rows, strict=True)]
    assert sum(right) > 8 and max(one["score"] for one in found) < 0
    model = bertjax.load(str(finetuned))
    again = model.predict([row["text"] for row in rows[:3]])
    assert [one["text"] for one in again] == [one["text"] for one in found[:3]]
    written = model.generate([row["text"] for row in rows])
    assert [one["text"] for [one] in written] == [one["text"] for one in found]
    # The metrics of an evaluation use the same texts.
    model = predict_rows.open_finetuned(str(finetuned))
    form = model.form._replace(metrics=("exact", "distinct1"))
    task_type = get_task_type("seq2seq")
    read = task_type.read(str(table), "x", form.keys())
    labelled = task_type.make_rows(read, form, model.tokenizer, True).plan(32)
    for batch_size in (5, 8):  # with other lengths of rows
        outputs = predict_rows.predict(model, labelled, batch_size)
        scores = labelled.score(outputs, np.arange(len(rows)))
        assert scores["exact"] == sum(right) / len(rows) and scores["distinct1"] < 1


@pytest.mark.parametrize(
    "objective, given, causal",
    [("clm", (), True), ("clm", ("False",), False), ("prefix", (), None)],
)
def test_a_causal_run_goes_on_causally(
    trained, wanted, monkeypatch, objective, given, causal
):
    """A clm run's config has no model key for its causal mask, so is_decoder is set."""
    opened = init_from.open_model(str(trained), "init_from")
    opened.config.objective = objective
    monkeypatch.setattr(init_from, "open_model", lambda *args: opened)
    more = [f"--config.model.is_decoder={value}" for value in given]
    assert command_line.parse([*wanted, *more]).config.model.is_decoder is causal


@pytest.mark.slow
def test_a_pseudo_masked_run_writes_and_keeps_its_best(
    command, arguments, wanted, table, tmp_path, capsys
):
    """As in UniLMv2, pmlm pretrains and sequence to sequence finetunes. The best
    checkpoint is the one with the most exact texts."""
    pretrained, workdir = tmp_path / "pmlm", tmp_path / "run"
    given = [a for a in arguments if not a.startswith("--config=")]
    given += ["--config=unilmv2.py:smoke", f"--workdir={pretrained}"]
    succeeded(command("train", *given))
    given = [a for a in wanted if not a.startswith("--config.init_from")]
    given += [f"--config.init_from={pretrained}", "--config.task.metrics=exact"]
    given += ["--config.eval.every.steps=30", "--config.checkpoint.every.steps=30"]
    said = succeeded(command("train", *given, f"--workdir={workdir}")).stderr
    assert "newly initialized" not in said and "parameters matched" in said
    rows = [row for row in read_rows(workdir) if "eval/valid/exact" in row]
    exact = {row["step"]: row["eval/valid/exact"] for row in rows}
    assert sorted(exact) == [30, 60, 90, 120] and max(exact.values()) > 0.5
    best = json.loads((workdir / "run.json").read_text())["best"]
    first = min(step for step in exact if exact[step] == max(exact.values()))
    assert (best["metric"], best["step"]) == ("eval/valid/exact", first)
    # Commands open this checkpoint and write the texts that were scored.
    evaluate.main([f"--workdir={workdir}", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["exact"]) == (first, exact[first])
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    model = bertjax.load(str(workdir))
    found = model.generate([row["text"] for row in rows])
    same = [
        one["text"] == row["target"] for [one], row in zip(found, rows, strict=True)
    ]
    assert sum(same) / len(same) == exact[first]

# SPDX-License-Identifier: Apache-2.0
"""Sequence to sequence by the commands: from a pretrained run and a table to scores."""

import json
import math

import numpy as np
import pytest
from conftest import read_rows, refused, succeeded

from bertjax.assembly import command_line, init_from

WORDS = ["clear", "useful", "simple", "fast", "exact", "wrong", "slow", "broken"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """16 texts of three words, whose targets are the last and the first of them."""
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
    # The head over the vocabulary is that of the pretrained run.
    assert "missing there" not in said and "parameters matched" in said
    assert "there and not taken: encoder/pooler" in said
    return workdir


def test_it_learns_and_says_its_perplexity(command, finetuned):
    scores = [row for row in read_rows(finetuned) if "eval/valid/lm_loss" in row]
    assert [row["step"] for row in scores] == [60, 120]
    last = {key.rpartition("/")[2]: value for key, value in scores[-1].items()}
    assert last["perplexity"] < scores[0]["eval/valid/perplexity"] < 40
    assert last["perplexity"] == pytest.approx(math.exp(last["lm_loss"]), rel=1e-4)
    assert last["accuracy"] == pytest.approx(last["lm_accuracy"]) and last["tokens"]
    best = json.loads((finetuned / "run.json").read_text())["best"]
    assert best["metric"] == "eval/valid/perplexity" and best["step"] == 120
    told = succeeded(command("evaluate", f"--workdir={finetuned}", "--json")).stdout
    told = json.loads(told)
    assert told["perplexity"] == pytest.approx(last["perplexity"], rel=1e-4)
    assert told["accuracy"] == pytest.approx(last["accuracy"])


def test_other_columns_and_bad_rows(command, finetuned, tmp_path):
    other = tmp_path / "other.tsv"
    other.write_text("a\tb\nfast slow exact\texact fast\n")
    given = f"--workdir={finetuned}", "--json", f"--text={other}"
    told = succeeded(command("evaluate", *given, "--columns=a", "--label=b")).stdout
    assert json.loads(told)["perplexity"] > 1
    refused(command("evaluate", *given), "--columns: TEXT", "'text'", "other.tsv")
    other.write_text("text\ttarget\nfast\t\n")
    refused(command("evaluate", *given), "other.tsv:2: the target is empty")


@pytest.mark.parametrize(
    "objective, given, causal",
    [("clm", (), True), ("clm", ("False",), False), ("prefix", (), None)],
)
def test_a_causal_run_goes_on_causally(
    trained, wanted, monkeypatch, objective, given, causal
):
    """No key of the model says that clm's tokens see those before them alone."""
    opened = init_from.open_model(str(trained), "init_from")
    opened.config.objective = objective
    monkeypatch.setattr(init_from, "open_model", lambda *args: opened)
    more = [f"--config.model.is_decoder={value}" for value in given]
    assert command_line.parse([*wanted, *more]).config.model.is_decoder is causal

# SPDX-License-Identifier: Apache-2.0
"""A run on code: it trains, resumes bit for bit, is scored, and completes code."""

import json
import random

import pytest
from conftest import read_rows, refused, succeeded, train_losses
from resuming import check_resuming

from bertjax import UserError, show
from bertjax.assembly import command_line, resolve

TYPES = {"count": "int", "total": "int", "name": "String", "items": "List"}


def statement(rng):
    """Make a line of code, and the ranges of its names with their types."""
    first, second = rng.sample(sorted(TYPES), 2)
    line = rng.choice([f"{first} = {second};", f"return {first}.size({second});"])
    found = []
    for name in (first, second):
        at = line.index(name)
        found.append([at, at + len(name), TYPES[name]])
    return line, sorted(found)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Synthetic code with a field of types, so that no parser is needed."""
    path, rng = tmp_path_factory.mktemp("code") / "code.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(60):
            made = [statement(rng) for _ in range(20)]
            lines, types = zip(*made, strict=True)
            file.write(json.dumps({"sentences": lines, "type": types}) + "\n")
    return path


@pytest.fixture(scope="module")
def flags(code, tmp_path_factory):
    return [
        "--config=cuglm.py:smoke",
        f"--config.data.train={code}",
        f"--config.data.valid={code}",
        f"--config.data.cache={tmp_path_factory.mktemp('stores')}",
        "--config.data.code_field=",
        "--config.data.vocab_size=300",
        "--config.model.hidden_size=32",
        "--config.model.intermediate_size=64",
        "--config.model.num_hidden_layers=1",
        "--config.total.steps=24",
        "--config.optim.lr=1e-2",
        "--config.eval.every.steps=12",
        "--config.eval.examples=16",
        "--config.checkpoint.every.steps=10",
    ]


@pytest.fixture(scope="module")
def trained(command, flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "whole"
    said = succeeded(command("train", *flags, f"--workdir={workdir}")).stderr
    assert "stream type: 3 values" in said
    assert "whole names by all of it" in said and "by what is before it" in said
    return workdir


def test_it_learns_in_two_phases_and_resumes_bit_for_bit(
    trained, command, flags, tmp_path
):
    rows = read_rows(trained)
    losses = {r["step"]: r for r in rows if "train/lm_loss" in r}
    assert losses[24]["train/lm_loss"] < 0.7 * losses[1]["train/lm_loss"]
    assert "train/nsp_loss" in losses[1] and "train/nsp_loss" not in losses[24]
    assert train_losses(trained)[-1] < train_losses(trained)[0]
    scores = next(r for r in reversed(rows) if "eval/valid/name_top5" in r)
    for what in ("token", "name", "masked_name"):
        one, five = (scores[f"eval/valid/{what}_top{k}"] for k in (1, 5))
        assert 0 <= one <= five <= 1
        assert five == scores[f"eval/valid/{what}_top5_known"]  # all bytes are known
    assert 0 < scores["eval/valid/type_accuracy"] <= 1
    check_resuming(command, flags, trained, tmp_path / "parts")


def test_completions(trained, command):
    made = succeeded(
        command(
            "generate",
            f"--model={trained}",
            "--max_new_tokens=5",
            "--json",
            "return items.size(",
            "count",
        )
    )
    outputs = [json.loads(line)["outputs"][0] for line in made.stdout.splitlines()]
    assert len(outputs) == 2 and all(0 < len(o["ids"]) <= 5 for o in outputs)
    scored = json.loads(
        succeeded(command("evaluate", f"--workdir={trained}", "--json")).stdout
    )
    assert 0 <= scored["name_top1"] <= scored["name_top5"] <= 1
    assert {"token_top1", "masked_name_top5_known"} <= scored.keys()
    refused(command("fill_mask", f"--model={trained}", "a"), "predict the next token")


@pytest.mark.slow
def test_finetuning_begins_from_a_run(trained, command, flags, tmp_path):
    again = [*flags, f"--config.init_from={trained}", "--config.phases="]
    again += ["--config.total.steps=2", f"--workdir={tmp_path / 'w'}"]
    succeeded(command("train", *again))
    first = next(r for r in read_rows(tmp_path / "w") if "train/mlm_loss" in r)
    last = next(r for r in reversed(read_rows(trained)) if "train/mlm_loss" in r)
    assert first["train/mlm_loss"] < 2 * last["train/mlm_loss"] + 1
    assert "train/nsp_loss" not in first


def test_the_recipe_is_that_of_the_article():
    made = command_line.parse(["--config=cuglm.py"]).config
    cfg = resolve.encoder_config(made, 50_000)
    assert (cfg.num_hidden_layers, cfg.hidden_size, cfg.head_dim) == (6, 516, 86)
    assert (cfg.intermediate_size, made.batch_size, made.optim.lr) == (3072, 48, 5e-5)
    first, second = resolve.wanted_phases(made)
    steps = made.total.steps * first.extent / 100
    assert steps == pytest.approx(600_000, rel=1e-3) and first.objective == "cuglm"
    assert second.objective == "" and made.objective == "cuglm:causal=1"
    assert made.data.length == 2 * 128


def test_streams_are_asked_for(command, flags, tmp_path):
    (tmp_path / "code.txt").write_text("int count = 1;\nreturn count;\n" * 40)
    none = [*flags, "--config.data.streams=", f"--workdir={tmp_path / 'w'}"]
    none += [f"--config.data.train={tmp_path / 'code.txt'}", "--config.data.valid="]
    refused(command("train", *none), "no stream `type`", "data.streams=type")


def test_files_without_a_name_are_refused(flags, tmp_path):
    pytest.importorskip("tree_sitter_java")
    (tmp_path / "A.java").write_text("}}} {{{ (((\n" * 9)
    with pytest.raises(UserError, match=r"A\.java: this code has no names"):
        show.main([*flags, f"--config.data.train={tmp_path}/*.java"])

# SPDX-License-Identifier: Apache-2.0
"""Texts and regions by the commands: trained, resumed, scored and predicted."""

import json

import numpy as np
import pytest
from conftest import read_rows, refused, succeeded
from region_data import WORDS, make_rows, write, write_image
from resuming import check_resuming

from bertjax import evaluate, predict, show


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regions")
    pieces = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    keys = {
        "data.train": write(folder / "train.jsonl", make_rows(48)),
        "data.valid": write(folder / "valid.jsonl", make_rows(16, 1)),
        "data.vocab": folder / "vocab.txt",
        "data.length": 16,
        "model.hidden_size": 32,
        "model.num_hidden_layers": 1,
        "task.max_regions": 8,
        "task.word_groups": "number:one|two",
        "total.steps": 6,
        "eval.every.steps": 3,
        "checkpoint.every.steps": 3,
    }
    return [
        "--config=regions.py:smoke",
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]


@pytest.fixture(scope="module")
def trained_on_regions(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained") / "run"
    succeeded(command("train", *wanted, f"--workdir={workdir}"))
    return workdir


def test_it_trains_and_resumes(trained_on_regions, command, wanted, tmp_path):
    rows = read_rows(trained_on_regions)
    scores = [row for row in rows if "eval/valid/mlm_loss" in row]
    assert [row["step"] for row in scores] == [3, 6]
    names = {name.rpartition("/")[2] for name in scores[1]}
    assert {"mlm_accuracy", "region_feature_loss", "region_class_loss"} <= names
    assert {"alignment_accuracy", "number_accuracy", "number_words"} <= names
    check_resuming(command, wanted, trained_on_regions, tmp_path / "run")


def test_it_is_scored_as_in_training_and_answers(trained_on_regions, capsys):
    last = read_rows(trained_on_regions)[-1]
    evaluate.main([f"--workdir={trained_on_regions}", "--json"])
    told = json.loads(capsys.readouterr().out)
    for name in ("mlm_loss", "mlm_accuracy", "region_class_loss", "number_words"):
        assert told[name] == pytest.approx(last[f"eval/valid/{name}"], rel=1e-4), name
    config = json.loads((trained_on_regions / "config.json").read_text())
    table = config["data"]["valid"]
    predict.main([f"--model={trained_on_regions}", f"--input={table}"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 16 and all(0 < one["score"] < 1 for one in found)


@pytest.mark.slow
def test_masked_words_are_read_off_regions(command, wanted, tmp_path):
    """A model that sees the regions knows the name of the object in the text; one that
    does not can only guess."""
    draw, names, rows = np.random.default_rng(0), ("one", "two", "three"), []
    for name in draw.choice(names, 400):
        thing = {"type": "circle", "color": name, "size": 20, "x_loc": 5, "y_loc": 9}
        rows.append({"sentence": f"{name} {name}", "scenes": [thing]})
    keys = {
        "data.train": write(tmp_path / "train.jsonl", rows[:300]),
        "data.valid": write(tmp_path / "valid.jsonl", rows[300:]),
        "data.corruption": "1,0,0",
        "data.mask_rate": 1.0,
        "task.region_mixture": "words=1",
        "task.word_groups": "name:one|two|three",
        "batch_size": 32,
        "optim.lr": 3e-3,
        "total.steps": 200,
        "eval.every.steps": 200,
    }
    losses = {}
    for hide in (False, True):
        workdir = tmp_path / f"run_{hide}"
        given = (f"--config.{key}={value}" for key, value in keys.items())
        hidden = f"--config.task.hide_regions={hide}"
        succeeded(command("train", *wanted, *given, hidden, f"--workdir={workdir}"))
        losses[hide] = read_rows(workdir)[-1]["eval/valid/name_loss"]
    assert losses[False] < 0.2 < 1.0 < losses[True]


def test_show_says_what_is_masked(wanted, capsys):
    show.main([*wanted, "--json", "--batches=4"])
    told = json.loads(capsys.readouterr().out)
    kinds = [told[f"rows_about_{kind}"] for kind in ("words", "regions", "pairs")]
    assert sum(kinds) == 32 and min(kinds) > 0 < told["masked_regions"]
    show.main([*wanted, "--hosts=4", "--json", "--batches=4"])
    again = json.loads(capsys.readouterr().out)
    assert again["batch_sha256"] == told["batch_sha256"]


def test_what_cannot_be_read_is_a_line(command, wanted, tmp_path):
    write_image(tmp_path / "a.npz", 2, boxes=np.ones((1, 4)))
    table = write(tmp_path / "r.jsonl", [{"sentence": "it is", "image": "a"}])
    keys = [f"--config.data.{part}={table}" for part in ("train", "valid")]
    keys.append(f"--workdir={tmp_path / 'run'}")
    refused(
        command("train", *wanted, *keys), "r.jsonl", "task.regions='scenes'", "image"
    )
    keys += ["--config.task.regions=image", "--config.task.region_size=5"]
    refused(command("train", *wanted, *keys), "a.npz", "boxes have the shape")
    assert not (tmp_path / "run/checkpoints").exists()

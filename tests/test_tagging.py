# SPDX-License-Identifier: Apache-2.0
"""Tagging by the commands: a few sentences, also long ones, memorized and predicted."""

import json

import numpy as np
import pytest
from conftest import read_rows, succeeded
from safetensors.numpy import load_file
from test_finetune import learnt_between

from bertjax import UserError, convert, evaluate, predict, train
from bertjax.training.signals import StopSignal

PEOPLE, PLACES = ["object", "method", "module"], ["import", "string", "number"]


@pytest.fixture(scope="module")
def sentences():
    """16 sentences, every fourth longer than a row; words determine the tags."""
    draw = np.random.default_rng(0)
    made = []
    for i in range(16):
        words, tags = [], []
        for _ in range(6 if i % 4 == 0 else 2):
            one, two = draw.choice(PEOPLE, 2), draw.choice(PLACES, 1)
            words += ["the", *one, "of", *two, "."]
            tags += ["O", "B-PER", "I-PER", "O", "B-LOC", "O"]
        made.append((words, tags))
    return made


@pytest.fixture(scope="module")
def columns(sentences, tmp_path_factory):
    file = tmp_path_factory.mktemp("tags") / "some.bio"
    text = ["\n".join(f"{w}\t{t}" for w, t in zip(*s, strict=True)) for s in sentences]
    file.write_text("\n\n".join(text) + "\n")
    return file


@pytest.fixture(scope="module")
def wanted(columns, trained):
    return [
        "--config=finetune/tag.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={columns}",
        f"--config.data.valid={columns}",
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
def tagger(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tagger") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}")).stderr
    assert "4 labels: O, B-LOC, B-PER, I-PER" in said
    assert "valid: 4 of 16 sentences are longer than 32" in said
    return workdir


def test_it_learns_16_sentences_by_heart(tagger):
    first, last = [r for r in read_rows(tagger) if "eval/valid/f1" in r]
    assert last["step"] == 40
    assert last["eval/valid/f1"] == last["eval/valid/accuracy"] == 1.0
    assert last["eval/valid/tag_loss"] < first["eval/valid/tag_loss"]


def test_every_parameter_changes(tagger):
    assert "tag" in learnt_between(tagger, 20, 40)


def answers(model, file, out):
    predict.main([f"--model={model}", f"--input={file}", f"--out={out}"])
    return [json.loads(line) for line in out.read_text().splitlines()]


def close(rows, others):
    """Return whether answers are equal; check that probabilities are nearly equal."""
    assert [r.pop("scores") for r in rows] == [
        pytest.approx(other["scores"], abs=1e-5) for other in others
    ]
    return rows == [{k: r[k] for k in ("tokens", "tags")} for r in others]


def test_predictions_come_in_order(tagger, sentences, columns, tmp_path):
    out = tmp_path / "out.jsonl"
    found = answers(tagger, columns, out)
    assert [(r["tokens"], r["tags"]) for r in found] == sentences
    plain, lines = tmp_path / "some.txt", tmp_path / "some.jsonl"
    plain.write_text("\n".join(["", *(" ".join(w) for w, _ in sentences[:3])]))
    rows = answers(tagger, plain, out)
    assert close(rows, [{"tokens": [], "tags": [], "scores": []}, *found[:3]])
    # A sentence alone has the same answer.
    lines.write_text(json.dumps({"tokens": sentences[1][0]}) + "\n")
    assert close(answers(tagger, lines, out), [found[1]])


def test_evaluate_tells_the_types(tagger, capsys):
    capsys.readouterr()
    evaluate.main([f"--workdir={tagger}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["f1"] == 1 and {*found["types"]} == {"PER", "LOC"}
    per = found["types"]["PER"]
    assert per == {"precision": 1, "recall": 1, "f1": 1, "support": 16 * 3}
    evaluate.main([f"--workdir={tagger}"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "PER" in line]
    assert line.split()[:3] == ["types:", "PER", "precision"] and line.endswith("48")


def test_standard_input(tagger, sentences, pipe, capsys):
    words = sentences[1][0]
    wanted = {"tokens": words, "tags": sentences[1][1]}
    for given in (
        " ".join(words),
        (" ".join(words) + "\n").encode("utf-8-sig"),
        "".join(f"{word}\t_\n" for word in words),  # with tabs: one word per line
        json.dumps({"tokens": words}),
    ):
        pipe(given)
        capsys.readouterr()
        predict.main([f"--model={tagger}", "--input=-"])
        found = json.loads(capsys.readouterr().out)
        assert min(found.pop("scores")) > 0.3 and found == wanted
    pipe("")
    with pytest.raises(UserError, match="--input=-: there are no rows"):
        predict.main([f"--model={tagger}", "--input=-"])


def test_for_transformers(tagger, sentences, tmp_path):
    convert.main([f"--from={tagger}", f"--to={tmp_path / 'hf'}", "--format=hf"])
    told = json.loads((tmp_path / "hf/config.json").read_text())
    assert told["architectures"] == ["BertForTokenClassification"]
    assert [*told["id2label"].values()] == ["O", "B-LOC", "B-PER", "I-PER"]
    weights = load_file(tmp_path / "hf/model.safetensors")
    assert weights["classifier.weight"].shape[0] == 4
    some, out = tmp_path / "some.jsonl", tmp_path / "out.jsonl"
    tokens = [words for words, _ in sentences if len(words) < 20]
    some.write_text("".join(json.dumps({"tokens": t}) + "\n" for t in tokens))
    assert answers(tmp_path / "hf", some, out) == answers(tagger, some, out)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("task.label=3", ["some.bio:1", "task.label=3", "2 columns"]),
        ("task.labels=O,B-PER", ["some.bio:3", "task.labels", "I-PER"]),
        ("task.metrics=matthews", ["task.metrics='matthews'", "precision"]),
    ],
)
def test_what_training_refuses(wanted, tmp_path, monkeypatch, argument, words):
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    given = [*wanted, f"--config.{argument}", f"--workdir={tmp_path / 'w'}"]
    with pytest.raises(UserError) as e:
        train.main(given)
    assert all(word in str(e.value) for word in words), e.value
    assert not (tmp_path / "w").exists()

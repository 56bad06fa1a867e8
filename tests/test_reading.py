# SPDX-License-Identifier: Apache-2.0
"""From texts to answers by the commands: an index, found passages, a reader, and
another index."""

import json
import shutil

import numpy as np
import pytest
from conftest import read_rows, succeeded
from resuming import check_resuming

from bertjax import UserError, convert, embed, evaluate, predict, train
from bertjax.tasks import passage_index

THINGS = ["import", "string", "number", "object", "method", "module", "class", "list"]
VALUES = ["value", "name", "type", "function", "file", "code", "error", "return"]
OTHERS = ["statement", "expression", "attribute", "argument"]
OTHERS += ["variable", "exception", "keyword", "operator"]


def corpus(values):
    texts = (
        f"the {thing} has the {value} in it"
        for thing, value in zip(THINGS, values, strict=True)
    )
    rows = [{"_id": f"p{i}", "title": "", "text": text} for i, text in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained):
    """Two indexes of the same passages with different values, questions, and the
    passages found in the first index."""
    folder = tmp_path_factory.mktemp("reading")
    for name, values in (("one", VALUES), ("two", OTHERS)):
        text = folder / f"{name}.jsonl"
        text.write_text(corpus(values))
        given = [f"--model={trained}", f"--text={text}", f"--index={folder / name}"]
        assert embed.main(given) == 0
    asked = [
        {"id": f"q{i}", "question": f"what has the {thing}", "answers": [value]}
        for i, (thing, value) in enumerate(zip(THINGS, VALUES, strict=True))
    ]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    given = [f"--model={trained}", f"--index={folder}/one", f"--input={questions}"]
    assert predict.main([*given, f"--out={folder}/found.jsonl", "--passages=8"]) == 0
    return folder


@pytest.fixture(scope="module")
def wanted(folder, trained):
    return [
        "--config=finetune/read.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={folder}/found.jsonl",
        f"--config.data.valid={folder}/found.jsonl",
        f"--config.task.index={folder}/one",
        "--config.task.question_length=8",
        "--config.task.passages=4",
        "--config.data.length=32",
        "--config.batch_size=8",
        "--config.total.steps=60",
        "--config.optim.lr=3e-3",
        "--config.optim.wd=0",
        "--config.eval.every.steps=30",
        "--config.checkpoint.every.steps=30",
        "--config.log.every.steps=10",
    ]


@pytest.fixture(scope="module")
def reader(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("reader") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}")).stderr
    assert "8 questions, each with 4 passages" in said
    assert "8 questions, each with 8 passages" in said
    return workdir


def test_found_passages(folder):
    lines = [json.loads(line) for line in (folder / "found.jsonl").open()]
    assert [line["answers"] for line in lines] == [[value] for value in VALUES]
    for line in lines:
        scores = [passage["score"] for passage in line["ctxs"]]
        assert len(scores) == 8 and scores == sorted(scores, reverse=True)
        assert {"id", "title", "text", "score"} == line["ctxs"][0].keys()


def test_reader_and_retriever_learn(reader):
    rows = read_rows(reader)
    scores = [row for row in rows if "eval/valid/exact" in row]
    assert [row["step"] for row in scores] == [30, 60]
    assert scores[-1]["eval/valid/exact"] > 0.7
    assert scores[-1]["eval/valid/exact"] >= scores[-1]["eval/valid/exact@1"]
    train_rows = [row for row in rows if "train/read_loss" in row]
    assert train_rows[-1]["train/read_loss"] < train_rows[0]["train/read_loss"] / 3
    found = [row["train/read_retrieved"] for row in train_rows]
    assert found[-1] > found[0] + 0.2


def answers(reader, index, folder, *more):
    out = folder / "answers.jsonl"
    given = [f"--model={reader}", f"--index={folder / index}", f"--out={out}"]
    assert predict.main([*given, f"--input={folder}/questions.jsonl", *more]) == 0
    return [json.loads(line) for line in out.open()]


def test_an_empty_question_is_told_of(reader, folder, tmp_path, capsys):
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"id": "blank", "question": " "}\n', "utf-8")
    given = [f"--model={reader}", f"--index={folder}/one", f"--input={asked}"]
    assert predict.main(given) == 0
    said = capsys.readouterr()
    assert "1 empty question, kept: blank" in said.err
    assert json.loads(said.out)["id"] == "blank"


def test_another_index_gives_other_answers(reader, folder):
    one, two = (answers(reader, index, folder) for index in ("one", "two"))
    for rows, values in ((one, VALUES), (two, OTHERS)):
        for row, value in zip(rows, values, strict=True):
            best = row["passages"][0]
            assert row["answer"] in best["text"]
            if best["id"] == f"p{row['id'][1:]}":
                assert row["answer"] == value
    right = [row["answer"] == value for row, value in zip(one, VALUES, strict=True)]
    assert sum(right) >= 6, [row["answer"] for row in one]
    # Only the index differs.
    assert sum(row["answer"] in OTHERS for row in two) >= 6
    row = one[0]
    assert row["id"] == "q0" and row["question"] == "what has the import"
    best = row["passages"][0]
    assert {"id", "title", "text", "score", "log_prob", "answer"} <= best.keys()
    assert best["answer"] == row["answer"] and best["answer_score"] == row["score"]
    assert sum(np.exp([p["log_prob"] for p in row["passages"]])) == pytest.approx(1)
    # Without --passages it reads task.candidates passages: here all 8 of the index.
    (found,) = {len(row["passages"]) for row in answers(reader, "one", folder)}
    assert found == 8
    alone = answers(reader, "one", folder, "--passages=1")
    assert all(len(row["passages"]) == 1 for row in alone)


def test_resuming_is_exact(command, wanted, reader, folder, tmp_path):
    check_resuming(command, wanted, reader, tmp_path / "again")


def test_a_run_goes_on_with_its_own_index(wanted, reader, folder, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(reader, again)
    index, kept = folder / "one", tmp_path / "kept"
    shutil.copytree(index, kept)
    vectors = np.load(index / "vectors.npy")
    np.save(index / "vectors.npy", -vectors)
    passage_index.seal(index, {})
    try:
        with pytest.raises(UserError, match="train"):
            train.main([*wanted, f"--workdir={again}"])
    finally:
        shutil.copytree(kept, index, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threshold=1"], "--threshold has no effect with --index"),
        (["--index={}/none"], "none is not an index"),
        (["--index="], "--passages needs --index=DIR"),
    ],
)
def test_what_predict_refuses(trained, folder, flags, words):
    given = [f"--model={trained}", f"--input={folder}/questions.jsonl", "--passages=2"]
    given += [f"--index={folder}/one", *(x.format(folder) for x in flags)]
    with pytest.raises(UserError, match=words):
        predict.main(given)


def test_an_index_of_another_model(reader, folder, trained, tmp_path):
    other = tmp_path / "other"
    text = f"--text={folder}/one.jsonl"
    assert embed.main([f"--model={reader}", text, f"--index={other}"]) == 0
    asked = [f"--index={other}", f"--input={folder}/questions.jsonl"]
    with pytest.raises(UserError) as e:
        predict.main([f"--model={trained}", *asked])
    words = (
        f"vectors of another model than --model={trained}: it was made by {reader} ("
    )
    assert words in str(e.value) and "\n" not in str(e.value)
    found = [*asked, f"--out={tmp_path}/found.jsonl"]
    assert predict.main([f"--model={reader}", *found]) == 0  # made by this model


def test_a_retriever_finds_what_the_reader_compares(reader, folder, trained, tmp_path):
    """With --retriever too the reader scores passages by its own vectors."""
    assert len(answers(reader, "one", folder, f"--retriever={trained}")) == len(VALUES)
    early, other = reader / "checkpoints" / "30", tmp_path / "other"
    text = f"--text={folder}/one.jsonl"
    assert embed.main([f"--model={early}", text, f"--index={other}"]) == 0
    with pytest.raises(UserError, match=rf"another model than --model={reader}: "):
        answers(reader, other, folder, f"--retriever={early}")


def test_a_reader_with_more_words_keeps_its_index(reader, folder, tmp_path):
    words, more = tmp_path / "words.txt", tmp_path / "more"
    words.write_text("zebra\n")
    given = [f"--from={reader}", f"--to={more}", f"--add_words={words}"]
    assert convert.main(given) == 0
    assert len(answers(more, "one", folder)) == len(VALUES)


def test_a_run_begins_from_the_model_of_its_index(
    wanted, reader, folder, trained, tmp_path
):
    given, other = [x for x in wanted if "init_from" not in x], tmp_path / "other"
    text = f"--text={folder}/one.jsonl"
    assert embed.main([f"--model={reader}", text, f"--index={other}"]) == 0
    with pytest.raises(UserError, match=r"task.index=.*another model than init_from="):
        index = [f"--config.task.index={other}", f"--config.init_from={trained}"]
        train.main([*given, *index, f"--workdir={tmp_path}/run"])


def test_an_index_that_names_no_model(folder, trained, tmp_path, capsys):
    """An index of an older version works, with a warning."""
    old = tmp_path / "old"
    shutil.copytree(folder / "one", old)
    facts = json.loads((old / "index.json").read_text())
    del facts["model"]
    (old / "index.json").write_text(json.dumps(facts))
    asked = [f"--input={folder}/questions.jsonl", f"--out={tmp_path}/found.jsonl"]
    capsys.readouterr()
    assert predict.main([f"--model={trained}", f"--index={old}", *asked]) == 0
    said = capsys.readouterr().err
    assert said.count("does not say which model made its vectors") == 1


def test_evaluate_says_what_training_said(reader, capsys):
    capsys.readouterr()
    evaluate.main([f"--workdir={reader}", "--json"])
    scores = json.loads(capsys.readouterr().out)
    last = read_rows(reader)[-1]
    for name in ("exact", "f1", "exact@1", "exact@5"):
        assert scores[name] == pytest.approx(last[f"eval/valid/{name}"])


def test_what_embed_refuses(trained, folder):
    given = [f"--model={trained}", f"--text={folder}/one.jsonl"]
    with pytest.raises(UserError, match="either --out or --index"):
        embed.main(given)
    with pytest.raises(UserError, match="is an index already"):
        embed.main([*given, f"--index={folder}/one"])
    with pytest.raises(UserError, match="has files and is not an index: name another"):
        embed.main([*given, f"--index={folder}"])
    with pytest.raises(UserError, match="--width has no effect with --index"):
        embed.main([*given, f"--index={folder}/new", "--width=8"])

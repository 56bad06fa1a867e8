# SPDX-License-Identifier: Apache-2.0
"""RAG by the commands: passages are found, targets learned, texts have sources."""

import json
import shutil

import pytest
from conftest import read_rows, succeeded
from resuming import check_resuming, without_last

from bertjax import UserError, embed, evaluate, generate, predict, train
from bertjax.checkpoints.manager import restore_params
from bertjax.inference import open_book

THINGS = ["import", "string", "number", "object", "method", "module", "class", "list"]
VALUES = ["value", "name", "type", "function", "file", "code", "error", "return"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained):
    """Two indexes whose passages have different values, questions, and the passages
    found in the first index."""
    folder = tmp_path_factory.mktemp("rag")
    for name, values in (("one", VALUES), ("two", [*VALUES[4:], *VALUES[:4]])):
        rows = [
            {"_id": thing, "text": f"{thing} : {value}"}
            for thing, value in zip(THINGS, values, strict=True)
        ]
        text = folder / f"{name}.jsonl"
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"--model={trained}", f"--text={text}", f"--index={folder / name}"]
        assert embed.main(given) == 0
    asked = [
        {"question": thing, "answers": [value]}
        for thing, value in zip(THINGS, VALUES, strict=True)
    ]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    given = [f"--model={trained}", f"--index={folder}/one", f"--input={questions}"]
    assert predict.main([*given, f"--out={folder}/found.jsonl", "--passages=3"]) == 0
    return folder


@pytest.fixture(scope="module")
def wanted(folder, trained):
    return [
        "--config=finetune/rag.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={folder}/found.jsonl",
        f"--config.data.valid={folder}/found.jsonl",
        "--config.task.target_length=3",
        "--config.task.passages=2",
        "--config.task.marginal=token",
        "--config.data.length=16",
        "--config.batch_size=8",
        "--config.total.steps=60",
        "--config.optim.lr=1e-2",
        "--config.eval.every.steps=30",
        "--config.checkpoint.every.steps=30",
    ]


@pytest.fixture(scope="module")
def generator(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("generator") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}")).stderr
    assert "8 questions, each with 2 passages" in said
    assert "newly initialized" not in said  # the head is the run's
    return workdir


def test_it_learns(generator):
    rows = read_rows(generator)
    losses = [row["train/rag_loss"] for row in rows if "train/rag_loss" in row]
    assert losses[-1] < losses[0] / 2
    scores = [row for row in rows if "eval/valid/exact" in row]
    assert [row["step"] for row in scores] == [30, 60]
    assert (
        scores[-1]["eval/valid/perplexity"] < scores[0]["eval/valid/perplexity"] * 1.5
    )
    assert scores[-1]["eval/valid/exact"] >= 0.25


def test_texts_have_sources(generator, folder, trained, capsys):
    given = [f"--model={generator}", f"--retriever={trained}", "--json"]
    answers = []
    for index in ("one", "two"):
        capsys.readouterr()
        assert generate.main([*given, f"--index={folder / index}", *THINGS]) == 0
        lines = capsys.readouterr().out.splitlines()
        answers.append([json.loads(line) for line in lines])
    one, two = answers
    assert [row["prompt"] for row in one] == THINGS
    assert one[0]["passages"][0].keys() == {"id", "title", "text", "score"}
    assert len(one[0]["passages"]) == 2
    changed = [a["outputs"] != b["outputs"] for a, b in zip(one, two, strict=True)]
    assert sum(changed) >= 4  # only the index differs
    # predict answers the same.
    out = folder / "answers.jsonl"
    more = [
        f"--index={folder}/one",
        f"--out={out}",
        f"--input={folder}/questions.jsonl",
    ]
    predict.main([*given[:2], *more])
    rows = [json.loads(line) for line in out.open()]
    assert [r["text"] for r in rows] == [r["outputs"][0]["text"] for r in one]


def test_resuming_is_exact(command, wanted, generator, tmp_path):
    check_resuming(command, wanted, generator, tmp_path / "again")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature=2"], "--temperature has no effect with --index"),
        ([], "give --retriever=DIR"),
        (["--index=", "--passages=2"], "--passages needs --index=DIR"),
    ],
)
def test_what_generate_refuses(generator, folder, flags, words):
    given = [f"--model={generator}", f"--index={folder}/one", *flags, "list"]
    with pytest.raises(UserError, match=words):
        generate.main(given)


def test_generate_refuses_a_model_that_writes_nothing(trained, folder, monkeypatch):
    monkeypatch.setattr(open_book, "find_passages", None)  # it must not search
    with pytest.raises(UserError, match="which writes no texts"):
        generate.main([f"--model={trained}", f"--index={folder}/one", "list"])


# ---------------------------------------------------------------- found in the step
@pytest.fixture(scope="module")
def searches(wanted, folder):
    """Flags of a run whose rows have no passages; each step searches for them."""
    kept = [x for x in wanted if "data.train" not in x and "data.valid" not in x]
    rows = [f"--config.data.{x}={folder}/questions.jsonl" for x in ("train", "valid")]
    more = ["--config.task.question_length=4", f"--config.task.index={folder}/one"]
    return [*kept, *rows, *more]


@pytest.fixture(scope="module")
def searching(command, searches, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("searching") / "run"
    said = succeeded(command("train", *searches, f"--workdir={workdir}")).stderr
    assert "8 questions, each with 2 of 8 passages of" in said
    return workdir


def test_it_learns_by_what_its_steps_find(searching):
    rows = read_rows(searching)
    losses = [row["train/rag_loss"] for row in rows if "train/rag_loss" in row]
    assert losses[-1] < losses[0] / 2
    (last,) = [row for row in rows if row["step"] == 60 and "eval/valid/exact" in row]
    assert last["eval/valid/exact"] >= 0.25


def test_resuming_a_searching_run_is_exact(
    command, searches, searching, folder, tmp_path
):
    """The index may have moved."""
    moved = shutil.copytree(folder / "one", tmp_path / "moved")
    given = [*searches, f"--config.task.index={moved}"]
    check_resuming(command, given, searching, tmp_path / "again")
    # Checkpoints do not store the index.
    assert "tables" not in restore_params(searching / "checkpoints/60")


def test_another_index_is_another_run(searches, searching, folder, tmp_path):
    again = without_last(searching, tmp_path / "again")
    given = [*searches, f"--config.task.index={folder}/two", f"--workdir={again}"]
    for more in ([], ["--allow_config_change"]):
        with pytest.raises(UserError, match=r"data\.train or task\.index: the"):
            train.main([*given, *more])


def test_its_model_answers_by_any_index_and_by_its_own(searching, folder, capsys):
    """It embeds the questions itself, without another retriever."""
    answers = []
    for index in ("one", "two"):
        capsys.readouterr()
        given = [f"--model={searching}", f"--index={folder / index}", "--json"]
        assert generate.main([*given, *THINGS]) == 0
        lines = capsys.readouterr().out.splitlines()
        answers.append([json.loads(line) for line in lines])
    changed = [a["outputs"] != b["outputs"] for a, b in zip(*answers, strict=True)]
    assert sum(changed) >= 4
    out = folder / "searched.jsonl"
    given = [f"--model={searching}", f"--input={folder}/questions.jsonl"]
    assert predict.main([*given, f"--out={out}"]) == 0
    rows = [json.loads(line) for line in out.open()]
    for row, other in zip(rows, answers[0], strict=True):
        assert row["text"] == other["outputs"][0]["text"]
        named = [[p["id"] for p in x["passages"]] for x in (row, other)]
        assert named[0] == named[1] and len(named[0]) == 2
    capsys.readouterr()
    evaluate.main([f"--workdir={searching}", "--json"])
    scores = json.loads(capsys.readouterr().out)
    last = read_rows(searching)[-1]
    for name in ("perplexity", "exact", "f1"):
        assert scores[name] == pytest.approx(last[f"eval/valid/{name}"], rel=1e-4)


def test_a_refreshed_index_has_whole_passages(searching, tmp_path, capsys):
    """Its passages are not truncated at the model's question length."""
    text, index = tmp_path / "texts.txt", tmp_path / "index"
    text.write_text("value name type function file code\n")
    capsys.readouterr()
    given = [f"--model={searching}", f"--text={text}", f"--index={index}"]
    assert embed.main(given) == 0
    assert " cut at " not in capsys.readouterr().err
    assert json.loads((index / "index.json").read_text())["how"]["longest"] == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--config.task.text_pair=ctxs"],
            "task.text_pair=ctxs names passages of rows",
        ),
        (["--config.task.pooling=last"], "task.pooling"),
        (["--config.data.length=8"], "data.length=8 is too short"),
        (
            [
                "--config.init_from=",
                "--config.model.hidden_size=32",
                "--config.data.vocab={}",
            ],
            "begin from the model that made them",
        ),
    ],
)
def test_what_a_searching_run_refuses(searches, trained, tmp_path, flags, words):
    flags = [x.format(trained / "tokenizer") for x in flags]
    with pytest.raises(UserError, match=words):
        train.main([*searches, *flags, f"--workdir={tmp_path}/run"])

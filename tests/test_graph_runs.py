# SPDX-License-Identifier: Apache-2.0
"""Knowledge graphs by the commands: trained, resumed, queried, scored, refused."""

import json
import shutil

import pytest
from conftest import read_rows, refused, succeeded
from resuming import check_resuming, without_last

from bertjax import UserError, embed, evaluate, predict, show

SMALL = [
    "--config.batch_size=4",
    "--config.data.length=24",
    "--config.model.num_hidden_layers=1",
    "--config.model.hidden_size=32",
    "--config.log.every.steps=1",
]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Towns that are capitals of countries; where every other one lies is held out."""
    folder = tmp_path_factory.mktemp("graph")
    train, valid, names = [], [], []
    for i in range(12):
        train.append((f"t{i}", "capital_of", f"c{i}"))
        (valid if i % 2 else train).append((f"t{i}", "lies_in", f"c{i}"))
        names += [(f"t{i}", f"town {i}", "a place"), (f"c{i}", f"land {i}")]
    names.append(("x", "nothing"))
    for name, rows in (("train", train), ("valid", valid), ("names", names)):
        lines = ["\t".join(row) + "\n" for row in rows]
        (folder / f"{name}.tsv").write_text("".join(lines))
    return folder


def arguments(graph, steps=12):
    return [
        "--config=coke.py:smoke",
        f"--config.data.train={graph}/train.tsv",
        f"--config.data.valid={graph}/valid.tsv",
        f"--config.data.entities={graph}/names.tsv",
        f"--config.total.steps={steps}",
        "--config.task.paths=2",
        "--config.eval.every.steps=6",
        "--config.checkpoint.every.steps=6",
        "--config.eval.best=mrr",
        *SMALL,
    ]


@pytest.fixture(scope="module")
def completer(command, graph, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("completer") / "run"
    said = succeeded(command("train", *arguments(graph), f"--workdir={workdir}"))
    assert "1 id described that occur in no triple" in said.stderr
    assert "is the best by eval/valid/mrr" in said.stderr
    return workdir


def test_it_resumes_bit_for_bit(command, graph, completer, tmp_path):
    """The files may have moved."""
    moved = shutil.copytree(graph, tmp_path / "moved")
    check_resuming(command, arguments(moved), completer, tmp_path / "parts")


def test_other_names_are_another_run(command, graph, completer, tmp_path):
    again = without_last(completer, tmp_path / "again")
    names = (graph / "names.tsv").read_text().replace("town 1", "city 1", 1)
    (tmp_path / "other.tsv").write_text(names)
    given = [*arguments(graph), f"--config.data.entities={tmp_path}/other.tsv"]
    ended = command("train", *given, f"--workdir={again}")
    refused(ended, "data.train or data.entities: the text")


def test_evaluate_gives_what_the_run_did(completer, capsys):
    evaluate.main([f"--workdir={completer}", "--step=12", "--json"])
    scores = json.loads(capsys.readouterr().out)
    row = [r for r in read_rows(completer) if "eval/valid/mrr" in r][-1]
    names = {"mrr", "hits@1", "hits@3", "hits@10", "mean_rank", "mrr_optimistic"}
    for name in names | {"mrr_pessimistic"}:
        assert scores[name] == pytest.approx(row[f"eval/valid/{name}"], rel=1e-5)
    assert scores["sides"].keys() == {"head", "tail"}


def test_texts_have_no_vectors(completer, tmp_path):
    """Embedding texts is refused, as all their tokens would be unknown."""
    (tmp_path / "a.txt").write_text("a text\n")
    given = [f"--model={completer}", f"--text={tmp_path / 'a.txt'}"]
    with pytest.raises(UserError, match=r"run.* reads triples of a graph"):
        embed.main([*given, f"--index={tmp_path / 'index'}"])


def test_answers_have_names(completer, tmp_path, capsys):
    queries = tmp_path / "queries.tsv"
    queries.write_text("t1\tlies_in\t?\n?\tcapital_of\tland 3\n")
    predict.main([f"--model={completer}", f"--input={queries}"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        likely = [one["probability"] for one in row["entities"]]
        assert likely == sorted(likely, reverse=True) and sum(likely) <= 1 + 1e-6
        assert {one["name"].split()[0] for one in row["entities"]} <= {"town", "land"}
        assert all(one["id"][0] in "tc" for one in row["entities"])
    from bertjax import load

    asked = [{"head": "t1", "relation": "lies_in"}]
    (again,) = load(str(completer)).predict(asked)
    assert [e["id"] for e in again["entities"]] == [
        e["id"] for e in rows[0]["entities"]
    ]


@pytest.mark.parametrize(
    "line, words",
    [
        ("t1\tlies_in\tc1\n", "q.tsv:1: write ? in place"),
        ("t1\tlies_at\t?\n", "'lies_at' .* did you mean 'lies_in'"),
        ("x\tlies_in\t?\n", "the entity 'x'"),
        ("t1 lies_in ?\n", "q.tsv:1: a triple is"),
    ],
)
def test_what_cannot_be_asked_is_refused(completer, tmp_path, line, words):
    (tmp_path / "q.tsv").write_text(line)
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        predict.main([f"--model={completer}", f"--input={tmp_path}/q.tsv"])


def test_show_says_what_is_asked(graph, capsys):
    show.main([*arguments(graph), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sets"]["train"]["queries"]["of triples"] == 36
    assert found["examples"][0]["query 1"].count("[MASK]") == 1


@pytest.mark.parametrize(
    "more, words",
    [
        (["--config.data.vocab=ids:50"], ["data.vocab", "leave it out"]),
        (["--config.task.disambiguate=3"], ["task.disambiguate", "objective=mlmlm"]),
        (["--config.objective=complete:gold=0"], ["gold"]),
        (["--config.data.entities=no.tsv"], ["data.entities=no.tsv"]),
        (["--config.task.text=a"], ["task.text=a", "'head'"]),
    ],
)
def test_what_does_not_go_together_is_refused(command, graph, tmp_path, more, words):
    given = [*arguments(graph), *more, f"--workdir={tmp_path}/run"]
    refused(command("train", *given), *words)
    assert not (tmp_path / "run").exists()


def test_names_are_of_triples_alone(command, graph, tmp_path):
    given = "--config=bert.py:smoke", f"--config.data.entities={graph}/names.tsv"
    refused(command("train", *given, f"--workdir={tmp_path}/run"), "data.entities")


def test_a_masked_lm_spells_entities(command, graph, vocabulary, tmp_path, capsys):
    """In MLMLM an entity that is in no triple can be queried by its name."""
    workdir = tmp_path / "speller"
    shared = [a for a in arguments(graph, 4) if "paths" not in a and "=coke" not in a]
    given = ["--config=mlmlm.py:smoke", *shared, f"--config.data.vocab={vocabulary}"]
    given += ["--config.eval.every.steps=4", "--config.task.disambiguate=2"]
    given += ["--config.data.length=32"]
    said = succeeded(command("train", *given, f"--workdir={workdir}")).stderr
    assert "candidates entities (24), relations (2)" in said
    row = [r for r in read_rows(workdir) if "eval/valid/mrr" in r][-1]
    assert 0 < row["eval/valid/mrr"] <= 1
    evaluate.main([f"--workdir={workdir}", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["mrr"] == pytest.approx(row["eval/valid/mrr"], rel=1e-4)
    (tmp_path / "q.tsv").write_text("town 5\tlies_in\t?\na new town\tlies_in\t?\n")
    predict.main([f"--model={workdir}", f"--input={tmp_path}/q.tsv"])
    found = capsys.readouterr()
    assert "1 entity in no training triple from: a new town\n" in found.err
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {e["name"].split()[0] for e in row["entities"]} <= {"town", "land"}
        assert all(0 <= e["probability"] <= 1 for e in row["entities"])

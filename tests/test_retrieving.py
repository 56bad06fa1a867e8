# SPDX-License-Identifier: Apache-2.0
"""Retrieval by the commands: pairs memorized, searched, exported, refused."""

import json

import numpy as np
import pytest
from conftest import read_rows, succeeded
from test_finetune import learnt_between

from bertjax import UserError, convert, embed, evaluate, predict, train
from bertjax.training.signals import StopSignal

WORDS = ["import", "string", "number", "object", "method", "module", "class", "list"]
WORDS += ["value", "name", "type", "function", "file", "code", "error", "return"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set in BEIR's layout; a word determines which passage answers."""
    folder = tmp_path_factory.mktemp("collection")
    (folder / "qrels").mkdir()
    corpus, queries, grades = [], [], ["query-id\tcorpus-id\tscore"]
    for i, word in enumerate(WORDS):
        text = f"this is about the {word} and more"
        corpus.append({"_id": f"p{i}", "title": "", "text": text})
        queries.append({"_id": f"q{i}", "text": f"what is the {word} ?"})
        grades.append(f"q{i}\tp{i}\t1")
        grades.append(f"q{i}\tp{(i + 1) % len(WORDS)}\t0")
    for name, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "qrels/train.tsv").write_text("\n".join(grades) + "\n")
    (folder / "qrels/dev.tsv").write_text("\n".join(grades[:17]) + "\n")
    return folder


@pytest.fixture(scope="module")
def wanted(folder, trained):
    return [
        "--config=finetune/retrieve.py:smoke",
        f"--config.init_from={trained}",
        f"--config.data.train={folder}",
        f"--config.data.valid={folder}",
        "--config.data.length=16",
        "--config.model.unroll=1",  # compiles faster
        "--config.batch_size=16",
        "--config.total.steps=60",
        "--config.optim.lr=3e-3",
        "--config.optim.wd=0",
        "--config.eval.every.steps=30",
        "--config.checkpoint.every.steps=30",
    ]


@pytest.fixture(scope="module")
def retriever(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("retriever") / "run"
    said = succeeded(command("train", *wanted, f"--workdir={workdir}")).stderr
    assert "16 queries, 16 passages, 16 answers, 16 given negatives" in said
    return workdir


def test_it_learns_pairs_by_heart(retriever):
    rows = read_rows(retriever)
    scores = [r for r in rows if "eval/valid/recall@1" in r]
    assert [r["step"] for r in scores] == [30, 60]
    assert scores[-1]["eval/valid/recall@1"] > 0.8
    assert scores[-1]["eval/valid/ndcg@10"] > 0.9
    assert "eval/valid/retrieve_loss" not in scores[-1]
    losses = [r["train/retrieve_loss"] for r in rows if "train/retrieve_loss" in r]
    assert losses[-1] < losses[0] / 3


def test_every_parameter_changes(retriever):
    assert learnt_between(retriever, 30, 60).keys() == {"encoder"}


def test_its_vectors_are_searched(retriever, folder, tmp_path, capsys):
    evaluate.main([f"--workdir={retriever}", "--json"])
    said = json.loads(capsys.readouterr().out)
    last = read_rows(retriever)[-1]
    assert said["step"] == 60 and said["queries"] == 8 and said["passages"] == 16
    for name in ("ndcg@10", "mrr@10", "recall@1", "recall@100"):
        assert said[name] == pytest.approx(last[f"eval/valid/{name}"])
    assert 0 <= said.get("mrr@10_ci95", 0) < 1
    # Score all queries with the exported model, and compare with `embed`'s vectors.
    hf = tmp_path / "hf"
    convert.main([f"--from={retriever}", f"--to={hf}", "--format=hf"])
    grades = folder / "qrels/train.tsv"
    model = [f"--model={hf}", "--what=retrieval", f"--text={grades}"]
    capsys.readouterr()
    evaluate.main([*model, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["queries"] == 16 and found["recall@1"] > 0.8
    vectors = []
    for i, kind in enumerate(("queries", "corpus")):
        lines = [json.loads(x)["text"] for x in (folder / f"{kind}.jsonl").open()]
        (tmp_path / "lines.txt").write_text("\n".join(lines))
        out = tmp_path / f"{i}.npy"
        source = (retriever, hf)[i]
        embed.main(
            [f"--model={source}", f"--text={tmp_path}/lines.txt", f"--out={out}"]
        )
        vectors.append(np.load(out))
    assert ", of length 1" in capsys.readouterr().err
    best = (vectors[0] @ vectors[1].T).argmax(1)
    assert np.mean(best == np.arange(16)) == found["recall@1"]
    modules = json.loads((hf / "modules.json").read_text())
    assert [m["type"].rpartition(".")[2] for m in modules] == [
        *("Transformer", "Pooling", "Normalize")
    ]
    limits = json.loads((hf / "sentence_bert_config.json").read_text())
    assert limits["max_seq_length"] == 16


def test_any_model_is_scored(trained, folder, capsys):
    text = f"--text=all={folder}/qrels/train.tsv,dev={folder}/qrels/dev.tsv"
    evaluate.main([f"--model={trained}", "--what=retrieval", text])
    said = capsys.readouterr().out
    assert "all at step 12:" in said and "dev at step 12:" in said
    assert "recall@100" in said and "ndcg@10_ci95" in said


def test_columns_of_pairs(trained, tmp_path, capsys):
    table = tmp_path / "pairs.tsv"
    rows = [f"what is {word}\tthe {word} statement" for word in ("if", "for", "try")]
    table.write_text("\n".join(["ask\tanswer", *rows]) + "\n")
    given = [f"--model={trained}", "--what=retrieval", f"--text={table}"]
    evaluate.main([*given, "--columns=ask,answer", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["queries"], found["passages"]) == (3, 3)
    with pytest.raises(UserError, match=r"pairs\.tsv: --columns: QUERY='query' is unk"):
        evaluate.main(given)
    with pytest.raises(UserError, match="--columns=ask has 1 name: give two, QUERY,"):
        evaluate.main([*given, "--columns=ask"])


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("accumulate=2", ["accumulate=2", "negatives", "batch_size=8"]),
        ("eval.examples=5", ["eval.examples=5", "all passages"]),
        ("task.pooling=man", ["did you mean 'mean'"]),
        ("task.metrics=recall@3", ["task.metrics='recall@3'", "recall@5"]),
        ("task.temperature=0", ["task.temperature=0"]),
        ("data.valid={}/corpus", ["data.valid", "corpus"]),
        ("data.train=a={0},b={0}", ["data.train", "is a mixture"]),
    ],
)
def test_what_training_refuses(wanted, folder, tmp_path, monkeypatch, argument, words):
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    given = f"--config.{argument.format(folder)}"
    with pytest.raises(UserError) as e:
        train.main([*wanted, given, f"--workdir={tmp_path / 'w'}"])
    assert all(word in str(e.value) for word in words), e.value
    assert not (tmp_path / "w").exists()


def test_what_others_refuse(retriever, trained, folder):
    with pytest.raises(UserError, match=r"makes vectors, which bertjax\.embed gives"):
        predict.main([f"--model={retriever}", "--input=-"])
    with pytest.raises(UserError, match=r"neither qrels/test.tsv nor qrels.tsv"):
        evaluate.main([f"--model={trained}", "--what=retrieval", f"--text={folder}"])
    with pytest.raises(UserError, match="--what=retrieval needs --text=FOLDER"):
        evaluate.main([f"--model={trained}", "--what=retrieval"])
    with pytest.raises(UserError, match="--rates has no effect with --what=retrieval"):
        evaluate.main([f"--model={trained}", "--what=retrieval", "--rates=0.1"])

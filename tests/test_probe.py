# SPDX-License-Identifier: Apache-2.0
"""Probing by the command: from a table, tagged words or spans to scores of layers."""

import json

import pytest
from conftest import refused, succeeded

from bertjax import UserError, probe
from bertjax.probing import probe_table

GOOD, BAD = (
    ["clear", "useful", "simple", "fast", "exact"],
    ["wrong", "slow", "broken", "bad", "odd"],
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """40 rows whose words determine the label."""
    lines = [
        f"The result is {words[i % 5]} and {words[i % 3]}\t{label}"
        for i in range(20)
        for words, label in ((GOOD, "good"), (BAD, "bad"))
    ]
    file = tmp_path_factory.mktemp("table") / "rows.tsv"
    file.write_text("\n".join(["text\tlabel", *lines]) + "\n")
    return file


@pytest.fixture
def wanted(trained, table):
    columns = ["--text=text", "--label=label", "--steps=60", "--lr=0.05", "--seeds=2"]
    return [f"--model={trained}", f"--train={table}", f"--valid={table}", *columns]


@pytest.mark.slow
def test_a_table_of_forty_rows(command, wanted, tmp_path):
    out = tmp_path / "probes.json"
    said = succeeded(command("probe", *wanted, f"--out={out}", "--weight_decay=0.1"))
    found = json.loads(out.read_text())
    assert found["labels"] == ["bad", "good"] and found["uniform_bits"] == 40
    assert found["majority"] == 0.5 and found["rows"] == {"train": 40, "valid": 40}
    linear = found["probes"]["linear"]
    rows = linear["layers"]
    assert [r["layer"] for r in rows] == list(range(len(rows))) and len(rows) >= 3
    for row in rows:
        assert row["score"] > 0.9 and row["selectivity"] > 0.1  # the words determine it
        assert row["bits"] < 40 and row["compression"] > 1
        assert {"random", "random_bits", "control_bits", "memorised", "sd"} <= set(row)
    assert len(linear["mix"]["weights"]) == len(rows)
    assert "selectivity" in said.stdout and "centre of gravity" in said.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["probes.json"]
    # A second run has the same results. (It is the same table for --train and --valid,
    # so that the control labels of the valid rows are known.)
    again = succeeded(command("probe", *wanted, "--json", "--weight_decay=0.1"))
    assert json.loads(again.stdout) == found


@pytest.mark.parametrize(
    ("metric", "score", "told"),
    [
        ("accuracy", 0.531, "always the largest class: accuracy 0.531"),
        ("macro_f1", 0.347, "always the largest class: accuracy 0.531, macro_f1 0.347"),
        # Matthews' correlation of any single class is 0 and says nothing of the rows.
        ("matthews", 0.0, "always the largest class: accuracy 0.531"),
        ("f1", 0.0, "always the largest class: accuracy 0.531"),
    ],
)
def test_what_the_largest_class_alone_scores(metric, score, told):
    found = {"metric": metric, "majority": score, "majority_accuracy": 0.531}
    assert probe_table.describe_majority(found) == told


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--text=txt", ["--text='txt'", "rows.tsv", "did you mean 'text'"]),
        ("--labels=good,fine", ["rows.tsv:3", "--labels", "bad"]),
        ("--labels=good,", ["--labels=good,: give two or more"]),
        ("--probes=lineer", ["--probes", "did you mean 'linear'"]),
        ("--pooling=max", ["--pooling", "mean"]),
        ("--metric=pearson", ["--metric", "accuracy"]),
        ("--label=text", ["--text=text and --label=text are one column"]),
        ("--valid=", ["--valid is missing"]),
        ("--text=", ["--text is missing"]),
        ("--label=", ["--label is missing, or --tag, or --targets"]),
        ("--tag=-1", ["--label and --tag: give one"]),
        ("--max_words=9", ["--max_words has no effect with --label"]),
        ("--out=/nowhere/x.json", ["--out=/nowhere/x.json"]),
        ("--png=plot.pdf", ["--png=plot.pdf", ".png"]),
        ("--seeds=0", ["seeds"]),
    ],
)
def test_what_is_refused(wanted, argument, words):
    with pytest.raises(UserError) as e:
        probe.main([*wanted, argument])
    assert all(word in str(e.value) for word in words), e.value


TAGS = {"clear": "ADJ", "wrong": "ADJ", "it": "PRON", "we": "PRON", "says": "VERB"}


@pytest.fixture
def of_words(trained, tmp_path):
    """A function of a file's name -> flags: 30 sentences of words with one tag each."""
    words = list(TAGS)
    sentences = [[words[(i * k) % 5] for k in (1, 2, 3)] for i in range(1, 31)]
    lines = ["".join(f"{w}\t{TAGS[w]}\n" for w in s) for s in sentences]
    (tmp_path / "words.bio").write_text("\n".join(lines))
    pairs = [
        {
            "text": " ".join(s),
            "targets": [
                {"span1": [0, 1], "span2": [b, 3], "label": TAGS[s[b]]} for b in (1, 2)
            ],
        }
        for s in sentences
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    quick = ["--steps=80", "--lr=0.05", "--weight_decay=0.1", "--random_encoder=false"]

    def flags(name):
        file = tmp_path / name
        return [f"--model={trained}", f"--train={file}", f"--valid={file}", *quick]

    return flags


@pytest.mark.parametrize(
    ("name", "flag", "of", "there"),
    [
        ("words.bio", "--tag=-1", "words", 90),
        pytest.param(
            "pairs.jsonl", "--targets=targets", "spans", 60, marks=pytest.mark.slow
        ),
    ],
)
def test_words_and_spans(of_words, capsys, tmp_path, name, flag, of, there):
    """The word determines the tag and also its random control label: with few word
    types a probe memorizes a control task (Hewitt and Liang 2019)."""
    out, arguments = tmp_path / "x.json", [*of_words(name), flag, "--seeds=1"]
    arguments += [f"--out={out}", "--pooling=first", "--max_words=50"]
    assert probe.main(arguments) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr()
    n = found["rows"]["train"]
    assert (found["of"], found["rows"]["valid"], 45 < n <= 50) == (of, n, True)
    for flag in ("--train", "--valid"):
        assert f"{flag}: {n} of {there} examples are taken" in said.err
    assert f"{n} {of} for the probes, {n} for the accuracy" in said.out
    assert found["labels"] == ["ADJ", "PRON", "VERB"] and "first pooling" in said.out
    for row in found["probes"]["linear"]["layers"]:
        assert min(row["score"], row["control"]) > 0.8, row  # chance is a third
        assert row["bits"] < found["uniform_bits"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--tag=3", ["words.bio:1: --tag=3: the line has 2 columns"]),
        ("--tag=ner", ["words.bio:1: --tag='ner' is not a number of a column"]),
        ("--text=2", ["words and tags are one column of 2"]),
        ("--text=-1", ["--text=-1 and --tag=-1 are one column"]),
        ("--labels=ADJ,PRON", ["words.bio:", "--labels: the tag='VERB' is unknown"]),
        ("--metric=f1", ["words.bio:1: the tag", "give --metric=accuracy"]),
        ("--pooling=cls", ["--pooling='cls'", "first"]),
        ("--text_pair=2", ["--text_pair has no effect with --tag"]),
        ("--max_words=2", ["--train: no sentence fits: --max_words=2"]),
    ],
)
def test_what_is_no_tag(of_words, argument, words):
    with pytest.raises(UserError) as e:
        probe.main([*of_words("words.bio"), "--tag=-1", argument])
    assert all(word in str(e.value) for word in words), e.value


def test_scores_are_no_classes(wanted, tmp_path):
    """Scores are refused, as the command has no probe for regression."""
    file = tmp_path / "scores.tsv"
    rows = [f"The result is {i}\t{i / 7:.3f}" for i in range(40)]
    file.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    with pytest.raises(UserError) as e:
        probe.main([*wanted, f"--train={file}"])
    assert str(e.value) == (
        "--label=label: 40 labels in 40 rows ('0.000', '0.143') are numbers with "
        "decimals: a probe tells classes, and these look like scores"
    )


def test_without_a_library_for_plots(wanted, monkeypatch):
    monkeypatch.setattr(probe_table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--png needs matplotlib"):
        probe.main([*wanted, "--png=x.png"])


def test_a_refusal_is_one_line(command, wanted):
    refused(command("probe", *wanted, "--model=nowhere"), "--model=nowhere")


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"score": 0.5, "sd": 0.1, "bits": 30.0, "random": 0.5, "random_bits": 40.0}
    result = {
        "layers": [{"layer": i, "control": 0.5, **row} for i in range(3)],
        "mix": {"cumulative": [0.5, 0.6, 0.7]},
    }
    told = {"majority": 0.5, "uniform_bits": 40.0, "metric": "accuracy"}
    probe_table.plot({"probes": {"linear": result}, **told}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_results_replace_no_examples(wanted, table):
    before = table.read_text()
    with pytest.raises(UserError, match="is --train, which it would replace"):
        probe.main([*wanted, f"--out={table}"])
    assert table.read_text() == before

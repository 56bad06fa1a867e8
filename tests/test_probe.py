# SPDX-License-Identifier: Apache-2.0
"""Probing by the command: a table of 40 rows in, layers out."""

import json

import pytest
from conftest import refused, succeeded

from bertjax import UserError, probe
from bertjax.probing import showing

GOOD, BAD = (
    ["clear", "useful", "simple", "fast", "exact"],
    ["wrong", "slow", "broken", "bad", "odd"],
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """40 rows whose words tell the label."""
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
        assert row["score"] > 0.9 and row["selectivity"] > 0.1  # the words tell
        assert row["bits"] < 40 and row["compression"] > 1
        assert {"random", "random_bits", "control_bits", "memorised", "sd"} <= set(row)
    assert len(linear["mix"]["weights"]) == len(rows)
    assert "selectivity" in said.stdout and "centre of gravity" in said.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["probes.json"]
    # The same table to both, so that control labels of training rows are known.
    again = succeeded(command("probe", *wanted, "--json", "--weight_decay=0.1"))
    assert json.loads(again.stdout) == found


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--text=txt", ["--text='txt'", "rows.tsv", "did you mean 'text'"]),
        ("--labels=good,fine", ["rows.tsv:3", "--labels", "bad"]),
        ("--probes=lineer", ["--probes", "did you mean 'linear'"]),
        ("--pooling=max", ["--pooling", "mean"]),
        ("--metric=pearson", ["--metric", "accuracy"]),
        ("--label=text", ["--text=text and --label=text are one column"]),
        ("--valid=", ["--valid is missing"]),
        ("--out=/nowhere/x.json", ["--out=/nowhere/x.json"]),
        ("--png=plot.pdf", ["--png=plot.pdf", ".png"]),
        ("--seeds=0", ["seeds"]),
    ],
)
def test_what_is_refused(wanted, argument, words):
    with pytest.raises(UserError) as e:
        probe.main([*wanted, argument])
    assert all(word in str(e.value) for word in words), e.value


def test_scores_are_no_classes(wanted, tmp_path):
    """What learns them is no option of this command."""
    file = tmp_path / "scores.tsv"
    rows = [f"The result is {i}\t{i / 7:.3f}" for i in range(40)]
    file.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    with pytest.raises(UserError) as e:
        probe.main([*wanted, f"--train={file}"])
    said = "--label=label: 40 labels in 40 rows: a probe tells classes, and these look"
    assert str(e.value) == f"{said} like scores"


def test_without_a_library_for_plots(wanted, monkeypatch):
    monkeypatch.setattr(showing.importlib.util, "find_spec", lambda name: None)
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
    showing.plot({"probes": {"linear": result}, **told}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"

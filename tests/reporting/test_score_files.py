# SPDX-License-Identifier: Apache-2.0
"""Sweeps and later evaluations in a page."""

import json
import math

import pytest
from conftest import succeeded
from pages import Page, make_run, page_of

from bertjax import UserError, report
from bertjax.reporting import charts, read_runs, run_tables, score_files
from bertjax.sweeps import score_spread


def make_sweep(folder, rates=(2e-5, 3e-5)):
    """Write the workdir of a sweep: two seeds per rate, two evaluations."""
    make_run(folder, [])
    (folder / "metrics.jsonl").unlink()
    runs = [(seed, rate) for rate in rates for seed in (0, 1)]
    made = score_spread.SweepScores(runs, "eval/dev/accuracy", True, None)
    for step in (4, 8):
        made.add(
            [
                dict(step=step, seed=seed, lr=rate, valid="dev", skipped=0)
                | {"accuracy": None if step == 8 and seed else step / 10 + rate}
                for seed, rate in runs
            ]
        )
    (folder / "sweep.json").write_text(json.dumps(made.summarize()))
    return folder


def test_curves_of_a_sweep(tmp_path):
    page = page_of(make_sweep(tmp_path / "a"))
    (chart,) = page.data["charts"]
    assert chart["key"] == "eval/dev/accuracy" and chart["axis"] == "step"
    names = {curve["name"]: curve for curve in chart["curves"]}
    assert names["seed 1, lr 3e-05"]["value"] == [0.40003, None]
    assert names["seed 1, lr 3e-05"]["step"] == [4, 8]
    assert [curve["run"] for curve in chart["curves"]] == [0, 0, 1, 1]  # by rate
    assert [t for t in page.texts if t in ("lr 2e-05", "lr 3e-05")].count("lr 2e-05")
    assert "Runs of the sweep a" in page.texts
    assert not any("No rows of metrics.jsonl" in text for text in page.texts)
    told = page.table("run", "set", "lr")[0]
    assert told == ["a", "dev", "2e-05", "accuracy", "2", *told[5:]]
    assert page.table("run", "step")[0][1] == "8 of 30"
    one = page_of(make_sweep(tmp_path / "b", rates=[2e-5]))
    assert [curve["run"] for curve in one.data["charts"][0]["curves"]] == [0, 1]


def test_a_sweep_among_the_runs(tmp_path):
    """Its row has the known values, and gaps for those that earlier versions lack."""
    old, new = make_sweep(tmp_path / "old"), make_sweep(tmp_path / "new")
    (old / "run.json").write_text(json.dumps({"total_steps": 8}))
    found = json.loads((new / "sweep.json").read_text()) | {"seconds": 90.0}
    for row in found["curve"]:
        row["tokens"] = 100 * row["step"] + row["seed"]
    (new / "sweep.json").write_text(json.dumps(found))
    facts = {"total_steps": 8, "parameters": 1234, "devices": 4, "device_kind": "cpu"}
    facts["starts"] = [{"time": "2025-01-02T03:04:05+00:00"}]
    (new / "run.json").write_text(json.dumps(facts))
    page = page_of(old, new, out=tmp_path / "page.html")
    head = page.tables[0][0]
    first, last = (
        dict(zip(head, row, strict=True)) for row in page.table("run", "step")
    )
    said = [first[k] for k in ("step", "tokens", "parameters", "devices", "started")]
    assert said == ["8 of 8", "–", "–", "–", ""]
    said = [last[k] for k in ("step", "tokens", "parameters", "devices", "started")]
    assert said == ["8 of 8", "801", "1,234", "4 x cpu", "2025-01-02 03:02"]


def test_pictures_of_a_sweep(tmp_path):
    runs = read_runs.read_runs([str(make_sweep(tmp_path / "a"))], print)
    ((title, chart),) = charts.titled_charts(runs, [])
    assert (title, chart["axis"]) == ("a eval/dev/accuracy", "step")
    assert [name for _, name, *_ in charts.curves_of(chart)] == [
        "lr 2e-05", "_lr 2e-05", "lr 3e-05", "_lr 3e-05",
    ]  # fmt: skip
    pytest.importorskip("matplotlib")
    (name,) = (name for name, _ in charts.draw(runs, []))
    assert name == "a-eval-dev-accuracy.png"


def test_a_damaged_sweep(tmp_path):
    folder = make_sweep(tmp_path / "a")
    (folder / "sweep.json").write_text(json.dumps({"curve": [{"step": 4}]}))
    with pytest.raises(
        UserError, match=r"a/sweep.json holds no curve of a sweep: KeyErr"
    ):
        charts.sweep_charts(read_runs.read_runs([str(folder)], print)[0])
    for spread in ({"lr": 1e-4}, 3):
        (folder / "sweep.json").write_text(json.dumps({"spread": spread}))
        runs = read_runs.read_runs([str(folder)], print)
        with pytest.raises(UserError, match=r"a/sweep.json holds no spread of a sw"):
            run_tables.sweeps(runs)
    (folder / "sweep.json").write_text("{")
    with pytest.raises(UserError, match=r"a/sweep.json cannot be read: "):
        read_runs.read_runs([str(folder)], print)


# ---------------------------------------------------------------- --scores
PAIRS = {"step": 3, "variant": "original", "accuracy": 0.5, "fields": {"syntax": 0.25}}
PAIRS["by_paradigm"] = {f"p{i}": {"accuracy": i / 30, "pairs": 9} for i in range(21)}
LINE = {"file": "a", "line": 1, "text": "a bc", "tokens": 2, "words": 2, "unknown": 0}
NO_TOKEN = LINE | {"text": "\u200b", "score": None, "tokens": 0, "words": 0}


@pytest.mark.parametrize(
    "objects, tables",
    [
        ([PAIRS], {
            "": [["step", 3], ["variant", "original"], ["accuracy", 0.5]],
            "fields": [["syntax", 0.25]],
            "by_paradigm": [[f"p{i}", i / 30, 9] for i in range(21)],
        }),
        ([{"step": 1, "rates": {"0.1": {"loss": 2.0, "n": 4}, "0.2": {"loss": 3.0}}}], {
            "": [["step", 1]],
            "rates": [["loss", 2.0, 3.0], ["n", 4, None]],
        }),
        ([{
            "step": 1,
            "eval": {"m": {"f1": 0.5, "types": {"A": {"f1": 0.1}}}, "mm": {"f1": 1}},
        }], {
            "": [["step", 1]],
            "eval": [["m", 0.5], ["mm", 1]],
            "eval m types": [["f1", 0.1]],
        }),
        ([{"model": "runs/a", "f1": 0.5} | {"step": 3, "types": {"A": 0.25}}], {
            "runs/a": [["f1", 0.5], ["step", 3]],
            "runs/a: types": [["A", 0.25]],
        }),
        ([LINE | {"score": -3.0}, LINE | {"score": None}, NO_TOKEN], {
            "": [["lines", 1], ["no_tokens", 1], ["too_long", 1], ["tokens", 2],
                 ["words", 2], ["unknown", 0], ["characters", 3],
                 ["pseudo_log_likelihood", -3.0],
                 ["pseudo_perplexity", math.exp(1.5)],
                 ["bits_per_character", 3 / math.log(2) / 3]],
        }),
    ],
)  # fmt: skip
def test_what_evaluate_prints(tmp_path, objects, tables):
    file = tmp_path / "scores.json"
    file.write_text("".join(json.dumps(one) + "\n" for one in objects))
    found = score_files.read_scores(str(file))
    assert {title: table.rows for title, table in found} == tables


def test_scores_in_a_page(tmp_path):
    one, two = tmp_path / "<pairs>.json", tmp_path / "steps.jsonl"
    one.write_text(json.dumps(PAIRS, indent=1))
    steps = [{"step": 1, "mrr@10": 0.25}, {"step": 2, "mrr@10": 0.5}]
    two.write_text("\n".join(map(json.dumps, steps)))
    more = [f"--scores={one}", f"--scores={two}"]
    page = page_of(make_run(tmp_path / "a"), more=more)
    assert ["accuracy", "0.5"] in page.table("score", "value")
    assert len(page.table("", "accuracy", "pairs")) == 21
    assert "by_paradigm, 21 rows" in page.texts and str(one) in page.texts
    steps = [t[1:] for t in page.tables if t[-1][0] == "mrr@10"]
    assert steps == [[["step", "1"], ["mrr@10", "0.25"]],
                     [["step", "2"], ["mrr@10", "0.5"]]]  # fmt: skip


def test_a_page_replaces_no_scores(tmp_path):
    run, file = make_run(tmp_path / "a"), tmp_path / "scores.json"
    file.write_text('{"step": 1, "f1": 0.5}')
    for flag in ("scores", "probes"):
        with pytest.raises(UserError, match=f"is --{flag}, which it would replace"):
            report.main([str(run), f"--out={file}", f"--{flag}={file}"])
    assert file.read_text() == '{"step": 1, "f1": 0.5}'


def test_scored_lines_of_several_models(tmp_path):
    file = tmp_path / "scores.jsonl"
    said = [LINE | {"model": m, "step": 2, "score": -3.0} for m in ("a", "b", "a")]
    file.write_text("\n".join(map(json.dumps, said)))
    found = score_files.read_scores(str(file))
    assert [(title, t.rows[:2]) for title, t in found] == [
        ("a", [["step", 2], ["lines", 2]]), ("b", [["step", 2], ["lines", 1]]),
    ]  # fmt: skip


def test_lines_of_several_scorers(tmp_path):
    """Scores of different scorers are not added up."""
    file, about = tmp_path / "scores.jsonl", {"model": "a", "step": 2}
    said = [about | LINE | {"score": -3.0}]
    said += [about | LINE | {"score": -5.0, "scorer": "lm"}]
    file.write_text("\n".join(map(json.dumps, said)))
    found = [dict(table.rows) for _, table in score_files.read_scores(str(file))]
    assert [one["lines"] for one in found] == [1, 1]
    assert found[0]["pseudo_log_likelihood"] == -3.0
    assert found[1]["log_likelihood"] == -5.0 and found[1]["scorer"] == "lm"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ": the file is empty"),
        ("[1]", ", line 1 is not a JSON object"),
        ("{", ", line 1 is not JSON: Expecting property name"),
        pytest.param("[" * 99_999, ", line 1 is not JSON: ", id="deep"),
        pytest.param("9" * 9_999, ", line 1 is not JSON: ", id="long"),
        ('{"step": 1,\n "f1": }', ", line 2 is not JSON: Expecting value"),
        ('{"step": 1, "f1": 1}\n\n{"step": }', ", line 3 is not JSON: Expecting value"),
        ('{"a": 1}', ", line 1: nothing that .*: no scores and their step"),
        ('{"step": 1, "f1": 1}\n{"step": 1, "a": [1]}', ", line 2: .*: a is no score"),
        ('{"step": 1, "a": {"b": [1]}}', ", line 1: .*: b is no score"),
        (json.dumps(LINE | {"score": "x"}), ", line 1: nothing that"),
        (json.dumps(LINE | {"score": -1, "model": []}), ", line 1: nothing that"),
        (json.dumps(LINE | {"score": -1, "tokens": 0}), ", line 1: nothing that"),
        (None, ": there is no such file"),
    ],
)
def test_what_are_no_scores(tmp_path, text, words):
    run, file = make_run(tmp_path / "a"), tmp_path / "scores.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"^--scores={file}{words}"):
        report.main([str(run), f"--out={tmp_path}/page.html", f"--scores={file}"])
    assert not (tmp_path / "page.html").exists()


def test_scores_of_a_run(command, trained, tmp_path):
    """A page can show the output of evaluate --what=mlm, pairs and pll."""
    pairs, lines = tmp_path / "pairs.jsonl", tmp_path / "lines.txt"
    told = {"sentence_good": "The name.", "sentence_bad": "Name the.", "UID": "order"}
    pairs.write_text(json.dumps(told) + "\n")
    lines.write_text("The name of a string.\nA list.\n")
    asked = []
    for name, flags in {
        "mlm": ["--what=mlm", "--rates=0.1,0.2", "--examples=8"],
        "pairs": ["--what=pairs", f"--text={pairs}"],
        "pll": ["--what=pll", f"--text={lines}"],
    }.items():
        done = command("evaluate", f"--workdir={trained}", "--json", *flags)
        file = tmp_path / f"{name}.json"
        file.write_text(succeeded(done).stdout)
        asked.append(f"--scores={file}")
    out = tmp_path / "page.html"
    succeeded(command("report", trained, f"--out={out}", *asked))
    page = Page(out.read_text(encoding="utf-8"))
    titles = [text for text in page.texts if text.startswith(str(tmp_path))]
    assert [title.rpartition("/")[2] for title in titles] == [
        "mlm.json", "pairs.json", "pll.json",
    ]  # fmt: skip
    loss = page.table("", "0.1", "0.2")
    assert {"mlm_loss", "mlm_calibration_error"} <= {row[0] for row in loss}
    assert ["lines", "2"] in [row for table in page.tables for row in table]
    assert f"{trained}: by_paradigm" in page.texts

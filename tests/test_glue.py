# SPDX-License-Identifier: Apache-2.0
"""GLUE: files are found, the table has the spread, answers have the right format."""

import json
from types import SimpleNamespace

import pytest
from conftest import refused, succeeded

from bertjax import UserError, glue
from bertjax.assembly import command_line
from bertjax.tasks import glue_files
from bertjax.tasks.prepare_task import make_form
from bertjax.tasks.tables import Row, read_rows
from bertjax.tasks.task_rows import Form

pytestmark = pytest.mark.usefixtures("no_listener")
# The first lines of the benchmark's own files.
FILES = {
    "CoLA/train.tsv": "gj04\t1\t\tHe left.\ngj04\t0\t*\tLeft he did.\n",
    "CoLA/dev.tsv": "gj04\t1\t\tShe left.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tWho left?\n1\tLeft who?\n",
    "MRPC/train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta\tb\n",
    "MRPC/dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n",
    "MNLI/train.tsv": "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n",
    "MNLI/dev_matched.tsv": "sentence1\tsentence2\tgold_label\na\tb\tentailment\n",
    "MNLI/dev_mismatched.tsv": "sentence1\tsentence2\tgold_label\na\tb\tneutral\n",
    "STS-B/train.tsv": "index\tsentence1\tsentence2\tscore\n0\ta\tb\t4.5\n",
    "STS-B/dev.tsv": "index\tsentence1\tsentence2\tscore\n0\ta\tb\t0\n",
}


PAIRS = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t"
OF_QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t0\n"
MORE = {
    "SST-2": "sentence\tlabel\na film \t1\n",
    "QQP": OF_QQP,
    "QNLI": "index\tquestion\tsentence\tlabel\n0\ta\tb\tnot_entailment\n",
    "RTE": f"{PAIRS}entailment\n",
    "WNLI": f"{PAIRS}1\n",
}
MORE = {f"{k}/{n}.tsv": text for k, text in MORE.items() for n in ("train", "dev")}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "glue" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "glue"


@pytest.mark.parametrize(
    ("name", "cells", "sets"),
    [
        ("cola", ("He left.", "1"), ["valid"]),
        ("mrpc", ("a", "b", "1"), ["valid"]),
        ("mnli", ("a", "b", "neutral"), ["m", "mm"]),
        ("stsb", ("a", "b", "4.5"), ["valid"]),
        ("sst2", ("a film ", "1"), ["valid"]),
        ("qqp", ("a", "b", "0"), ["valid"]),
        ("qnli", ("a", "b", "not_entailment"), ["valid"]),
        ("rte", ("a", "b", "entailment"), ["valid"]),
        ("wnli", ("a", "b", "1"), ["valid"]),
    ],
)
def test_files_are_read_as_the_benchmark_has_them(folder, name, cells, sets):
    for file, text in MORE.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    task = glue.GLUE[name]
    told = glue_files.train_arguments(task, folder, folder / "copies", print)
    args = ["--config=finetune/classify.py", f"--config.task.name={name}", *told]
    made = command_line.parse(args).config
    form = make_form(made)
    row = read_rows(made.data.train, "data.train", form.keys())[0]
    assert tuple(row.cells[c] for c in (*form.columns, form.label)) == cells
    assert cells[-1] in form.labels or made.objective == "regress"
    assert [v.partition("=")[0] for v in made.data.valid.split(",")] == sets or (
        sets == ["valid"] and "=" not in made.data.valid
    )


def test_other_text_than_a_named_task_has():
    base = ["--config=finetune/classify.py:task=rte"]
    told = command_line.parse(base).config.data
    assert told.train == "tfds:glue/rte:train" and "validation" in told.valid
    told = command_line.parse(
        [*base, "--config.data.train=tfds:glue/rte:train[:9]"]
    ).config
    assert told.data.valid == "tfds:glue/rte:validation"
    with pytest.raises(UserError, match=r"data\.valid is empty: data\.train=a\.tsv is"):
        command_line.parse([*base, "--config.data.train=a.tsv"])
    for valid in "", "b.tsv":
        given = ["--config.data.train=a.tsv", f"--config.data.valid={valid}"]
        assert command_line.parse([*base, *given]).config.data.valid == valid


def test_what_is_not_there(folder, tmp_path):
    with pytest.raises(UserError, match=r"SST-2/train\.tsv does not exist"):
        glue_files.train_arguments(glue.GLUE["sst2"], folder, tmp_path, print)
    with pytest.raises(UserError, match="did you mean 'cola'"):
        glue.main(["--tasks=colaa", f"--workdir={tmp_path}", "--config=bert.py"])
    with pytest.raises(UserError, match="--tasks=rte,cola,rte: give each task once"):
        glue.main(["--tasks=rte,cola,rte", "--config=bert.py"])


def test_the_table():
    def spread(metric, rate, median, valid="valid"):
        one = {"valid": valid, "lr": rate, "metric": metric, "n": 5, "std": 0.01}
        one["lost"] = 0
        return {**one, "median": median, "min": 0.1, "max": 0.9}

    found = [spread("f1", 1e-5, 0.9), spread("accuracy", 1e-5, 0.6)]
    found += [spread("f1", 3e-5, 0.7), spread("accuracy", 3e-5, 0.8)]
    best = {"valid": "valid"}
    rows = glue.table("mrpc", glue.GLUE["mrpc"], {"spread": found, "best": best})
    assert [(r["metric"], r["lr"]) for r in rows] == [("f1", 3e-5), ("accuracy", 3e-5)]
    rows += [{**spread("matthews", 1e-5, 0.5), "task": "cola"}]
    rows += [{**spread("accuracy", 1e-5, 0.0), "task": "wnli"}]
    assert glue.average(rows) == pytest.approx((0.75 + 0.5) / 2)
    told = {"tasks": rows, "average": glue.average(rows), "not_found": {"qqp": "why"}}
    told |= {"failed": {"rte": "for this"}, "not_handed_in": {"cola": "for that"}}
    lines = "\n".join(glue.markdown(told))
    assert "| mrpc | valid | accuracy | 3e-05 | 5 | 80.00 | 1.00 |" in lines
    assert "Mean of 2 tasks' medians: 62.50" in lines and "qqp (why)" in lines
    assert "Failed: rte (for this)" in lines
    lost = spread("f1", 1e-5, 0.7) | {"task": "mrpc", "n": 1, "std": None, "lost": 4}
    lines = "\n".join(glue.markdown(told | {"tasks": [lost]}))
    assert "| 1e-05 | 1 | 70.00 | - | 10.00 |" in lines
    assert "No answers to its tests: cola (for that)" in lines
    found = [spread("accuracy", 1e-5, 0.8, "m"), spread("accuracy", 3e-5, 0.7, "m")]
    found += [spread("accuracy", 1e-5, 0.6, "mm"), spread("accuracy", 3e-5, 0.9, "mm")]
    told = {"spread": found, "best": {"valid": "m"}}
    assert {r["lr"] for r in glue.table("mnli", glue.GLUE["mnli"], told)} == {1e-5}


def test_every_task_has_files_and_what_is_handed_in():
    assert {*glue.GLUE} == {
        *("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")
    }
    for task in glue.GLUE.values():
        assert (
            not task.files.submit or task.files.submit.keys() == task.files.test.keys()
        )
        assert (
            glue_files.test_sources(task, None, print).keys() == task.files.test.keys()
        )
    told = glue_files.test_sources(glue.GLUE["mnli"], None, print)
    assert told == {
        "m": "tfds:glue/mnli:test_matched",
        "mm": "tfds:glue/mnli:test_mismatched",
        "ax": "tfds:glue/ax:test",
    }


@pytest.mark.parametrize("name", ["cola", "mnli", "stsb"])
def test_answers_to_the_tests_of_tfds(tmp_path, monkeypatch, capsys, name):
    """Answers are in the order of idx with the site's labels; a missing test set is
    reported."""
    task = glue.GLUE[name]
    form = Form(task.columns, "label", task.labels, 1, ())
    model = SimpleNamespace(form=form)
    model._replace = lambda form: SimpleNamespace(form=form)

    def read(source, key, columns, say):
        assert {*columns.values()} == {*task.columns, "idx"}
        if source.endswith("_mismatched"):
            raise UserError(f"{source}: not on this machine")
        return [Row({"idx": i}, "x") for i in (2, 0, 1)]

    def answer(opened, rows):
        assert opened.form.columns == task.columns
        return (
            {"label": task.labels[i % 2]} if task.labels else {"value": i / 2}
            for i in (row.cells["idx"] for row in rows)
        )

    monkeypatch.setattr(glue, "open_finetuned", lambda path: model)
    monkeypatch.setattr(glue, "read_rows", read)
    monkeypatch.setattr(glue, "answer", answer)
    glue.write_submission(task, None, tmp_path, tmp_path)
    found = {p.name: p.read_text().split() for p in tmp_path.rglob("*.tsv")}
    wanted = {
        "cola": ["0", "1", "0"],
        "mnli": ["entailment", "neutral", "entailment"],
        "stsb": ["0.000", "0.500", "1.000"],
    }[name]
    lines = ["index", "prediction"]
    lines += [cell for i, said in enumerate(wanted) for cell in (str(i), said)]
    names = {"cola": ["CoLA"], "stsb": ["STS-B"], "mnli": ["MNLI-m", "AX"]}[name]
    assert found == {f"{one}.tsv": lines for one in names}
    said = capsys.readouterr().err
    missing = "no MNLI-mm.tsv: tfds:glue/mnli:test_mismatched: not"
    assert (missing in said) == (name == "mnli")


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        ([{"index": " 7", "id": "1"}, {"index": "3", "id": "2"}], [7, 3]),
        ([{"id": "1"}, {"id": "0"}], [1, 0]),  # as in QQP
        ([{"idx": 4}, {"idx": 0}], [4, 0]),  # as in TensorFlow Datasets
        ([{"sentence": "a"}, {"sentence": "b"}], [0, 1]),
        (
            [{"index": "0"}, {"index": "1.5"}],
            "x:1: the index '1.5' is not the number of",
        ),
        ([{"id": "0"}, {"id": ""}], "x:1: the id '' is not the number of a row"),
        ([{"index": "3"}, {"index": "3"}], "x:1: the index 3 occurs twice"),
    ],
)
def test_answers_have_the_numbers_of_the_file(cells, wanted):
    rows = [Row(one, f"x:{i}") for i, one in enumerate(cells)]
    if isinstance(wanted, list):
        assert glue_files.row_numbers(rows) == wanted
    else:
        with pytest.raises(UserError, match=wanted):
            glue_files.row_numbers(rows)


def test_the_diagnostic_rows_among_the_files(folder):
    own = folder / "MNLI"
    said = []
    assert glue_files.test_sources(glue.GLUE["mnli"], folder, said.append) == {}
    assert any("no AX.tsv: " in line for line in said)
    (folder / "AX").mkdir()
    (folder / "AX/AX.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    (found,) = glue_files.test_sources(glue.GLUE["mnli"], folder, print).items()
    assert found == ("ax", f"{own}/../AX/AX.tsv")


def test_rows_of_other_widths_are_left_out_of_a_copy(folder, tmp_path):
    file = folder / "RTE" / "train.tsv"
    file.parent.mkdir()
    rows = ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment"]
    file.write_text("\n".join(rows) + "\n")
    said = []
    assert glue_files.drop_uneven_rows(file, tmp_path / "copies", said.append) == file
    file.write_text("\n".join([rows[0], "1\tno label", rows[1], "", "2\t\t\t\t"]))
    made = glue_files.drop_uneven_rows(file, tmp_path / "copies", said.append)
    assert made == tmp_path / "copies/RTE/train.tsv"
    assert made.read_text().splitlines() == rows
    assert "2 rows with more or fewer cells" in said[0]


@pytest.fixture
def swept(folder, tmp_path, monkeypatch):
    """Arguments of the command, its sweeps replaced: MNLI's fails, others score 0.5."""

    def run(given, seeds, lrs, at_once, path, stop):
        if path.name == "mnli":
            raise UserError("train.tsv:3: is wrong")
        row = {
            "valid": "valid",
            "metric": "matthews",
            "lr": 1e-5,
            "n": 1,
            "std": None,
            "lost": 0,
        }
        row |= {"median": 0.5, "min": 0.5, "max": 0.5}
        return {"spread": [row], "best": row}

    monkeypatch.setattr(glue.sweep, "run", run)
    monkeypatch.setattr(glue.StopSignal, "install", lambda self: None)
    given = ["--config=finetune/classify.py", f"--data={folder}", "--json"]
    return [*given, f"--workdir={tmp_path / 'w'}", "--tasks=mnli,cola,rte"]


def test_a_task_that_fails_does_not_end_the_others(
    swept, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(glue, "write_submission", lambda *told: None)
    given = swept
    with pytest.raises(UserError, match=r"^failed \(see above\): mnli$"):
        glue.main(given)
    told = json.loads((tmp_path / "w/glue.json").read_text())
    assert told == json.loads(capsys.readouterr().out)
    assert told["failed"] == {"mnli": "train.tsv:3: is wrong"}
    assert [r["task"] for r in told["tasks"]] == ["cola"] and "rte" in told["not_found"]
    assert "Failed: mnli" in (tmp_path / "w/glue.md").read_text()
    with pytest.raises(UserError, match="no task finished: mnli"):
        glue.main([*given, "--tasks=mnli"])


def test_a_test_that_cannot_be_read_fails_no_task(
    swept, folder, tmp_path, monkeypatch, capsys
):
    (folder / "CoLA/test.tsv").write_text("index\tsentence\n0\ta\n1\tb\tc\n")
    model = SimpleNamespace(form=Form(("sentence",), "label", (), 1, ()))
    model._replace = lambda form: model
    monkeypatch.setattr(glue, "open_finetuned", lambda path: model)
    with pytest.raises(UserError, match=r"^no answers to its tests \(see above\): c"):
        glue.main([*swept, "--tasks=cola"])
    told = json.loads((tmp_path / "w/glue.json").read_text())
    assert told["failed"] == {} and [r["task"] for r in told["tasks"]] == ["cola"]
    assert "test.tsv:3: the row has 3 cells" in told["not_handed_in"]["cola"]
    assert "cola: no answers to its tests: " in capsys.readouterr().err
    assert not (tmp_path / "w/submission").exists()


@pytest.mark.slow
def test_the_command(command, folder, vocabulary, tmp_path):
    arguments = [
        "--config=finetune/classify.py:smoke",
        f"--config.data.vocab={vocabulary}",
        "--config.total.steps=2",
        "--config.data.length=32",
        f"--data={folder}",
        "--seeds=2",
        "--tasks=cola,rte",
    ]
    result = succeeded(command("glue", *arguments, f"--workdir={tmp_path / 'w'}"))
    assert "| cola | valid | matthews |" in result.stdout
    assert "Not found: rte" in result.stdout
    told = json.loads((tmp_path / "w/glue.json").read_text())
    assert told["tasks"][0]["n"] == 2
    lines = (tmp_path / "w/submission/CoLA.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 3
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    refused(command("glue", *arguments), "--workdir is missing")

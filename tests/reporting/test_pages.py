# SPDX-License-Identifier: Apache-2.0
"""Pages of runs: their contents, refusals, and that they load nothing."""

import base64
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import refused, succeeded
from pages import Page, make_probes, make_run, page_of, some_rows

from bertjax import UserError, report
from bertjax.assembly.models import LoadedModel
from bertjax.config.schema import base
from bertjax.reporting import charts, predictions, read_runs, run_tables, score_files


# ---------------------------------------------------------------- contents of a page
def test_two_runs_beside_each_other(tmp_path):
    a = make_run(tmp_path / "a", **{"optim.lr": 1e-3})
    rows = some_rows(shift=-1.0)
    rows[3]["train/loss"] = None
    b = make_run(tmp_path / "b", rows, **{"optim.lr": 0.5, "log.writers": "jsonl"})
    page = page_of(a, b)
    assert page.data["runs"] == ["a", "b"]
    charts = {chart["key"]: chart["curves"] for chart in page.data["charts"]}
    assert "guard/skipped" not in charts
    assert any("guard/skipped 0" in text for text in page.texts)
    first, second = charts["train/loss"]
    assert (first["run"], second["run"]) == (0, 1)
    assert first["value"][:4] == [8.9, 8.8, 8.7, 8.6] and second["value"][3] is None
    assert first["tokens"][-1] == 3000 and len(first["smooth"]) == 30
    assert page.table("key", "a", "b") == [["optim.lr", "0.001", "0.5"]]
    free = [t for t in page.tables if t[1:] and t[1][0] == "log.writers"]
    assert free[0][1][2] == "jsonl"
    scores = page.table("metric", "run")
    assert ["eval/valid/mlm_loss", "a", "6", "30", "5", "20", "lowest"] in scores
    assert ["eval/valid/mlm_loss", "b", "5", "30", "4", "20", "lowest"] in scores
    assert ["eval/valid/mlm_accuracy", "a", "0.4", "30", "0.5", "20", "highest"] in (
        scores
    )
    speed = page.table("run", "tokens/s")
    assert speed[0] == ["a", "215.5", "0.5", "–", "20.0%", "–", "1.5"]
    assert page.table("run", "step", "tokens")[0][:3] == ["a", "30 of 30", "3,000"]


def test_one_run_of_two_rows(tmp_path):
    rows = [{"step": 1, "tokens": 5, "train/loss": 3.0}]
    rows.append({"step": 2, "tokens": 9, "train/loss": 2.0})
    page = page_of(make_run(tmp_path / "a", rows, **{"data.length": 64}))
    assert page.data["charts"][0]["curves"][0]["value"] == [3, 2]
    assert page.table("key", "value")[0] == ["data.length", "64"]


def test_a_run_without_rows(tmp_path):
    a = make_run(tmp_path / "a", [])
    (a / "metrics.jsonl").unlink()
    assert "No rows of metrics.jsonl yet." in page_of(a).texts


def test_hosts_are_drawn_by_their_worst_alone(tmp_path):
    keys = ["hosts/data_wait_seconds_max", "hosts/17/data_wait_seconds"]
    rows = [{"step": i, "tokens": i, **dict.fromkeys(keys, i)} for i in (1, 2)]
    (chart,) = page_of(make_run(tmp_path / "a", rows)).data["charts"]
    assert chart["key"] == "hosts/data_wait_seconds_max"


def test_ten_runs_of_which_one_is_another_task(tmp_path):
    runs = [make_run(tmp_path / f"run{i}", some_rows(shift=i)) for i in range(9)]
    runs.append(make_run(tmp_path / "other", stores={"valid": "y"}))
    runs.append(make_run(tmp_path / "rarer", **{"data.mask_rate": 0.4}))
    runs.append(make_run(tmp_path / "rows", **{"data.plan": "document"}))
    charts = page_of(*runs).data["charts"]
    members = {}
    for chart in charts:
        members.setdefault(chart["key"], []).append([s["run"] for s in chart["curves"]])
    assert members["eval/valid/mlm_loss"] == [[*range(9)], [9], [10], [11]]
    assert members["train/loss"] == [[*range(10)], [10], [11]]
    assert members["perf/tokens_per_second"] == [[*range(12)]]


def test_losses_of_other_objectives_do_not_compare(tmp_path):
    """The losses of mlm and electra are sums of different terms, so they have separate
    charts; a term that both have is in one chart."""
    charts = page_of(
        make_run(tmp_path / "a", objective="mlm"),
        make_run(tmp_path / "b", objective="electra"),
        make_run(tmp_path / "c", objective="mlm"),
    ).data["charts"]
    members = {}
    for chart in charts:
        members.setdefault(chart["key"], []).append([s["run"] for s in chart["curves"]])
    assert members["train/loss"] == [[0, 2], [1]]
    assert members["eval/valid/mlm_loss"] == [[0, 1, 2]]


def test_the_best_of_runs_that_compare_is_marked(tmp_path):
    paths = [
        make_run(tmp_path / n, some_rows(shift=s)) for n, s in (("a", 0), ("b", 1))
    ]
    runs = read_runs.read_runs([*map(str, paths)], print)
    table, leading = run_tables.evaluations(runs)
    best = {tuple(table.rows[i][:2]) for i in leading}
    assert ("eval/valid/mlm_loss", "a") in best
    assert ("eval/valid/mlm_loss", "b") not in best


def test_the_best_of_a_loss_that_is_not_called_one(tmp_path):
    rows = some_rows()
    for row in rows:
        if "eval/valid/mlm_loss" in row:
            row["eval/valid/contrast"] = row["eval/valid/mlm_loss"]
    paths = [make_run(tmp_path / name, rows) for name in "ab"]
    facts = json.loads((paths[1] / "run.json").read_text())
    facts["greater_is_better"] = {"contrast": False}
    (paths[1] / "run.json").write_text(json.dumps(facts))
    for path, said in zip(paths, ("highest", "lowest"), strict=True):
        (run,) = read_runs.read_runs([str(path)], print)
        found = {row[0]: row[-1] for row in run_tables.evaluations([run])[0].rows}
        assert found["eval/valid/contrast"] == said


def test_a_given_vocabulary_hides_how_one_would_be_trained(tmp_path):
    changes = [
        {"data.vocab": "v.txt", "data.tokenizer": "wordpiece"},
        {"data.vocab": "v.txt", "data.vocab_size": 2**10},
        {"data.tokenizer": "bpe"},
    ]
    paths = [make_run(tmp_path / str(i), **x) for i, x in enumerate(changes)]
    runs = read_runs.read_runs([*map(str, paths)], print)
    assert not run_tables.differing(runs[:2])[0].rows
    assert run_tables.differing(runs)[0].rows == [
        ["data.tokenizer", "–", "–", "bpe"],
        ["data.vocab_size", "–", "–", "32768"],
    ]


MINILM = {"model.num_hidden_layers": 6, "model.hidden_size": 384}
MINILM |= {"model.num_attention_heads": 12, "model.intermediate_size": 1536}


@pytest.mark.parametrize("recorded", ["tiny", ""])
def test_an_imported_model_is_named_by_its_parameters_and_source(tmp_path, recorded):
    """Workdirs of earlier versions recorded the first size of the family."""
    own = make_run(tmp_path / "own", **{"model.size": "mini"})
    more = {"init_from": "/models/all-MiniLM-L6-v2/", "model.size": recorded}
    theirs = make_run(tmp_path / "theirs", **MINILM, **more)
    facts = json.loads((theirs / "run.json").read_text()) | {"parameters": 22_613_760}
    (theirs / "run.json").write_text(json.dumps(facts))
    page = page_of(own, theirs)
    head = page.tables[0][0]
    told = [dict(zip(head, row, strict=True)) for row in page.table("run", "step")]
    assert [row["size"] for row in told] == ["mini", "22.6M"]
    assert [row["init_from"] for row in told] == ["–", "all-MiniLM-L6-v2"]
    assert told[1]["parameters"] == "22,613,760"
    sizes = {row[0]: row[1:] for row in page.table("key", "own")}
    assert sizes["model.size"] == ["mini", "–"]
    assert sizes["model.hidden_size"] == ["256", "384"]
    assert not any(t[1:2] == ["tiny"] for table in page.tables for t in table)


def test_what_differs_is_only_that_and_begins_with_what_is_looked_for(tmp_path):
    """A model spelled out and the same model by name do not differ."""
    spelled = dict(num_hidden_layers=2, hidden_size=128, num_attention_heads=2)
    spelled |= dict(intermediate_size=512, norm_type="layer_norm", hidden_act="gelu")
    spelled = {f"model.{key}": value for key, value in spelled.items()}
    other = {"seed": 3, "batch_size": 64, "optim.lr": 2e-5, "data.length": 64}
    other |= {"accumulate": 2, "total.steps": 5, "optim.warmup.percent": 10 / 9}
    a = make_run(tmp_path / "a", **{"model.size": "tiny"})
    b = make_run(tmp_path / "b", **{"model.size": "base"}, **spelled, **other)
    rows = page_of(a, b).table("key", "a", "b")
    assert [row[0] for row in rows] == [
        "optim.lr", "data.length", "batch_size", "total.steps", "seed",
        "accumulate", "optim.warmup.percent",
    ]  # fmt: skip
    assert rows[-1] == ["optim.warmup.percent", "1", "1.111"]


def test_other_text_matters_and_its_path_does_not(tmp_path):
    stores = {"train": "x", "valid": "y"}
    train, valid, names = "data.train", "data.valid", "data.entities"
    keys = {train: "a.txt", valid: "c.txt", names: "e.tsv"}
    a = make_run(tmp_path / "a", stores=stores, **keys)
    keys = {train: "b.txt", valid: "d.txt", names: "f.tsv"}
    b = make_run(tmp_path / "b", stores={**stores, "train": "z"}, **keys)
    c = make_run(tmp_path / "c", stores=stores, **keys)
    runs = read_runs.read_runs([str(a), str(b)], print)
    matters, free = (table.rows for table in run_tables.differing(runs))
    assert matters == [[names, "e.tsv", "f.tsv"], [train, "a.txt", "b.txt"]]
    assert free == [[valid, "c.txt", "d.txt"]]
    runs = read_runs.read_runs([str(a), str(c)], print)
    matters, free = (table.rows for table in run_tables.differing(runs))
    assert not matters and len(free) == 3


def test_numbers_are_short_but_tell_apart(tmp_path):
    long = {"optim.warmup.percent": 10 / 9, "optim.lr": 1e-05}
    page = page_of(make_run(tmp_path / "a", **long))
    given = {row[0]: row[1] for row in page.table("key", "value")}
    assert given == {"optim.warmup.percent": "1.111", "optim.lr": "1e-05"}
    assert not any("1.11111" in text for text in page.texts)
    rates = [2e-5, 2.00001e-5]
    runs = [make_run(tmp_path / f"{r}", **{"optim.lr": r}) for r in rates]
    runs = read_runs.read_runs([*map(str, runs)], print)
    assert run_tables.differing(runs)[0].rows == [["optim.lr", "2e-05", "2.00001e-05"]]


def test_equal_losses_are_one_chart(tmp_path):
    """The sum and the only term of a loss are one curve."""

    def rows(term, second=0.0):
        made = some_rows()
        for row in made:
            if "train/loss" in row:
                row[f"train/{term}"] = row["train/loss"] + second
        return made

    one = make_run(tmp_path / "one", rows("classify_loss"))
    two = make_run(tmp_path / "two", rows("mlm_loss"), objective="mlm")
    both = make_run(tmp_path / "both", rows("mlm_loss", 0.5), objective="mlm+nsp")
    page = page_of(one)
    keys = [chart["key"] for chart in page.data["charts"]]
    assert "train/loss" in keys and "train/classify_loss" not in keys
    assert "train/loss, train/classify_loss" in page.texts
    # A term that another run has among several is compared in its own chart.
    charts = page_of(two, both, out=tmp_path / "2.html").data["charts"]
    members = [
        [curve["run"] for curve in chart["curves"]]
        for chart in charts
        if chart["key"] == "train/mlm_loss"
    ]
    assert members == [[0, 1]]


def test_a_threshold_is_no_score(tmp_path):
    rows = some_rows()
    for row in rows:
        row["eval/valid/threshold"] = row["step"] / 7
    (run,) = read_runs.read_runs([str(make_run(tmp_path / "a", rows))], print)
    named = {row[0] for row in run_tables.evaluations([run])[0].rows}
    assert "eval/valid/mlm_loss" in named and "eval/valid/threshold" not in named


def test_probes_by_layer(tmp_path):
    file = make_probes(tmp_path / "probes.json")
    page = page_of(make_run(tmp_path / "a", []), more=[f"--probes={file}"])
    scores, bits = page.data["charts"]
    curves = {curve["name"]: curve["value"] for curve in scores["curves"]}
    assert curves["encoder"] == [0.5] * 3 and curves["random encoder"] == [0, 0.25, 0.5]
    assert curves["mix of the layers 0 to l"] == [0.5, 0.6, 0.7]
    assert curves["largest class"] == [0.5] * 3 and scores["key"] == "f1"
    assert [c["name"] for c in bits["curves"]] == ["encoder", "each class as likely"]
    assert all(c["layer"] == [0, 1, 2] for c in scores["curves"] + bits["curves"])
    assert page.table("layer", "f1", "sd")[2][:2] == ["2", "0.5"]
    assert any("runs/<a>: 2 classes, 40 words" in text for text in page.texts)
    assert any("expected layer none" in text for text in page.texts)


def test_probes_are_drawn_too(tmp_path):
    file = make_probes(tmp_path / "probes.json")
    titled = [*charts.titled_charts([], [score_files.read_probe(str(file))])]
    assert [(title, chart["axis"]) for title, chart in titled] == [
        ("linear f1", "layer"),
        ("linear bits of the online code", "layer"),
    ]
    curve, *_ = charts.curves_of(titled[0][1])
    assert curve == (0, "encoder", [0, 1, 2], [0.5] * 3)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"probes": 3}, "a value in it is of another kind"),
        ({"rows": {}}, "it has no 'train'"),
        ({"majority": "x"}, "a value in it is of another kind"),
        ({"majority": 10**400}, "a value in it is of another kind"),
    ],
)
def test_what_is_no_probe(tmp_path, changed, words):
    file = make_probes(tmp_path / "probes.json", **changed)
    with pytest.raises(UserError, match=f"--probes={file} was not written .*: {words}"):
        page_of(make_run(tmp_path / "a"), more=[f"--probes={file}"])
    assert not (tmp_path / "page.html").exists()


def test_names_are_no_markup(tmp_path):
    name = "<script>alert(1)<%2Fscript>&\"'<!--"
    rows = some_rows()
    for row in rows:
        row["train/</script><b>"] = row["step"] / 7
    config = {"objective": "</td><img src=x onerror=alert(1)>"}
    folder = make_run(tmp_path / name.replace("/", "_"), rows, **config)
    page = page_of(folder, out=tmp_path / "page.html")
    assert page.data["runs"] == [name]
    assert page.tags.count("script") == 2 and "b" not in page.tags
    assert page.table("run", "step")[0][0] == name
    assert config["objective"] in page.table("run", "step")[0]
    assert any(text == "train/</script><b>" for text in page.texts)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "no JSON"),
        ("[1]", "no object"),
        ('{"tokens": 3}', "step=None"),
        ('{"step": true}', "step=True"),
        ('{"step": 3, "train/loss": "high"}', "train/loss='high'"),
        ('{"step": NaN}', "step=nan"),
        ("\\xff\\xfe", "no JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, words):
    folder = make_run(tmp_path / "a")
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:6], line, *lines[6:]]) + "\n")
    out = tmp_path / "page.html"
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        report.main([str(folder), f"--out={out}"])
    assert f"{file}:7: " in str(caught.value)
    assert not out.exists()


def test_half_a_line_at_the_end_is_left_out_and_said(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 31, "tok')
    page = page_of(folder)
    assert "metrics.jsonl:34: half a line" in capsys.readouterr().err
    assert any("half a line" in text for text in page.texts)
    assert max(page.data["charts"][0]["curves"][0]["step"]) == 30


def test_what_is_no_run_or_no_place_to_write(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"hidden_size": 3}')
    out = f"--out={tmp_path / 'page.html'}"
    for arguments, words in (
        ([run], "--out is missing"),
        ([out], "no run"),
        ([run, run, out], "given twice"),
        ([tmp_path / "empty", out], "not a workdir"),
        ([tmp_path / "none", out], "no such directory"),
        ([run / "run.json", out], "a file"),
        ([tmp_path / "other", out], "config.json is not the config"),
        ([run, f"--out={tmp_path}"], "is a directory"),
        ([run, f"--out={tmp_path / 'no' / 'page.html'}"], "is not a directory"),
        ([run, out, f"--png={run / 'run.json'}"], "is a file"),
    ):
        with pytest.raises(UserError, match=words):
            report.main([*map(str, arguments)])
    assert not (tmp_path / "page.html").exists()


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    run, out = make_run(tmp_path / "run"), tmp_path / "page.html"
    out.write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        report.main([str(run), f"--out={out}"])
    assert out.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"run", "page.html"}


def test_a_workdir_in_a_bucket(bucket, tmp_path):
    make_run(bucket / "runs" / "a")
    out = tmp_path / "page.html"
    assert report.main(["gs://bucket/runs/a", f"--out={out}"]) == 0
    assert Page(out.read_text()).data["runs"] == ["a"]


def test_pictures(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    arguments = [str(run), f"--out={tmp_path / 'p.html'}", f"--png={tmp_path / 'png'}"]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip install 'bertjax\[report\]'"):
            report.main(arguments)
    assert not (tmp_path / "p.html").exists()
    pytest.importorskip("matplotlib")
    file = make_probes(tmp_path / "probes.json")
    assert report.main([*arguments, f"--probes={file}"]) == 0
    names = {p.name for p in (tmp_path / "png").iterdir()}
    assert {"train-loss.png", "eval-valid-mlm_loss.png", "linear-f1.png"} <= names
    assert (tmp_path / "png/train-loss.png").read_bytes()[1:4] == b"PNG"


# ---------------------------------------------------------------- end to end
def test_the_command(command, trained, tmp_path):
    out = tmp_path / "page.html"
    asked = ["--fill=The [MASK] is a string.", "--sentence=The name of a <b>."]
    succeeded(command("report", trained, f"--out={out}", *asked))
    page = Page(out.read_text(encoding="utf-8"))
    assert page.data["runs"] == ["run"]
    assert page.table("run", "step")[0][1] == "12 of 12"
    blanks = page.table("step", "guesses")
    assert [row[0] for row in blanks] == ["8", "12"]
    assert all(len(guesses.split()) == 10 for _, guesses in blanks)
    seen = page.table("token", "its probability")
    assert {"the", "name", "of", "a", "b", "."} <= {token for token, *_ in seen}
    (view,) = page.data["views"]
    n = len(view["tokens"])
    assert n == len(seen) + 2 and view["tokens"][0] == "[CLS]"
    maps = np.frombuffer(base64.b64decode(view["weights"]), np.uint8)
    maps = maps.reshape(view["layers"], view["heads"], n, n)
    np.testing.assert_allclose(maps.sum(-1, dtype=int), 255, atol=n / 2)
    refused(command("report", tmp_path, f"--out={out}"), "config.json", str(tmp_path))


def test_texts_that_cannot_be_shown(trained, tmp_path):
    out = tmp_path / "page.html"
    for text, words in (
        ("--fill=nothing", r"no \[MASK\]"),
        ("--sentence= ", "no token"),
        (f"--sentence={'a ' * 70}", "up to 64"),
        ("--sentence=\udcff", "not UTF-8"),
    ):
        with pytest.raises(UserError, match=words):
            report.main([str(trained), f"--out={out}", text])
    assert not out.exists()


def test_texts_that_one_model_cannot_read_are_left_out_of_it(tmp_path, monkeypatch):
    """Two families have different mask tokens, and each model fills its own blanks."""
    runs = [make_run(tmp_path / name) for name in ("bert", "roberta")]
    runs = read_runs.read_runs([*map(str, runs)], print)

    def encode(tokenizer, text, longest):
        if tokenizer.mask not in text:
            raise UserError(f"no {tokenizer.mask} in {text}")
        return [1]

    def opened(run, step):
        mask = {"bert": "[MASK]", "roberta": "<mask>"}[run.name]
        tokenizer = SimpleNamespace(mask=mask, vocab_size=9, has_mask=True)
        return LoadedModel(base(), tokenizer, None, {})

    monkeypatch.setattr(predictions, "open_step", opened)
    monkeypatch.setattr(predictions.manifest, "steps", lambda path: [1, 2])
    monkeypatch.setattr(predictions.filling, "encode", encode)
    monkeypatch.setattr(predictions.models, "read_params", lambda *told: {})
    monkeypatch.setattr(predictions.filling, "masked_lm", lambda *told: told)
    monkeypatch.setattr(predictions.filling, "make_filler", lambda *told: len)
    notes = []
    found = predictions.fill_blanks(runs, ["a [MASK]", "a <mask>"], notes.append)
    assert [(f["run"], f["text"], f["rows"]) for f in found] == [
        ("bert", "a [MASK]", [(1, 1), (2, 1)]),
        ("roberta", "a <mask>", [(1, 1), (2, 1)]),
    ]
    assert len(notes) == 2 and notes[1] == "roberta: left out: no <mask> in a [MASK]"
    with pytest.raises(UserError, match=r"no \[MASK\] in nothing"):
        predictions.fill_blanks(runs, ["a [MASK]", "nothing"], notes.append)


def test_runs_of_no_masked_lm_are_told_in_one_line(tmp_path, monkeypatch):
    names = "fine", "causal", "learnt", "pretrained"
    runs = [make_run(tmp_path / name) for name in names]
    runs = read_runs.read_runs([*map(str, runs)], print)

    def read_params(checkpoint, head, weights):
        if checkpoint == "fine":
            raise UserError(f"{checkpoint} has no masked-LM head")
        return {}

    def opened(run, step):
        config = base()
        config.model.is_decoder = run.name == "causal"
        config.objective = "clm" if run.name == "learnt" else "mlm"
        tokenizer = SimpleNamespace(vocab_size=9, has_mask=True)
        return LoadedModel(config, tokenizer, run.name, {})

    monkeypatch.setattr(predictions, "open_step", opened)
    monkeypatch.setattr(predictions.manifest, "steps", lambda path: [*range(1, 6)])
    monkeypatch.setattr(predictions.filling, "encode", lambda *told, longest: [1])
    monkeypatch.setattr(predictions.models, "read_params", read_params)
    monkeypatch.setattr(predictions.filling, "masked_lm", lambda *told: told)
    monkeypatch.setattr(predictions.filling, "make_filler", lambda *told: len)
    notes = []
    found = predictions.fill_blanks(runs, ["a [MASK]", "b [MASK]"], notes.append)
    assert {f["run"] for f in found} == {"pretrained"}
    assert notes == ["no masked LM, so no guesses: fine, causal, learnt"]


def test_runs_without_a_checkpoint_or_a_head_are_left_out(tmp_path, capsys):
    page = page_of(make_run(tmp_path / "a"), more=["--fill=a [MASK]", "--sentence=a"])
    assert "a: no checkpoint that fills blanks" in capsys.readouterr().err
    assert any("no checkpoint" in text for text in page.texts)

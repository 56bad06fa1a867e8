# SPDX-License-Identifier: Apache-2.0
"""bertjax.speedrun, on a track of seconds with a small text."""

import gzip
import hashlib
import json
import os
import random
import shutil

import pytest

from bertjax import UserError, speedrun
from bertjax.speedruns import corpus, records
from bertjax.speedruns.tracks import TRACKS

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "tree",
    "house",
    "sees",
    "likes",
    "finds",
    "red",
    "old",
    "small",
    "and",
    "near",
]
SMALL = "total.steps=2 objective=mlm data.plan=full_sentences optim.warmup.steps=0 "
SMALL += "model.num_hidden_layers=1 model.hidden_size=32 model.num_attention_heads=1 "
SMALL += "model.intermediate_size=32 data.length=16 eval.examples=8 eval.every.steps=2"
TRACK = TRACKS["cpu20m"]._replace(
    config="bert.py:smoke", flags=(*SMALL.split(),), pieces=60, length=16
)


def make_text(seed, sentences):
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(sentences))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of text, with the speedrun's constants patched to accept it."""
    folder = tmp_path_factory.mktemp("data")
    parts = []
    for name, sentences in (("wiki", 400), ("valid", 40)):
        text = make_text(name, sentences)
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
        known = hashlib.sha256(text.encode()).hexdigest()
        words = 8 * sentences
        parts.append(corpus.Part(name, f"{name}.txt.gz", words, False, known))
    pair = {"sentence_good": "the cat sees a dog.", "sentence_bad": "cat the a sees."}
    lines = [json.dumps(pair | {"UID": name}) for name in ("one", "two")]
    pairs = gzip.compress("\n".join(lines).encode())
    (folder / "blimp").mkdir()
    (folder / corpus.PAIRS).write_bytes(pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PARTS", parts[:1])
        patch.setattr("bertjax.speedruns.tracks.PARTS", parts[:1])
        patch.setattr(corpus, "VALID", parts[1])
        patch.setattr(corpus, "PAIRS_SHA256", hashlib.sha256(pairs).hexdigest())
        patch.setitem(TRACKS, "cpu20m", TRACK)
        patch.setitem(TRACKS, "cpu3h", TRACK._replace(minutes=1e-9))
        yield folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A function that runs the command with further flags."""
    cache = tmp_path_factory.mktemp("cache")

    def call(*flags, track="cpu20m"):
        usual = f"--track={track}", f"--data={data}", f"--config.data.cache={cache}"
        return speedrun.main([*usual, *flags])

    return call


@pytest.fixture(scope="module")
def entry(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("entry")
    assert run(f"--workdir={path}", "--seeds=2") == 0
    return path


def test_the_record_of_each_seed(entry, capsys):
    found = json.loads((entry / records.FILE).read_text())
    assert [r["seed"] for r in found["records"]] == [0, 1]
    losses = [r["loss"] for r in found["records"]]
    assert losses[0] != losses[1] and all(0 < loss < 8 for loss in losses)
    for seed, record in enumerate(found["records"]):
        run = json.loads((entry / f"seed-{seed}" / "run.json").read_text())
        assert record["steps"] == run["total_steps"] == 2
        assert 0 < record["minutes"] == record["processor"] < 5
        assert record["pairs"] in (0.0, 0.5, 1.0) and record["scorer"] == "pll"
    assert found["summary"]["loss"]["std"] > 0


def test_again_and_against_itself(entry, run, capsys):
    before = (entry / "seed-0" / "metrics.jsonl").read_bytes()
    flags = f"--workdir={entry}", "--seeds=2", f"--against={entry}", "--json"
    assert run(*flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["against"]["loss"]["difference"] == 0
    assert found["against"]["loss"]["p"] == pytest.approx(0.5)
    assert (entry / "seed-0" / "metrics.jsonl").read_bytes() == before


def test_another_scorer_scores_again(entry, run, capsys):
    found = entry / "seed-0" / records.FILE
    before = json.loads(found.read_text())
    assert run(f"--workdir={entry}", "--seeds=2", "--scorer=elbo") == 0
    after = json.loads(found.read_text())
    assert (before["scorer"], after["scorer"]) == ("pll", "elbo")
    assert after["loss"] == before["loss"]
    assert run(f"--workdir={entry}", "--seeds=2") == 0
    assert json.loads(found.read_text()) == before


@pytest.mark.parametrize("content", ["", "[]", '{"scorer": "pll"}', '{"seed": 0, "lo'])
def test_a_damaged_record_is_made_again(entry, run, content):
    file = entry / "seed-1" / records.FILE
    before = json.loads(file.read_text())
    file.write_text(content)
    assert run(f"--workdir={entry}", "--seeds=2") == 0
    assert json.loads(file.read_text()) == before


def test_the_record_of_another_run_is_not_taken(entry, run):
    file = entry / "seed-1" / records.FILE
    before = file.read_text()
    file.write_text((entry / "seed-0" / records.FILE).read_text())
    assert run(f"--workdir={entry}", "--seeds=2") == 0
    assert file.read_text() == before


def test_a_run_without_its_times_is_no_entry(entry, run, tmp_path):
    copy = tmp_path / "entry"
    shutil.copytree(entry, copy)
    (copy / "seed-0" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl lacks the time of"):
        run(f"--workdir={copy}", "--seeds=2")
    assert (copy / records.FILE).read_bytes() == (entry / records.FILE).read_bytes()


def test_a_single_seed_is_compared_with_nothing(entry, run, tmp_path):
    with pytest.raises(UserError, match="several seeds, and these are 1 and 2"):
        run(f"--workdir={tmp_path}", f"--against={entry}")
    assert not list(tmp_path.iterdir())


def test_too_slow_is_no_entry(entry, run):
    with pytest.raises(UserError, match="no entry; give fewer steps"):
        run(f"--workdir={entry}", track="cpu3h")


def test_what_it_would_run_elsewhere(run, tmp_path, capsys):
    with pytest.raises(UserError, match="runs on 1 x H200, and this machine has"):
        run(f"--workdir={tmp_path}", "--config.seed=5", track="h200-25min")
    out = capsys.readouterr().out
    assert out.startswith("python -m bertjax.train --config=modern.py:medium ")
    assert f"--config.seed=5 --workdir={tmp_path}/seed-5" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--config.data.train=mine.txt"], "data.train: the rules of --track=cpu20m"),
        (["--config.init_from=model"], "init_from: the rules"),
        (["--config.optim.lr=-1"], "optim.lr"),
        (["--config.objective=clm"], "objective=clm fills no masks, and the held-out"),
        (["--config.seed=2147483647", "--seeds=2"], "seed=2147483648 must be"),
        (["--scorer=lm"], "--scorer=lm: the recipe has objective=mlm, which never"),
        (["--against=nowhere"], "--against=nowhere: there is no speedrun.json"),
        (["--against=gs://b/w"], "--against=gs://b/w: give a directory on a disk"),
    ],
)
def test_refused(run, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run(f"--workdir={tmp_path}", *flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line, message",
    [
        ("init_from = 'model'", "init_from=model: the rules of --track=cpu20m"),
        ("teacher = 'model'", "teacher=model: the rules"),
        ("data.vocab = 'vocab.txt'", "data.vocab=vocab.txt: the rules"),
        ("budget_minutes = 9.0", "budget_minutes=9.0: the rules"),
        ("eval.patience = 2", "eval.patience=2: the rules"),
    ],
)
def test_a_recipe_brings_nothing_from_elsewhere(run, tmp_path, line, message):
    """A config file has the same limits as the command line, and is free otherwise."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from bertjax.config import load_config\n\n\ndef get_config():\n"
        f"    config = load_config('bert.py:smoke')\n    config.{line}\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=message):
        run(f"--config={file}", f"--workdir={tmp_path / 'entry'}")
    assert not (tmp_path / "entry").exists()


def test_missing_flags():
    with pytest.raises(UserError, match="--track is missing"):
        speedrun.main(["--data=x", "--workdir=y"])
    with pytest.raises(UserError, match="cpu20m"):
        speedrun.main(["--track=cpu2m", "--data=x", "--workdir=y"])


@pytest.mark.usefixtures("no_listener")
def test_flags_come_before_devices_and_a_signal_ends_what_saves_nothing(
    data, tmp_path, monkeypatch
):
    seen = {}

    def look(name, track):
        seen["flags"] = os.environ["XLA_FLAGS"]
        return ""

    def train(config, workdir, overrides, stop):
        stop.training, seen["stop"] = True, stop
        return 0

    def score(*run):
        seen["training"] = seen["stop"].training
        raise UserError("enough")

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(speedrun, "check_devices", look)
    monkeypatch.setattr(speedrun.train, "train", train)
    monkeypatch.setattr(speedrun, "score", score)
    flags = ["--track=cpu20m", f"--data={data}", f"--workdir={tmp_path / 'run'}"]
    flags += [f"--config.data.cache={tmp_path}", "--config.deterministic=True"]
    with pytest.raises(UserError, match="enough"):
        speedrun.main(flags)
    assert "deterministic_ops" in seen["flags"] and seen["training"] is False

# SPDX-License-Identifier: Apache-2.0
"""The commands end to end: files, exit statuses, and errors of bad input."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_rows, refused, succeeded, timeless, train_losses
from resuming import check_same_end, parameters, without_last

from bertjax.checkpoints import manifest

STEPS = 12
FILES = {"config.json", "overrides.json", "run.json", "tokenizer", "metrics.jsonl"}
OF_SENTENCES = ["--config.objective=mlm", "--config.data.plan=full_sentences"]


# ---------------------------------------------------------------- training
def test_a_run_and_its_workdir(trained):
    assert FILES | {"checkpoints", "tb"} <= {p.name for p in trained.iterdir()}
    assert manifest.steps(trained) == [8, STEPS]
    assert list((trained / "tb").glob("events.*"))
    rows = read_rows(trained)
    order = [(r["step"], "train/loss" in r) for r in rows]
    expected = [(s, True) for s in range(1, STEPS + 1)]
    expected.insert(6, (6, False))
    assert order == [*expected, (12, False)]
    train = {"train/loss", "train/mlm_loss", "train/mlm_accuracy", "train/nsp_loss"}
    train |= {"optim/lr", "optim/grad_norm", "tokens", "step"}
    assert all(train <= set(r) for r in rows if "train/loss" in r)
    timed = {"perf/step_seconds", "perf/tokens_per_second", "data/wait_seconds"}
    assert timed | {"data/fill"} <= set(rows[1])
    assert 0.5 < rows[1]["data/fill"] <= 1
    assert {"eval/valid/mlm_loss", "eval/valid/mlm_accuracy"} <= set(rows[-1])
    tokens = [r["tokens"] for r in rows]
    assert tokens == sorted(tokens) and 0 < tokens[0] <= 8 * 32
    assert train_losses(trained)[-1] < train_losses(trained)[0]
    assert rows[0]["optim/lr"] == pytest.approx(rows[1]["optim/lr"] / 2)
    run = json.loads((trained / "run.json").read_text())
    assert run["total_steps"] == STEPS and len(run["starts"]) == 1
    assert set(run["stores"]) == {"train", "valid"}
    assert json.loads((trained / "overrides.json").read_text())["data.length"] == 32


def test_the_same_command_again_changes_nothing(command, arguments, trained):
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    done = succeeded(command("train", *arguments, f"--workdir={trained}"))
    assert "done" in done.stderr
    assert before == {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}


def stop_after(step, number, arguments, environment, log):
    """Start a run and send a signal when it has written the row of a step."""
    workdir = log.with_name("run")
    rows = workdir / "metrics.jsonl"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bertjax.train", *arguments, f"--workdir={workdir}"],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
        )
    while process.poll() is None:
        if rows.exists() and rows.read_bytes().count(b"\n") >= step:
            process.send_signal(number)
            break
        time.sleep(0.005)  # leave the cores to others
    return workdir, process.wait(timeout=200)


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_the_run_resumes(
    number, status, command, arguments, environment, tmp_path
):
    """The run is long enough to be training, and tracing, when the signal comes."""
    arguments = [*arguments, "--config.total.steps=100", "--config.log.writers=jsonl"]
    arguments += ["--config.eval.every.steps=100", "--config.checkpoint.every.steps=90"]
    traced = [*arguments, "--config.profile.start=2", "--config.profile.steps=98"]
    workdir, code = stop_after(5, number, traced, environment, tmp_path / "log")
    assert code == status, (tmp_path / "log").read_text()[-2000:]
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    (*_, saved) = manifest.steps(workdir)
    rows = read_rows(workdir)
    assert rows[-1]["step"] == saved < 100
    done = succeeded(command("train", *arguments, f"--workdir={workdir}"))
    assert f"resuming after step {saved}" in done.stderr
    after = read_rows(workdir)
    assert after[: len(rows)] == rows
    assert [r["step"] for r in after if "train/loss" in r] == list(range(1, 101))


def test_resumed_is_uninterrupted(command, arguments, trained, tmp_path):
    """The newest checkpoint is damaged, so the run moves it and resumes from the one
    before."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    (workdir / "checkpoints/12/meta.json").write_text("{}")
    done = succeeded(command("train", *arguments, f"--workdir={workdir}"))
    assert "checkpoints/12 is damaged: meta.json" in done.stderr
    assert "resuming after step 8" in done.stderr
    assert (workdir / "damaged/12").is_dir()
    assert read_rows(workdir)[:9] == read_rows(trained)[:9]
    check_same_end(workdir, trained)


def test_no_intact_checkpoint(command, arguments, trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    for folder in (workdir / "checkpoints").iterdir():
        (folder / "meta.json").write_text("{}")
    done = command("train", *arguments, f"--workdir={workdir}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no checkpoint" in done.stderr and not manifest.steps(workdir)


@pytest.mark.slow
def test_longer_and_other_writers(command, arguments, trained, tmp_path, environment):
    """A longer run needs --allow_config_change; a writer from outside goes by name."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    (tmp_path / "mine.py").write_text(
        "class Lines:\n"
        "    def __init__(self, workdir, step):\n"
        "        self.file = (workdir / 'lines').open('a')\n"
        "    def write(self, row):\n"
        "        print(row['step'], file=self.file)\n"
        "    def flush(self):\n"
        "        self.file.flush()\n"
        "    close = flush\n"
    )
    longer = [*arguments, "--config.total.steps=14", f"--workdir={workdir}"]
    refused(command("train", *longer), "total.steps", "--allow_config_change")
    done = command(
        "train",
        *longer,
        "--allow_config_change",
        "--config.log.writers=mine.Lines",
        env={"PYTHONPATH": str(tmp_path)},
    )
    succeeded(done)
    assert (workdir / "lines").read_text().split() == ["13", "14", "14"]
    assert read_rows(workdir)[: STEPS + 2] == read_rows(trained)


def test_init_from(command, arguments, trained, tmp_path):
    """An encoder trained with MLM and NSP continues with MLM only."""
    workdir = tmp_path / "run"
    more = ["--config.objective=mlm", "--config.total.steps=2"]
    more += [f"--config.init_from={trained}", f"--workdir={workdir}"]
    done = succeeded(command("train", *arguments, *more))
    assert "in it, not used: encoder/pooler/bias" in done.stderr
    assert train_losses(workdir)[0] < train_losses(trained)[3]


def test_without_tensorflow(command, arguments, trained, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not here')\n")
    workdir = tmp_path / "run"
    done = command(
        "train",
        *arguments,
        f"--workdir={workdir}",
        env={"PYTHONPATH": str(tmp_path)},
    )
    succeeded(done)
    assert timeless(read_rows(workdir)) == timeless(read_rows(trained))


@pytest.mark.slow
def test_without_jit(command, arguments, trained, tmp_path):
    """Without jit, for debuggers, losses are the same. (The shorter total does not
    matter during warm-up.)"""
    more = ["--config.total.steps=2", "--config.eval.examples=8"]
    workdir = tmp_path / "run"
    env = {"JAX_DISABLE_JIT": "1"}
    succeeded(command("train", *arguments, *more, f"--workdir={workdir}", env=env))
    assert train_losses(workdir) == pytest.approx(train_losses(trained)[:2], rel=1e-5)


def test_dry_run_writes_nothing(command, arguments, tmp_path):
    workdir = tmp_path / "run"
    done = command("train", *arguments, "--dry_run", f"--workdir={workdir}")
    assert "encoder/embeddings/word" in succeeded(done).stdout
    assert not workdir.exists()


# ---------------------------------------------------------------- a toy objective
TOY = '''
"""Predict the token type of the first real token from its hidden state."""
import jax.numpy as jnp
from bertjax.models.layers import draw, linear, linear_specs
from bertjax.objectives.base import Head
from bertjax.objectives.losses import cross_entropy

def init(rng, cfg):
    return draw(rng, {"out": linear_specs(into=(cfg.hidden_size,), out=(4,))}, 0.02)

def target(batch):
    return batch["attention_mask"].sum(-1) % 4, jnp.ones(len(batch["input_ids"]))

def weights(batch):
    return {"length_loss": target(batch)[1].sum()}

def sums(params, cfg, encoded, batch, rng):
    logits = linear(params["length"]["out"], encoded.hidden[:, 0]).astype("float32")
    return {"length_loss": cross_entropy(logits, *target(batch))}

def make_head():
    return Head("length", init, weights, sums, reads="everywhere",
                coefficients={"length_loss": 0.5},
                shardings=(("length/out/kernel", "embed classes"),
                           ("length/out/bias", "classes")))
'''


@pytest.mark.slow
def test_an_objective_from_outside_the_package(command, arguments, tmp_path):
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys/length.py").write_text(TOY)
    env = {"PYTHONPATH": str(tmp_path)}
    workdir = tmp_path / "run"
    more = ["--config.objective=mlm+toys.length", "--config.total.steps=3"]
    done = command("train", *arguments, *more, f"--workdir={workdir}", env=env)
    succeeded(done)
    first = read_rows(workdir)[0]
    together = first["train/mlm_loss"] + 0.5 * first["train/length_loss"]
    assert first["train/loss"] == pytest.approx(together, rel=1e-6)
    assert first["train/length_loss"] == pytest.approx(1.386, rel=0.2)
    assert "eval/valid/length_loss" in read_rows(workdir)[-1]
    blanks = command("fill_mask", f"--model={workdir}", "A [MASK].", env=env)
    succeeded(blanks)


# ---------------------------------------------------------------- using a run
def test_evaluate_is_the_last_row_of_the_run(command, trained):
    done = succeeded(command("evaluate", f"--workdir={trained}", "--json"))
    found = json.loads(done.stdout)
    last = read_rows(trained)[-1]
    assert found["step"] == STEPS
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert found[name] == pytest.approx(last[f"eval/valid/{name}"], rel=1e-6)
    assert found["tokens"] > 0 and found["unigram_cross_entropy"] > 3
    earlier = command("evaluate", f"--model={trained}/checkpoints/8", "--json")
    assert json.loads(succeeded(earlier).stdout)["step"] == 8


def test_evaluate_other_text_by_name(command, trained, corpus):
    text = f"--text=a={corpus / 'valid.txt'},b={corpus / 'train.txt'}"
    more = ["--examples=8", "--step=8", "--json"]
    done = command("evaluate", f"--workdir={trained}", text, *more)
    found = json.loads(succeeded(done).stdout)
    assert found["step"] == 8 and set(found["eval"]) == {"a", "b"}


def test_fill_mask(command, trained):
    texts = ["The [MASK] of a [MASK] .", "[MASK]", "a statement is [MASK]."]
    done = command("fill_mask", f"--model={trained}", "--top_k=7", "--json", *texts)
    rows = [json.loads(line) for line in succeeded(done).stdout.splitlines()]
    assert [r["text"] for r in rows] == texts
    assert [len(r["masks"]) for r in rows] == [2, 1, 1]
    for blank in (b for r in rows for b in r["masks"]):
        shares = [guess["probability"] for guess in blank]
        assert len(blank) == 7 and shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1 + 1e-6
    alone = command("fill_mask", f"--model={trained}", "--top_k=7", "--json", texts[0])
    (row,) = succeeded(alone).stdout.splitlines()
    assert json.loads(row) == rows[0]


def test_output_is_utf_8_whatever_the_encoding_is(environment):
    code = (
        "from bertjax.config import cli; cli.command(lambda argv: print('é \\udcff'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("é \\udcff\n".encode(), b"")


def test_a_full_device_is_one_line(environment):
    """Out of memory on a device is one line; other errors of jax keep a traceback."""
    code = (
        "import jax, sys\nfrom bertjax.config import cli\n"
        "def main(argv): raise jax.errors.JaxRuntimeError(argv[0])\ncli.command(main)"
    )
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.0GiB.\nMore"
    for text, full in ((said, True), ("INTERNAL: no such kernel", False)):
        done = subprocess.run(
            [sys.executable, "-c", code, text],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if full else 1)
        assert ("Traceback" in done.stderr) != full
        if full:
            refused(done, "trying to allocate 20.0GiB)", "batch_size", "model.remat")


def test_what_a_part_from_outside_raises_is_one_line(environment, tmp_path):
    """It names the part and its line; the package's own errors keep a traceback."""
    (tmp_path / "thirds.py").write_text("def make_masker():\n    assert {}['a']\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "thirds.py").rename(tmp_path / "mine/thirds.py")
    code = (
        "from bertjax import registry\nfrom bertjax.config import cli\n"
        "def main(argv):\n"
        "    registry.load('data.masking', 'mine.thirds', '')\n    {}\n"
        "cli.command(main)"
    )
    calls = "registry.load('data.masking', 'mine.thirds', '').make_masker()", "1 / 0"
    for call, is_theirs in zip(calls, (True, False), strict=True):
        done = subprocess.run(
            [sys.executable, "-c", code.format(call)],
            env=environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ("Traceback" in done.stderr) != is_theirs
        if is_theirs:
            line = f"KeyError: 'a' ({tmp_path}/mine/thirds.py, line 2)"
            refused(done, f"error: data.masking='mine.thirds': {line}")


def test_show_hashes_do_not_depend_on_where_or_how(command, arguments):
    def show(*more):
        return json.loads(
            succeeded(command("show", *arguments, "--json", *more)).stdout
        )

    every = show("--batches=4")
    assert len(set(every["batch_sha256"])) == 4
    assert every == show("--batches=4", "--config.data.engine=tf")
    assert every["batch_sha256"] == show("--batches=4", "--hosts=4")["batch_sha256"]
    later = show("--step=2", "--batches=2")
    assert later["batch_sha256"] == every["batch_sha256"][2:]
    other = show("--batches=1", "--config.seed=1")
    assert other["batch_sha256"][0] not in every["batch_sha256"]
    assert every["sequences"] == 32 and every["special_selected"] == 0


# ---------------------------------------------------------------- refusals
BAD_TEXT = {
    "missing.txt": None,
    "empty.txt": b"",
    "blank.txt": b"\n\n  \n\n",
    "bad.txt.gz": b"\x1f\x8b\x08\x00garbage",
    "no_text.jsonl": b'{"title": "x"}\n',
    "broken.jsonl": b'{"text": "a"}\n{broken\n',
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text(name, command, arguments, tmp_path):
    path = tmp_path / name
    if BAD_TEXT[name] is not None:
        path.write_bytes(BAD_TEXT[name])
    workdir = tmp_path / "run"
    text = f"--config.data.train={path}"
    refused(command("train", *arguments, text, f"--workdir={workdir}"), name)
    assert not workdir.exists()


@pytest.mark.parametrize(
    "argument, words",
    [
        ("optim.lrr=1", ["lrr", "did you mean"]),
        ("batch_size=abc", ["batch_size"]),
        ("objective=mlmm", ["mlmm", "did you mean"]),
        ("data.length=4096", ["data.length", "max_position_embeddings"]),
        ("mesh.data=3", ["mesh data=3"]),
        ("accumulate=3", ["accumulate=3", "batch_size"]),
        ("init_from=nosuchdir", ["init_from", "nosuchdir"]),
        ("data.vocab=nosuch.txt", ["nosuch.txt"]),
        ("data.train=", ["data.train is empty"]),
        ("data.plan=full_sentences", ["needs sentence pairs"]),
        ("optim.warmup.steps=50", ["optim.warmup is 50 steps"]),
        ("model.vocab_size=10", ["model.vocab_size=10"]),
    ],
)
def test_bad_config(argument, words, command, arguments, tmp_path):
    workdir = tmp_path / "run"
    done = command("train", *arguments, f"--config.{argument}", f"--workdir={workdir}")
    refused(done, *words)
    assert not workdir.exists()


def test_bad_vocabulary(command, arguments, vocabulary, tmp_path):
    lines = (vocabulary / "vocab.txt").read_text(encoding="utf-8").splitlines()
    bad = tmp_path / "vocab.txt"
    bad.write_text("\n".join(x for x in lines if x != "[MASK]"), encoding="utf-8")
    workdir = f"--workdir={tmp_path / 'run'}"
    done = command("train", *arguments, f"--config.data.vocab={bad}", workdir)
    refused(done, "vocab.txt", "[MASK]")


def test_another_config_in_the_workdir(command, arguments, trained):
    more = ["--config.optim.lr=0.5", f"--workdir={trained}"]
    refused(command("train", *arguments, *more), "optim.lr: 0.001 -> 0.5")


def test_other_text_in_the_workdir(command, arguments, trained, corpus, tmp_path):
    """Another path with the same text is the same run; other text is refused, even if
    the run has ended."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    other = tmp_path / "train.txt"
    more = [f"--config.data.train={other}", f"--workdir={workdir}"]
    other.write_text((corpus / "train.txt").read_text())
    assert "is done" in succeeded(command("train", *arguments, *more)).stderr
    other.write_text((corpus / "train.txt").read_text() + "\n\nOne more document.\n")
    refused(command("train", *arguments, *more), "data.train", "text")
    (workdir / "checkpoints/12").rename(tmp_path / "12")
    refused(command("train", *arguments, *more), "data.train", "text")


def forget_the_rules(workdir):
    """Make the workdir one of a version before row rules, which ended after step 8."""
    shutil.rmtree(workdir / "checkpoints/12")
    run = json.loads((workdir / "run.json").read_text())
    assert run.pop("row_rules") == 2
    (workdir / "run.json").write_text(json.dumps(run))


def test_pairs_of_an_older_version_do_not_go_on(command, arguments, trained, tmp_path):
    """Its rows were made differently: train leaves it unchanged, evaluate works."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    forget_the_rules(workdir)
    before = {f: f.read_bytes() for f in workdir.rglob("*") if f.is_file()}
    done = command("train", *arguments, f"--workdir={workdir}")
    refused(done, str(workdir), "older version", "unpacked pairs", "init_from")
    assert {f: f.read_bytes() for f in workdir.rglob("*") if f.is_file()} == before
    succeeded(command("evaluate", f"--workdir={workdir}"))


def test_other_rows_of_an_older_version_go_on(command, arguments, tmp_path):
    whole, old = tmp_path / "whole", tmp_path / "old"
    succeeded(command("train", *arguments, *OF_SENTENCES, f"--workdir={whole}"))
    shutil.copytree(whole, old)
    forget_the_rules(old)
    done = succeeded(command("train", *arguments, *OF_SENTENCES, f"--workdir={old}"))
    assert "resuming after step 8" in done.stderr
    check_same_end(old, whole)


def test_a_checkpoint_of_another_model(command, arguments, trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    more = ["--config.model.hidden_size=64", "--config.total.steps=13"]
    more += ["--allow_config_change", f"--workdir={workdir}"]
    done = command("train", *arguments, *more)
    refused(done, "checkpoints/12 holds another model")


@pytest.mark.parametrize("place", ["run", "run/below", "run/checkpoints"])
def test_a_file_where_a_directory_should_be(place, command, arguments, tmp_path):
    blocked = tmp_path / "run" / "checkpoints"
    if place == "run/checkpoints":
        blocked = tmp_path / "run/checkpoints"
        blocked.parent.mkdir()
    else:
        blocked = tmp_path / "run"
    blocked.write_text("a file")
    workdir = tmp_path / (place if place != "run/checkpoints" else "run")
    refused(command("train", *arguments, f"--workdir={workdir}"), str(blocked))
    assert blocked.read_text() == "a file"


def test_fill_mask_refusals(command, trained):
    model = f"--model={trained}"
    refused(command("fill_mask", model, "no blank here"), "[MASK]")
    refused(command("fill_mask", model), "no text")
    refused(command("fill_mask", "--model=nosuch", "A [MASK]."), "nosuch")
    refused(command("fill_mask", model, "word " * 600 + "[MASK]"), "512")
    refused(command("fill_mask", "A [MASK]."), "--model")


def test_evaluate_refusals(command, trained, tmp_path):
    refused(command("evaluate"), "--workdir or --model")
    refused(command("evaluate", f"--workdir={tmp_path}"), "no checkpoint")
    refused(command("evaluate", f"--workdir={trained}", "--step=5"), "5")
    missing = "--text=nosuch.txt"
    refused(command("evaluate", f"--workdir={trained}", missing), "nosuch.txt")


def test_show_refusals(command, arguments):
    refused(command("show", *arguments, "--hosts=3"), "--hosts=3")
    refused(
        command("show", "--config=bert.py:smoke", "--config.data.train=no.txt"), "no"
    )


# ---------------------------------------------------------------- breakdowns
@pytest.mark.slow
def test_a_full_disk(command, arguments, trained, tmp_path):
    """No file may exceed 20 or 40 kB, which only a checkpoint's files do."""
    workdir = without_last(trained, tmp_path / "run")
    whole = {p: p.read_bytes() for p in (workdir / "checkpoints").rglob("*.json")}

    limit = ["sh", "-c", 'ulimit -f 40 && exec "$@"', "sh"]  # of 512 or 1,024 bytes
    more = ["--config.log.writers=jsonl", f"--workdir={workdir}"]
    env = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = command("train", *arguments, *more, env=env, before=limit)
    refused(done, "cannot write", "checkpoints/12", "File too large", status=1)
    assert manifest.steps(workdir) == [8], "a number on something half-written"
    assert manifest.newest_intact(workdir, pytest.fail) == 8
    assert all(p.read_bytes() == content for p, content in whole.items())
    succeeded(command("train", *arguments, f"--workdir={workdir}"))
    assert parameters(workdir) == parameters(trained)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(command, arguments, tmp_path):
    workdir = tmp_path / "run"
    more = ["--config.optim.lr=1e38", "--config.optim.wd=1e30", "--config.optim.clip=0"]
    more += ["--config.optim.warmup.steps=12", "--config.checkpoint.every.steps=1"]
    more += ["--config.guard.nonfinite=stop"]
    done = command("train", *arguments, *more, f"--workdir={workdir}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if "not finite" in x]
    assert "train/mlm_loss" in line and line.startswith("error: step ")
    step = int(line.split()[2].rstrip(":"))
    good = manifest.newest_intact(workdir, pytest.fail)
    assert f"checkpoint is {good}" in line and good == step - 1
    assert all(x == x for x in train_losses(workdir))


def test_every_command_says_what_it_needs(command):
    for name in ("train", "show", "prepare"):
        refused(command(name), "--config is missing")
    refused(command("train", "--config=bert.py:smoke"), "--workdir is missing")


def test_commands_end_quickly_on_bad_input(command, tmp_path):
    """Errors that need no jax to find are reported before it is imported."""
    (tmp_path / "jax.py").write_text("raise ImportError('not needed for this')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    for argument in ("batch_size=0", "data.train=nosuch.txt", "data.vocab=nosuch.txt"):
        arguments = ["--config=bert.py:smoke", f"--config.{argument}"]
        arguments.append(f"--workdir={tmp_path / 'w'}")
        done = command("train", *arguments, env=env, fresh=True)
        refused(done, argument.split("=")[1])

# SPDX-License-Identifier: Apache-2.0
"""bertjax.compress --recover_steps: which parameters of a compressed model train."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import refused, succeeded
from safetensors.numpy import load_file, save_file

from bertjax import UserError
from bertjax.assembly import prepared_text, validate
from bertjax.assembly.models import open_model
from bertjax.compression.methods import make_recipe
from bertjax.compression.packed import FILE, read_packed
from bertjax.compression.recover import (
    Recovery,
    check_recovery,
    make_config,
    read_recovery,
)
from bertjax.compression.write_model import flatten, make_small


def last(done):
    return json.loads(succeeded(done).stdout.splitlines()[-1])


def leaves(out):
    return flatten(open_model(str(out), "--model").read_params())


@pytest.fixture(scope="module")
def compressed(command, trained, corpus, tmp_path_factory):
    """A function of flags -> (workdir, printed results); each is made once."""
    known = {}

    def make(*flags):
        if flags not in known:
            out = tmp_path_factory.mktemp("recovering") / "small"
            more = f"--text={corpus / 'train.txt'}", "--length=32", "--json"
            given = f"--model={trained}", f"--out={out}", *flags, *more
            known[flags] = out, last(command("compress", *given))
        return known[flags]

    return make


HALF, PAIRS = ("--method=magnitude",), ("--method=magnitude", "--sparsity=2:4")
CODES, STEPS = ("--method=rtn", "--bits=3"), "--recover_steps=24"


@pytest.mark.parametrize("how", [HALF, PAIRS])
def test_zeros_stay_and_the_rest_learns(compressed, how):
    (before, _), (after, done) = compressed(*how), compressed(*how, STEPS)
    found = done["recovery"]
    assert found["objective"] == "mlm+distil" and found["steps"] == 24
    assert found["losses"].keys() == {"loss", "mlm_loss", "kl_loss", "cosine_loss"}
    one, two = leaves(before), leaves(after)
    assert one.keys() == two.keys()
    for path in (p for p in one if p.endswith("kernel") and "/layers/" in p):
        assert np.array_equal(one[path] == 0, two[path] == 0)
        kept = one[path] != 0
        assert (one[path][kept] != two[path][kept]).mean() > 0.9
    # 8-bit tables do not change, nor do parameters that the loss does not use.
    for path in ("encoder/embeddings/word", "nsp/kernel", "encoder/pooler/kernel"):
        assert np.array_equal(one[path], two[path]), path
    packed = flatten(read_packed(after)[0])
    assert all(np.array_equal(packed[p], two[p]) for p in two)
    assert done["bytes"] == (after / FILE).stat().st_size


def test_what_is_quantised_stays_on_its_grid(compressed):
    (before, was), (after, done) = compressed(*CODES), compressed(*CODES, STEPS)
    one, two = (load_file(out / FILE) for out in (before, after))
    codes = [name for name in one if name.endswith((".codes", ".scales", ".zeros"))]
    assert codes and all(np.array_equal(one[name], two[name]) for name in codes)
    biases = [n for n in one if n.endswith("bias.values") and "/layers/" in n]
    assert biases and all((one[n] != two[n]).any() for n in biases)
    assert was["bytes"] < done["bytes"] + 200 and read_packed(after)[1]["recovery"]


def test_a_seed_gives_the_same_bits_and_no_step_the_same_model(compressed):
    steps = "--recover_steps=2", "--json=true"
    (one, _), (two, _) = compressed(*HALF, steps[0]), compressed(*HALF, *steps)
    one, two = leaves(one), leaves(two)
    assert all(np.array_equal(one[p], two[p]) for p in one)
    (before, _), (none, done) = (
        compressed(*HALF),
        compressed(*HALF, "--recover_steps=0"),
    )
    assert "recovery" not in done
    assert load_file(before / FILE).keys() == load_file(none / FILE).keys()
    one, two = leaves(before), leaves(none)
    assert all(np.array_equal(one[p], two[p]) for p in one)


def test_a_model_without_a_head_learns_hidden_states(
    command, compressed, trained, corpus, tmp_path
):
    """A model of sentence-transformers, for example, is only an encoder."""
    there, out = tmp_path / "hf", tmp_path / "small"
    succeeded(command("convert", f"--from={trained}", f"--to={there}", "--format=hf"))

    file = there / "model.safetensors"
    whole = load_file(file)
    own = {k: v for k, v in whole.items() if not k.startswith("cls.")}
    save_file(own, file, {"format": "pt"})
    more = f"--text={corpus / 'train.txt'}", "--length=32", "--json"
    given = f"--model={there}", f"--out={out}", *PAIRS, "--recover_steps=12", *more
    found = last(command("compress", *given))["recovery"]
    assert found["objective"].startswith("distil:kl=0")
    first, then = found["losses"]["cosine_loss"]
    assert then < 0.9 * first


@pytest.fixture
def small(trained):
    opened = open_model(str(trained), "--model")
    return make_small(opened, make_recipe("magnitude"), [])


TASKS = {"classify": ("text", "label"), "retrieve": ("text", "text_pair")}


@pytest.mark.parametrize("how", [(0.5, None), (None, 3)])
@pytest.mark.parametrize("task", [None, *TASKS])
def test_what_is_trained_is_a_valid_config(small, task, how, trained, corpus, tmp_path):
    text, rows = str(corpus / "train.txt"), tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one", "text_pair": "two", "label": "a"}')
    if task:
        small.opened.config.objective = task
        small.opened.config.task.update({key: key for key in TASKS[task]})
    recovery = Recovery(*how, text=text, rows=str(rows) if task else "")
    config = make_config(small, recovery, str(trained), str(trained))
    assert config.objective == (task or "mlm+distil")
    validate.check(config)
    prepared_text.check_inputs(config)


def test_what_a_retriever_learnt_by_is_not_asked_of_its_recovery(small, trained):
    """Recovery drops chunks, which fit another batch size, and margins, which need
    scores that its rows may not have."""
    small.opened.config.objective = "retrieve"
    small.opened.config.task.update(chunks=32, margin_weight=0.5, negatives=3)
    how = Recovery(None, 3, "", rows="rows.jsonl")
    task = make_config(small, how, str(trained), str(trained)).task
    assert (task.chunks, task.margin_weight, task.negatives) == (1, 0.0, 3)


def test_rows_that_teach_no_soft_labels_are_refused(small):
    opened = small.opened._replace(meta={"task": {}})
    opened.config.objective = "classify"
    rows = Recovery(None, 1, "", rows="x.tsv")
    check_recovery(opened, rows)
    opened.config.objective = "seq2seq"
    with pytest.raises(UserError, match=r"--recover_data=x\.tsv: rows of .*seq2seq"):
        check_recovery(opened, rows)


@pytest.mark.slow
def test_a_signal_leaves_nothing(trained, corpus, environment, tmp_path):
    """SIGTERM during recovery ends it in one line, status 143, and leaves no files."""
    scratch, out = tmp_path / "scratch", tmp_path / "small"
    scratch.mkdir()
    given = f"--model={trained}", f"--out={out}", *HALF, f"--text={corpus}/train.txt"
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.compress", *given, "--recover_steps=100000"],
        env=environment | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = itertools.takewhile(lambda x: not x.startswith("step 1/"), process.stderr)
    said = "".join(until)
    (folder,) = scratch.glob("bertjax-recovery-*")
    assert f"recovery: a run in {folder}, which is removed when it has ended" in said
    process.terminate()
    assert "stopped by SIGTERM" in process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert not out.exists() and not list(scratch.glob("bertjax-recovery-*"))


@pytest.mark.slow
def test_minutes_and_the_table(command, trained, corpus, tmp_path):
    out = tmp_path / "grid.md"
    text = corpus / "valid.txt"
    done = command(
        "compress", f"--model={trained}", f"--table={out}", "--method=magnitude",
        "--sparsity=0.5", f"--text={text}", "--length=32", "--recover_minutes=0.05",
        "--metric=mlm_loss", f"--evaluate=--what=mlm --length=32 --text={text}",
    )  # fmt: skip
    lines = succeeded(done).stdout.splitlines()
    assert lines[3].startswith("| magnitude | 50% |")
    assert lines[4].startswith("| magnitude | 50%, recovered |")
    scores = [float(line.split("|")[5].split()[0]) for line in lines[3:]]
    assert scores[1] < scores[0]


@pytest.mark.parametrize(
    "given, said",
    [
        ((1.0, 5, None), "give one"),
        ((None, None, "x.tsv"), "--recover_data=x.tsv: say how long"),
    ],
)
def test_lengths_that_say_nothing(given, said):
    with pytest.raises(UserError, match=said):
        read_recovery(*given, text="")


def test_lengths():
    assert read_recovery(None, None, None, text="x") is None
    assert read_recovery(0.0, None, None, text="x") is None
    assert read_recovery(None, 3, None, text="x") == Recovery(None, 3, "x")


def test_refusals(command, trained, tmp_path):
    out = tmp_path / "out"
    given = f"--model={trained}", f"--out={out}", *HALF, "--recover_steps=2"
    refused(command("compress", *given), "--text is missing", "recovers on texts")
    refused(command("compress", *given, "--recover_data=x.tsv"), "not finetuned")
    missing = f"--text={tmp_path / 'none.txt'}"
    refused(command("compress", *given, missing), "none.txt")
    assert not out.exists()

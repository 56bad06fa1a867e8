# SPDX-License-Identifier: Apache-2.0
"""bertjax.compress from the command line, and its result in other commands."""

import json

import numpy as np
import pytest
from conftest import refused, succeeded
from safetensors.numpy import load_file

from bertjax.assembly.models import open_model
from bertjax.checkpoints import workdir_kinds
from bertjax.compression.packed import FILE, read_packed
from bertjax.compression.write_model import flatten


def last(done):
    return json.loads(succeeded(done).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def small(command, trained, corpus, tmp_path_factory):
    """The trained run with half of its weights pruned, and the printed results."""
    out = tmp_path_factory.mktemp("compressed") / "small"
    how = "--method=sparsegpt", f"--text={corpus / 'train.txt'}", "--rows=8"
    given = f"--model={trained}", f"--out={out}", *how, "--length=32", "--json"
    return out, last(command("compress", *given))


def test_a_workdir_like_any_other(command, arguments, trained, corpus, small, tmp_path):
    out, done = small
    assert done["sparsity"] == pytest.approx(0.5, abs=1e-3) and done["rows"] == 8
    assert done["bytes"] == (out / FILE).stat().st_size < 0.8 * done["bytes_dense"]
    params = flatten(open_model(str(out), "--model").read_params())
    assert done["bytes_dense"] == 4 * sum(leaf.size for leaf in params.values())
    found, recipe = read_packed(out)
    assert recipe["method"] == "sparsegpt" and recipe["pattern"] == "0.5"
    found = flatten(found)
    assert found.keys() == params.keys()
    assert all(np.array_equal(found[k], params[k]) for k in params)
    text = f"--text={corpus / 'valid.txt'}", "--what=mlm", "--json", "--length=32"
    scores = [last(command("evaluate", f"--model={m}", *text)) for m in (trained, out)]
    assert scores[0]["tokens"] == scores[1]["tokens"]
    assert abs(scores[0]["mlm_loss"] - scores[1]["mlm_loss"]) < 0.5
    assert workdir_kinds.kind(out) == workdir_kinds.COMPRESSED
    refused(
        command("train", *arguments, f"--workdir={out}", "--allow_config_change"),
        "a compressed model", "no state to train on from", "init_from",
    )  # fmt: skip


def test_two_of_four_in_torchs_layout(command, trained, tmp_path):
    out, there = tmp_path / "s", tmp_path / "hf"
    how = "--method=magnitude", "--sparsity=2:4"
    succeeded(command("compress", f"--model={trained}", f"--out={out}", *how))
    succeeded(command("convert", f"--from={out}", f"--to={there}", "--format=hf"))
    tensors = load_file(there / "model.safetensors")
    matrices = [k for k in tensors if "encoder.layer" in k and tensors[k].ndim == 2]
    assert len(matrices) == 6 * 2
    for name in matrices:  # [out, in]: 2 of 4 adjacent inputs
        assert ((tensors[name].reshape(-1, 4) != 0).sum(1) == 2).all()


@pytest.mark.parametrize("method, unread", [("rtn", 4), ("gptq", 1)])
def test_flags_that_a_method_does_not_read_are_said(method, unread, tmp_path, capsys):
    from bertjax import UserError, compress

    given = {"text": "no.txt", "length": "9", "rows": "7", "seed": "3"}
    flags = (f"--{name}={value}" for name, value in given.items())
    with pytest.raises(UserError, match="no checkpoint"):  # the error that follows
        compress.main([f"--model={tmp_path}", "--out=X", f"--method={method}", *flags])
    said = [
        f"--{name}={value} is not read by {method}" for name, value in given.items()
    ]
    assert capsys.readouterr().err.splitlines() == said[4 - unread :]


@pytest.mark.slow
def test_training_begins_from_one(command, arguments, small, tmp_path):
    out, _ = small
    more = f"--config.init_from={out}", f"--workdir={tmp_path / 'w'}"
    succeeded(command("train", *arguments, *more))


@pytest.mark.slow
def test_a_table_of_methods(command, trained, corpus, tmp_path):
    out = tmp_path / "grid.md"
    text = corpus / "valid.txt"
    done = command(
        "compress", f"--model={trained}", f"--table={out}", "--method=rtn,magnitude",
        "--bits=4", "--sparsity=2:4", "--metric=mlm_loss",
        f"--evaluate=--what=mlm --length=32 --text={text}",
    )  # fmt: skip
    lines = succeeded(done).stdout.splitlines()
    assert out.read_text().splitlines() == lines and len(lines) == 2 + 3
    assert lines[2].startswith("| dense |") and lines[4].startswith("| magnitude | 2:4")
    assert [p.name for p in tmp_path.iterdir()] == ["grid.md"]


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "--out and --method are needed"),
        (["--out=X", "--method=gptq"], "--text is missing: gptq is calibrated"),
        (["--out=X", "--method=gptq", "--bits=three"], "--bits=three is not a number"),
        (["--out=X", "--method=rtn", "--metric=loss"], "--metric needs --table"),
        (["--table=X.md"], "--table needs --evaluate"),
        (["--out=X", "--method=rtn", "--length=4"], "length"),
    ],
)
def test_refusals(given, said, tmp_path, monkeypatch):
    from bertjax import UserError, compress

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        compress.main([f"--model={tmp_path}", *given])
    assert not list(tmp_path.iterdir())

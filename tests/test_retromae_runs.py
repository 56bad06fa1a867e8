# SPDX-License-Identifier: Apache-2.0
"""RetroMAE by the commands: a run resumes, and is an ordinary encoder afterwards."""

import json

import numpy as np
import pytest
from conftest import read_rows, succeeded, train_losses
from resuming import check_resuming

from bertjax import convert, embed, show, train


@pytest.fixture(scope="module")
def wanted(arguments):
    rest = [a for a in arguments if not a.startswith("--config=")]
    return ["--config=retromae.py:smoke", *rest]


@pytest.fixture(scope="module")
def run(command, wanted, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("retromae") / "run"
    succeeded(command("train", *wanted, f"--workdir={workdir}"))
    return workdir


def test_it_trains_and_resumes(command, wanted, run, tmp_path):
    losses = train_losses(run)
    assert losses[-1] < losses[0]
    last = read_rows(run)[-1]
    for name in ("mlm", "retromae"):
        assert {f"eval/valid/{name}_{x}" for x in ("loss", "accuracy")} <= last.keys()
    check_resuming(command, wanted, run, tmp_path / "again")


def test_what_it_leaves_is_an_encoder(run, tmp_path, capsys):
    """The export reports that it lacks the decoder; its [CLS] vectors are the same."""
    made = tmp_path / "hf"
    capsys.readouterr()
    assert convert.main([f"--from={run}", f"--to={made}", "--format=hf"]) == 0
    said = capsys.readouterr().err
    assert "not written" in said and "retromae/layers" in said
    assert json.loads((made / "config.json").read_text())["model_type"] == "bert"
    text = tmp_path / "lines.txt"
    text.write_text("An object is an instance of a class.\nNames are bound.\n")
    vectors = []
    for model in (run, made):
        out = tmp_path / "vectors.npy"
        given = [f"--model={model}", f"--text={text}", f"--out={out}", "--pooling=cls"]
        assert embed.main(given) == 0
        vectors.append(np.load(out))
    np.testing.assert_allclose(*vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_retriever_begins_from_it(run, tmp_path, capsys):
    lines = (
        {"query": f"what is {x}", "positive": f"{x} is a name"} for x in "abcdefgh"
    )
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(x) + "\n" for x in lines))
    given = ["--config=finetune/retrieve.py:smoke", f"--config.init_from={run}"]
    given += [f"--config.data.train={pairs}", f"--config.data.valid={pairs}"]
    given += ["--config.task.pooling=cls", "--config.batch_size=8"]
    given += ["--config.total.steps=4", f"--workdir={tmp_path}/find"]
    capsys.readouterr()
    train.main(given)
    said = capsys.readouterr().err
    assert "in it, not used: " in said and "retromae/layers/mlp" in said
    assert "missing" not in said


@pytest.mark.slow
def test_a_modern_encoder_trains(command, wanted, tmp_path):
    """Rotary positions, packed rows and no biases; its vectors open as an encoder's."""
    given = ["--config=modern.py:tiny", "--config.objective=retromae", *wanted[1:]]
    given += ["--config.data.mask_unit=word", "--config.batch_size=8"]
    given += ["--config.data.packed=True", "--config.log.every.steps=1"]
    workdir = tmp_path / "run"
    succeeded(command("train", *given, f"--workdir={workdir}"))
    losses = train_losses(workdir)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    text, out = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    text.write_text("An object is an instance of a class.\nNames are bound.\n")
    embed.main([f"--model={workdir}", f"--text={text}", f"--out={out}"])
    assert np.isfinite(np.load(out)).all()


def test_show_counts_the_masks(wanted, capsys):
    capsys.readouterr()
    show.main([*wanted, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["special_selected"] == 0 and found["partial_words"] == 0
    assert 0.2 < found["selected_rate"] < 0.35

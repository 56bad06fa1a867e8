# SPDX-License-Identifier: Apache-2.0
"""Runs whose length, batch size and mask rate change, as planned or in mid-run."""

import json

import pytest
from conftest import read_rows, refused, succeeded, timeless
from resuming import check_resuming, without_last
from test_hosts import NO_DROPOUT

from bertjax.checkpoints import manifest

PHASES = "steps=5 mask_rate=0.3; steps=4 length=16 batch_size=16; length=32"


def facts(workdir):
    return json.loads((workdir / "run.json").read_text())


@pytest.mark.slow
def test_a_run_with_phases_resumes_exactly(command, arguments, tmp_path):
    """A run resumed in its second phase has the rows of an uninterrupted one."""
    planned = [*arguments, f"--config.phases={PHASES}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    begun = succeeded(command("train", *planned, f"--workdir={whole}"))
    assert begun.stderr.count("rows change from") == 2
    said = check_resuming(command, planned, whole, parts)
    assert "rows change from" not in said  # reported at the start of a run
    assert facts(parts)["phases"] == facts(whole)["phases"]
    assert [p["start"] for p in facts(whole)["phases"]] == [0, 5, 9]
    (rows,) = (r for r in read_rows(whole) if r["step"] == 12 and "train/loss" in r)
    assert rows["tokens"] <= 5 * 8 * 32 + 4 * 16 * 16 + 3 * 8 * 32


def test_a_run_whose_objective_changes_resumes_exactly(command, arguments, tmp_path):
    """The first phase is causal, the second masked; the run resumes in the second.

    Both draw a part of the vocabulary for each batch.
    """
    planned = [*arguments, "--config.data.plan=full_sentences"]
    planned += ["--config.objective=mlm:sampled_vocab=64"]
    planned += ["--config.phases=steps=6 objective=clm:sampled_vocab=64;"]
    planned += [*NO_DROPOUT, "--config.model.num_hidden_layers=1"]  # compiles faster
    whole = tmp_path / "whole"
    succeeded(command("train", *planned, f"--workdir={whole}"))
    check_resuming(command, planned, whole, tmp_path / "parts")
    falling = {"clm_loss": False, "mlm_loss": False}  # also of the first phase
    assert facts(tmp_path / "parts")["greater_is_better"] == falling
    trained = {r["step"]: r.keys() for r in read_rows(whole) if "train/loss" in r}
    for step, keys in trained.items():
        name = "clm" if step <= 6 else "mlm"
        assert {k for k in keys if k.endswith("_loss")} == {f"train/{name}_loss"}
    evaluated = {k for r in read_rows(whole) for k in r if k.startswith("eval/")}
    assert {"eval/valid/clm_loss", "eval/valid/mlm_loss"} <= evaluated


@pytest.mark.slow
def test_another_batch_size_in_mid_run_appends_a_phase(
    command, arguments, trained, tmp_path
):
    """The new phase starts at the next example: no row is skipped or repeated."""
    workdir = without_last(trained, tmp_path / "run")
    bigger = [*arguments, "--config.batch_size=16", f"--workdir={workdir}"]
    refused(command("train", *bigger), "batch_size: 8 -> 16", "--allow_config_change")
    succeeded(command("train", *bigger, "--allow_config_change"))
    first, second = facts(workdir)["phases"]
    assert first["first"] == 0 and (second["start"], second["first"]) == (8, 64)
    assert second["batch_size"] == 16
    newest = workdir / "checkpoints" / str(manifest.steps(workdir)[-1])
    assert manifest.read_meta(newest)["phases"] == [first, second]
    # The recorded phases now agree with the config, so nothing changes any more.
    said = succeeded(command("train", *bigger))
    assert "is done: step 12" in said.stderr
    before = [r for r in read_rows(trained) if r["step"] <= 8]
    after = [r for r in read_rows(workdir) if r["step"] <= 8]
    assert timeless(after) == timeless(before)


@pytest.mark.parametrize("name, more", [("show", []), ("train", ["--dry_run"])])
def test_a_length_that_changes_within_an_epoch_is_told(command, arguments, name, more):
    phases = "--config.phases=steps=5 length=16; length=32"
    done = succeeded(command(name, *arguments, *more, phases))
    [line] = [x for x in done.stderr.splitlines() if x.startswith("phases: ")]
    assert "from 16 to 32 tokens" in line and "not seen" in line


@pytest.mark.parametrize(
    "phases, words",
    [
        ("steps=5; length=64000", ["phases", "length=64000"]),
        ("steps=5; lengths=32", ["phases", "did you mean 'length'"]),
        ("steps=5; length=4", ["phases", "length=4"]),
        ("steps=5; mask_rate=1.5", ["phases", "mask_rate=1.5"]),
        ("steps=5 length=32", ["phases", "the last phase is the rest"]),
    ],
)
def test_bad_phases(command, arguments, phases, words):
    refused(command("show", *arguments, f"--config.phases={phases}"), *words)


@pytest.mark.slow
def test_the_evaluation_keeps_its_rate(command, arguments, tmp_path):
    """With any phases, equal parameters have the same evaluation masks and scores."""
    scores = []
    for number, phases in enumerate(("", "steps=1 mask_rate=0.4; mask_rate=0.05")):
        workdir = tmp_path / str(number)
        frozen = [*arguments, "--config.optim.lr=0", "--config.total.steps=2"]
        succeeded(
            command(
                "train", *frozen, f"--config.phases={phases}", f"--workdir={workdir}"
            )
        )
        scores.append([r for r in read_rows(workdir) if any("eval/" in k for k in r)])
    for a, b in zip(*scores, strict=True):
        assert {k: v for k, v in a.items() if k != "tokens"} == {
            k: v for k, v in b.items() if k != "tokens"
        }

# SPDX-License-Identifier: Apache-2.0
"""A host half and a head from outside (tests/lab/swap.py) need no change in bertjax."""

import dataclasses
import json
import types

import numpy as np
import pytest
from conftest import read_rows, timeless

from bertjax import UserError, show, train
from bertjax.assembly import check_objective, command_line
from bertjax.data.features.base import Features, Spec
from bertjax.data.features.mixed import MixedFeatures
from bertjax.measuring import compile_steps, measurements

pytestmark = pytest.mark.usefixtures("no_listener")
SWAP = "--config.objective=lab.swap:rate=0.3"
ROWS = ["--config.batch_size=16", "--config.model.num_hidden_layers=1"]
KINDS = "hidden_dropout", "attention_probs_dropout"
ROWS += [f"--config.model.{kind}_prob=0.0" for kind in KINDS]


def run(arguments, workdir, *more):
    assert train.main([*arguments, *more, f"--workdir={workdir}"]) == 0
    return read_rows(workdir)


def test_it_trains_and_resumes_exactly(arguments, tmp_path):
    rows = run(arguments, tmp_path / "whole", SWAP, *ROWS)
    losses = [r["train/swap_loss"] for r in rows if "train/swap_loss" in r]
    assert len(losses) == 12 and losses[-1] < losses[0]
    evaluated = [r for r in rows if "eval/valid/swap_loss" in r]
    assert evaluated and 0 <= evaluated[-1]["eval/valid/swap_auc"] <= 1
    again = run(arguments, tmp_path / "again", SWAP, *ROWS, "--config.accumulate=2")
    assert [r["train/swap_loss"] for r in again if "train/swap_loss" in r] == (
        pytest.approx(losses, abs=1e-4)
    )
    assert timeless(run(arguments, tmp_path / "twice", SWAP, *ROWS)) == timeless(rows)


@pytest.mark.slow
def test_it_mixes_with_another_by_rows(arguments, tmp_path):
    mixed = "--config.objective=mlm*3+lab.swap*1", "--config.batch_size=32"
    rows = run(arguments, tmp_path / "run", *mixed)
    row = next(r for r in rows if r["step"] == 1)
    parts = 0.75 * row["train/mlm_loss"] + 0.25 * row["train/swap_loss"]
    assert row["train/loss"] == pytest.approx(parts, rel=1e-6)


def test_show_counts_and_colours_it(arguments, capsys):
    hashes = set()
    for hosts in (1, 2, 4):
        show.main([*arguments, SWAP, "--batches=3", f"--hosts={hosts}", "--json"])
        results = json.loads(capsys.readouterr().out)
        hashes.add(tuple(results["batch_sha256"]))
        assert 0.1 < results["swapped"] / results["tokens"] < 0.3
    assert len(hashes) == 1
    show.main([*arguments, SWAP, "--examples=1"])
    assert "swapped" in capsys.readouterr().out


def test_it_is_compiled_and_timed_by_its_specs(arguments):
    import jax

    config = command_line.parse([*arguments, SWAP]).config
    config.model.attention = "xla"
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    (shape,) = target.shapes()
    arrays = target.arrays(shape)
    assert arrays["swap_weights"].shape == (8, config.data.length)
    _, batch = target.lower("train", shape).args_info[0]
    assert batch["swap_labels"].dtype == np.int32
    found = measurements.flops_facts(config, target.objective)
    assert found["flops_per_token"] > 0


def test_what_is_wrong_with_it_is_one_line(arguments, tmp_path):
    for name, said in (
        ("lab.swap:share=1", "option of lab.swap='share' is unknown"),
        ("mlm+lab.swap", r"objective=lab.swap:rate=0.2\*1\+mlm\*1"),
        ("lab.swap*2", None),
    ):
        given = [*arguments, f"--config.objective={name}", f"--workdir={tmp_path}/w"]
        if said is None:
            assert train.main([*given, "--dry_run"]) == 0
            continue
        with pytest.raises(UserError, match=said) as e:
            train.main(given)
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match=r"data\.mask_rate=0.4 has no effect with"):
        train.main([*arguments, SWAP, "--config.data.mask_rate=0.4", "--dry_run"])


def test_rows_longer_than_their_text_say_what_their_slots_are():
    class Doubled(Features):
        raw = 4

    settings = types.SimpleNamespace(tokenizer=None, length=8, streams=())
    with pytest.raises(UserError, match=r"Doubled have 8 slots for 4 tokens.*origin"):
        Doubled(settings).origin({"input_ids": np.zeros((2, 8), np.int32)})


@dataclasses.dataclass
class OneRow:
    """A source of batches of one row, made by its host half."""

    features: object
    start: int = 0

    def batch(self, step, rows):
        return self.features.made

    @property
    def specs(self):
        return {"x": Spec((3,), "float32")}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"x": np.zeros((1, 3), np.float64)}, ""),
        ({}, r"'x' is float32 \[1, 3\] of a row, its make\(\) does not make it$"),
        ({"x": np.zeros((1, 2), np.float32)}, r"makes float32 \[1, 2\]$"),
        ({"x": np.zeros((1, 3), complex)}, r"makes complex128 \[1, 3\]$"),
        ({"x": [[0.0] * 3]}, r"makes list \[1, 3\]$"),
    ],
)
def test_arrays_are_as_their_host_half_states_them(made, said, mixed):
    class Half:
        pass

    half = Half()
    half.made = made
    if mixed:
        whole = MixedFeatures.__new__(MixedFeatures)
        whole.parts, half = [half], whole
    batches = OneRow(half)
    if not said:
        return check_objective.check_arrays(batches)
    with pytest.raises(UserError, match=said):
        check_objective.check_arrays(batches)

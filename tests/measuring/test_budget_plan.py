# SPDX-License-Identifier: Apache-2.0
"""Planning a budget of minutes on this machine: sizes, steps, and the choice."""

import json
import shlex

import pytest

from bertjax import UserError, preflight
from bertjax.assembly import command_line
from bertjax.measuring import budget_plan

SECONDS = {"tiny": 0.1, "mini": 0.4, "small": 3.0, "medium": 9.0, "base": 60.0}
LAYERS = {"tiny": 1e6, "mini": 4e6, "small": 2e7, "medium": 4e7, "base": 1e8}


def fake_times(monkeypatch):
    timed = []

    def time_config(config, seconds):
        widths = {128: "tiny", 256: "mini", 384: "small", 512: "medium", 768: "base"}
        size = widths[config.model.hidden_size]
        timed.append(size)
        return {
            "layers": config.model.num_hidden_layers,
            "width": config.model.hidden_size,
            "length": config.data.length,
            "batch_size": config.batch_size,
            "parameters": LAYERS[size],
            "layer_parameters": LAYERS[size],
            "step_seconds": SECONDS[size],
            "slots": 2048.0,
            "device": "cpu",
            "devices": 1,
        }

    monkeypatch.setattr(budget_plan, "time_config", time_config)
    return timed


def plan(minutes, *argv):
    return budget_plan.plan_budget([*argv], minutes, lambda text: None)


def test_the_largest_size_that_sees_enough_tokens_is_chosen(monkeypatch):
    timed = fake_times(monkeypatch)
    found = plan(180, "--config=modern.py")
    chosen = found["sizes"][found["chosen"]]
    enough = budget_plan.TOKENS_A_PARAMETER
    steps = {name: int(180 * 60 / seconds) for name, seconds in SECONDS.items()}
    fit = [n for n in SECONDS if steps[n] * 2048 / LAYERS[n] >= enough]
    assert chosen["config"] == f"modern.py:{fit[-1]}"
    assert chosen["steps"] == steps[fit[-1]]
    assert chosen["tokens"] == steps[fit[-1]] * 2048
    # Much too large sizes are not timed.
    assert "base" not in timed
    lines = [*budget_plan.describe(found, ["--config.seed=3"])]
    assert f"--config=modern.py:{fit[-1]} --config.seed=3" in lines[-1]
    assert f"--config.total.steps={chosen['steps']}" in lines[-1]


def test_a_size_that_is_named_is_taken_however_few_the_minutes(monkeypatch):
    timed = fake_times(monkeypatch)
    found = plan(1, "--config=modern.py:small")
    assert timed == ["small"] and found["chosen"] == 0
    assert len(found["sizes"]) == 1


def test_where_no_size_sees_enough_the_smallest_is_named_and_said_so(monkeypatch):
    fake_times(monkeypatch)
    found = plan(0.01, "--config=modern.py")
    assert found["sizes"][found["chosen"]]["config"] == "modern.py:tiny"
    assert "none sees" in "\n".join(budget_plan.describe(found, []))


def test_the_command_that_is_printed_can_be_run(monkeypatch):
    """With any values, and any number of minutes in which a step fits."""
    fake_times(monkeypatch)
    rest = ["--config.phases=percent=50 length=64; length=128"]
    end = ["--config.total.steps=1", "--workdir=DIR"]
    found = plan(0.002, "--config=modern.py:tiny")
    *_, line = budget_plan.describe(found, rest)
    assert shlex.split(line)[4:] == [*rest, "--config.data.train=FILES", *end]
    text = "--config.data.train=a.txt"
    found = plan(0.002, "--config=modern.py:tiny", text)
    *_, line = budget_plan.describe(found, [*rest, text])
    assert shlex.split(line)[4:] == [*rest, text, *end]
    found = plan(0.0001, "--config=modern.py:tiny")
    *_, line = budget_plan.describe(found, rest)
    assert line == "  not one step fits"


def test_the_last_config_counts_and_faults_in_it_are_said(monkeypatch, tmp_path):
    timed = fake_times(monkeypatch)
    plan(10, "--config=modern.py:tiny", "--config=modern.py:mini")
    assert timed == ["mini"]
    with pytest.raises(UserError, match=r"^init_from=nowhere: no such directory"):
        plan(10, "--config=modern.py:tiny", "--config.init_from=nowhere")
    file = tmp_path / "mine.py"
    for text in ("def get_config(:", "SIZES = 3\nraise ValueError('odd')"):
        file.write_text(text)
        with pytest.raises((SyntaxError, ValueError, UserError)) as e:
            plan(10, f"--config={file}")
        assert "mine.py" in str(e.value)


@pytest.mark.parametrize(
    "more, words",
    [
        ([], "name their columns, task.text and task.label"),
        (["--config.task.text=a"], "task.label is empty: name the column"),
    ],
)
def test_columns_are_checked_before_anything_is_timed(monkeypatch, more, words):
    timed = fake_times(monkeypatch)
    with pytest.raises(UserError, match=words):
        plan(10, "--config=finetune/classify.py", *more)
    assert not timed
    keys = "task.text=a task.label=b model.hidden_size=768 model.num_hidden_layers=12"
    plan(10, "--config=finetune/classify.py", *(f"--config.{k}" for k in keys.split()))
    assert timed == ["base"]


def test_shares_of_phases(monkeypatch):
    def config(phases):
        flags = ["--config=modern.py:tiny", f"--config.phases={phases}"]
        return command_line.parse(flags).config

    share = budget_plan.phase_shares
    assert share(config("percent=25 length=32; length=64")) == [0.25, 0.75]
    assert share(config("")) == [1.0]
    with pytest.raises(UserError, match=r"^phases: .*percent"):
        share(config("steps=25 length=32; length=64"))


def test_a_real_step_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(budget_plan, "SECONDS", 0.05)
    argv = ["--config=modern.py:smoke", "--budget_minutes=2", "--what=cpu", "--json"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert preflight.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    (size,) = found["sizes"]
    assert size["steps"] == int(120 / size["step_seconds"]) > 0
    assert size["tokens"] == size["steps"] * size["batch_size"] * size["length"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--budget_minutes=10"],
        ["--what=cpu"],
        ["--budget_minutes=0", "--what=cpu"],
        ["--budget_minutes=10", "--what=tpu"],
        ["--budget_minutes=10", "--what=cpu", "--topology=v5e:2x4"],
    ],
)
def test_what_does_not_go_together_is_refused(argv):
    with pytest.raises(UserError, match=r"^--"):
        preflight.main(argv)

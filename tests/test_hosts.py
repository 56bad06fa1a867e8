# SPDX-License-Identifier: Apache-2.0
"""Several processes, as on a pod, by launch/local_hosts.py, against one process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_rows, refused, succeeded, timeless, train_losses

from bertjax import RunError, UserError, train
from bertjax.checkpoints import manifest
from bertjax.config.arguments import load_config
from bertjax.parallel.hosts import (
    ADDRESS,
    INDEX,
    NUMBER,
    check_equal,
    check_settings,
    initialize,
)

NO_DROPOUT = [
    "--config.model.hidden_dropout_prob=0.0",
    "--config.model.attention_probs_dropout_prob=0.0",
]


def start(hosts, devices, arguments, environment):
    return subprocess.Popen(
        [
            *(sys.executable, "launch/local_hosts.py"),
            *(f"--hosts={hosts}", f"--devices={devices}", "--grace=40"),
            *("--", *arguments),
        ],
        cwd=ROOT,
        # Programs with collectives cannot come from a cache.
        env=environment | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(*given):
    """Return (exit status, output)."""
    process = start(*given)
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said


@pytest.fixture(scope="module")
def without_dropout(arguments):
    few = ["--config.model.num_hidden_layers=1", "--config.log.writers=jsonl"]
    return [*arguments, *NO_DROPOUT, *few]


def test_two_processes(command, without_dropout, environment, tmp_path):
    # Do not evaluate: both processes would compile more programs.
    arguments = [*without_dropout, "--config.total.steps=4", "--config.data.valid="]
    alone, together = tmp_path / "alone", tmp_path / "together"
    succeeded(command("train", *arguments, f"--workdir={alone}"))
    arguments.append(f"--workdir={together}")
    code, said = launch(2, 2, arguments, environment)
    assert code == 0, said
    assert train_losses(together) == pytest.approx(train_losses(alone), rel=1e-5)
    a, b = (timeless(read_rows(w))[-1] for w in (alone, together))
    assert a == pytest.approx(b, rel=1e-5)
    run = json.loads((together / "run.json").read_text())
    assert (run["processes"], run["devices"]) == (2, 4)


@pytest.mark.slow
def test_two_processes_go_on_and_end_together(without_dropout, environment, tmp_path):
    """A finished run does not change; an invalid config ends all with status 2."""
    arguments = [*without_dropout, "--config.total.steps=4", f"--workdir={tmp_path}/w"]
    code, said = launch(2, 1, arguments, environment)
    assert code == 0, said
    rows = read_rows(tmp_path / "w")
    code, said = launch(2, 1, arguments, environment)
    assert code == 0 and "done" in said
    assert read_rows(tmp_path / "w") == rows
    code, said = launch(2, 1, [*arguments, "--config.optim.lrr=1"], environment)
    assert code == 2 and "lrr" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "x"}, "JAX_NUM_PROCESSES=x"),
        ({"JAX_COORDINATOR_ADDRESS": "here"}, "JAX_COORDINATOR_ADDRESS=here"),
    ],
)
def test_processes_that_nothing_tells_of_the_others(monkeypatch, given, said):
    for name in (ADDRESS, NUMBER, INDEX, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def too_late(**settings):  # raises what jax would raise in a new process
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", too_late)
    with pytest.raises(UserError, match=said):
        initialize(120, 240)


def test_processes_that_cannot_be_joined(monkeypatch):
    def taken(**settings):
        assert settings["initialization_timeout"] > 300  # our error comes first
        raise RuntimeError("UNKNOWN: Failed to start RPC server\nat once")

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr("jax.distributed.initialize", taken)
    with pytest.raises(RunError, match="cannot join the others: UNKNOWN: Failed to"):
        initialize(120, 240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index, said",
    [(0, "not all of the 2 hosts came there"), (1, "host 0, which coordinates, does")],
)
def test_processes_that_do_not_come(command, arguments, tmp_path, index, said):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    env |= {"JAX_PROCESS_ID": str(index), "JAX_PLATFORMS": "cpu"}
    more = ["--multihost", f"--workdir={tmp_path}", "--config.hosts.timeout=2"]
    begun = time.monotonic()
    done = command("train", *arguments, *more, env=env)
    refused(done, said, address, f"host {index} of 2", "in 5 s", status=1)
    assert "***" not in done.stderr and time.monotonic() - begun < 60


def test_a_jax_that_keeps_its_service_elsewhere(monkeypatch):
    """Several processes need the service, so one line says what is missing."""
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr("jax.distributed.initialize", lambda **how: None)
    monkeypatch.setattr("jax._src.distributed.global_state.client", object())
    with pytest.raises(UserError, match=r"\(no key_value_set key_value_dir_get\)"):
        initialize(120, 240)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    with pytest.raises(UserError, match=r"jax \S+ has its.*elsewhere than 0\.10 to 0"):
        initialize(120, 240)


def test_processes_that_differ(monkeypatch):
    monkeypatch.setattr("bertjax.parallel.hosts.from_primary", lambda value: ["b"])
    with pytest.raises(RunError, match="process 0 differs in the text"):
        check_equal("the text", ["a"])


def test_processes_of_other_settings(monkeypatch):
    """Settings must agree, or each host would train with its own learning rate."""
    own = load_config("bert.py:smoke")
    settings = train.shared_settings(own)
    assert settings["optim.lr"] == own.optim.lr and "bertjax" in settings
    told = {**json.loads(json.dumps(settings)), "optim.lr": 0.5}
    monkeypatch.setattr("bertjax.parallel.hosts.from_primary", lambda value: told)
    with pytest.raises(UserError, match=r"host 0: optim\.lr: 0\.5 -> 0\.0"):
        check_settings(settings)
    own.optim.lr, own.data.train = 0.5, "/elsewhere/text"
    check_settings(train.shared_settings(own))


def test_batches_do_not_depend_on_hosts(command, without_dropout):
    found = [
        json.loads(succeeded(command("show", *without_dropout, "--json", *more)).stdout)
        for more in (["--batches=20"], ["--batches=20", "--hosts=2"])
    ]
    assert found[0]["batch_sha256"] == found[1]["batch_sha256"]


def test_a_batch_that_does_not_divide(command, without_dropout, environment, tmp_path):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    more = [f"--workdir={tmp_path / 'w'}"]
    refused(command("train", *without_dropout, *more, env=env), "batch_size=8", "3")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all(without_dropout, environment, tmp_path):
    workdir = tmp_path / "run"
    arguments = [*without_dropout, "--config.total.steps=3000"]
    process = start(2, 2, [*arguments, f"--workdir={workdir}"], environment)
    rows = workdir / "metrics.jsonl"
    while process.poll() is None:
        if rows.exists() and rows.read_bytes().count(b"\n") > 3:
            process.send_signal(signal.SIGTERM)
            break
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 143, said
    written = read_rows(workdir)
    assert not any("stop" in row for row in written)
    last = written[-1]["step"]
    assert manifest.steps(workdir)[-1] == last < 3000


@pytest.mark.slow
def test_killed_and_gone_on_with_on_other_numbers_of_hosts(
    command, without_dropout, environment, corpus, tmp_path
):
    """A packed mixture with phases, killed on 1, 2 and 4 hosts, loses nothing."""
    train, valid = corpus / "train.txt", corpus / "valid.txt"
    arguments = [
        *without_dropout,
        f"--config.data.train=a={train},b={valid}",
        "--config.data.weights=a=1,b=1",
        "--config.data.packed=True",
        "--config.data.valid=",
        "--config.total.steps=60",
        "--config.phases=steps=30 mask_rate=0.3; batch_size=16",
        "--config.checkpoint.every.steps=5",
    ]
    hashes = [
        json.loads(
            succeeded(
                command("show", *arguments, f"--hosts={n}", "--batches=40", "--json")
            ).stdout
        )["batch_sha256"]
        for n in (1, 2, 4)
    ]
    assert hashes[0] == hashes[1] == hashes[2] and len(set(hashes[0])) == 40
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeeded(command("train", *arguments, f"--workdir={whole}"))
    arguments.append(f"--workdir={killed}")
    rows = killed / "metrics.jsonl"
    for hosts, kill_at in ((1, 12), (2, 25), (4, 44)):
        process = start(hosts, 1, arguments, environment)
        while process.poll() is None:
            if rows.exists() and rows.read_bytes().count(b"\n") >= kill_at:
                os.killpg(process.pid, signal.SIGKILL)
                break
        process.communicate(timeout=200)
        assert process.returncode != 0
    code, said = launch(2, 1, arguments, environment)
    assert code == 0, said
    assert train_losses(killed) == pytest.approx(train_losses(whole), rel=1e-5)
    assert [(r["step"], r["tokens"]) for r in read_rows(killed)] == [
        (r["step"], r["tokens"]) for r in read_rows(whole)
    ]


@pytest.mark.slow
def test_every_layout_makes_the_same_run(
    command, without_dropout, environment, tmp_path
):
    """20 steps on 1 device, 8 devices, 2 x 4 devices, and with accumulation over 4."""
    arguments = [*without_dropout, "--config.total.steps=20"]
    arguments += ["--config.batch_size=16"]
    compiled = {"XLA_FLAGS": ""}

    def run(name, *more, flags=""):
        workdir = tmp_path / name
        env = {"XLA_FLAGS": flags}
        done = command("train", *arguments, *more, f"--workdir={workdir}", env=env)
        succeeded(done)
        return workdir

    eight = "--xla_force_host_platform_device_count=8"
    one = run("one")
    others = [
        run("eight", flags=eight),
        run("fsdp", "--config.mesh.data=2", "--config.mesh.fsdp=4", flags=eight),
        run("accumulated", "--config.accumulate=4"),
        tmp_path / "hosts",
    ]
    given = [*arguments, f"--workdir={others[-1]}"]
    code, said = launch(2, 4, given, environment | compiled)
    assert code == 0, said
    for workdir in others:
        assert train_losses(workdir) == pytest.approx(train_losses(one), rel=1e-5)
        assert [r["tokens"] for r in read_rows(workdir)] == [
            r["tokens"] for r in read_rows(one)
        ]
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_a_budget_ends_on_all_hosts_at_the_same_step(
    without_dropout, environment, tmp_path
):
    """Host 0's clock counts for all; the same command again does nothing."""
    workdir = tmp_path / "run"
    arguments = [
        *without_dropout,
        "--config.budget_minutes=0.05",
        "--config.optim.warmup.percent=10",
        "--config.total.steps=100000",
        "--config.eval.every.steps=100000",
        "--config.checkpoint.every.steps=100000",
        f"--workdir={workdir}",
    ]
    code, said = launch(2, 1, arguments, environment)
    assert code == 0 and "2 hosts: done" in said, said
    last = read_rows(workdir)[-1]["step"]
    assert manifest.steps(workdir) == [last] and 1 < last < 100_000
    assert train_losses(workdir) and read_rows(workdir)[-2]["budget/share"] == 1
    rows = read_rows(workdir)
    code, said = launch(2, 1, arguments, environment)
    assert code == 0 and f"done: step {last}" in said, said
    assert read_rows(workdir) == rows

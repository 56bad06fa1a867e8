# SPDX-License-Identifier: Apache-2.0
"""A run killed by SIGKILL at any moment resumes to the same parameters and rows."""

import contextlib
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_rows, succeeded
from resuming import check_same_end

from bertjax.checkpoints import manifest


def kill_at(moment, arguments, environment, workdir):
    """Start a run and kill it at a moment; True if it was still running.

    moment: ("row", n) once n rows of training are written, ("saving", n) while a
    checkpoint after step n is written, ("time", s) s seconds after the start.
    """
    kind, value = moment
    rows, folder = workdir / "metrics.jsonl", workdir / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.train", *arguments, f"--workdir={workdir}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    begun = time.monotonic()

    def reached():
        if kind == "time":
            return time.monotonic() - begun > value
        if kind == "row":
            return rows.exists() and rows.read_bytes().count(b'"train/loss"') >= value
        there = folder.glob("saving-*") if folder.is_dir() else ()
        return any(int(p.name.split("-")[1]) > value for p in there)

    while process.poll() is None and not reached():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)  # leave the cores to others
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check(command, arguments, environment, tmp_path, kills, steps, seed):
    arguments = [
        *arguments,
        f"--config.total.steps={steps}",
        "--config.eval.every.steps=50",
        "--config.log.writers=jsonl",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeeded(command("train", *arguments, f"--workdir={whole}", env=environment))
    draw = random.Random(seed)
    hits = 0
    for i in range(kills):
        saved = (manifest.steps(killed) or [0])[-1]
        moment = {
            0: ("row", saved + draw.randrange(1, 8)),
            1: ("saving", saved),
            2: ("time", draw.uniform(0.5, 4.0)),
        }[i % 3]
        hits += kill_at(moment, arguments, environment, killed)
        for step in manifest.steps(killed):
            folder = killed / "checkpoints" / str(step)
            assert manifest.problem(folder) is None, "a number on something unfinished"
    assert hits >= kills * 2 // 3, "the run is too short to be killed so often"
    succeeded(command("train", *arguments, f"--workdir={killed}", env=environment))
    rows = read_rows(killed)
    assert [r["step"] for r in rows if "train/loss" in r] == list(range(1, steps + 1))
    check_same_end(killed, whole)


@pytest.mark.slow
def test_two_kills(command, arguments, environment, tmp_path):
    check(command, arguments, environment, tmp_path, kills=2, steps=40, seed=0)


@pytest.mark.slow
def test_ten_kills_as_users_compile(command, arguments, environment, tmp_path):
    environment = environment | {"XLA_FLAGS": ""}
    check(command, arguments, environment, tmp_path, kills=10, steps=150, seed=1)

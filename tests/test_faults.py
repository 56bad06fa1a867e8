# SPDX-License-Identifier: Apache-2.0
"""Faults of a pod, on 2 and 4 processes of this machine.

Only the steps since the last save are lost, nothing hangs longer than the limit, and
one line says what happened.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import read_rows, refused, succeeded, train_losses
from test_hosts import NO_DROPOUT, start

from bertjax.checkpoints import manifest

LIMIT = 20  # seconds, hosts.timeout
STEPS = 90
# Either the host's silence or its missing step is noticed first, within a second.
SILENT = {
    0: r"host 0, which coordinates|host 0 stands still",
    1: r"host 1 gives no sign|host 1 stands still",
}


@pytest.fixture(scope="module")
def faulty(arguments):
    return [
        *arguments,
        *NO_DROPOUT,
        f"--config.total.steps={STEPS}",
        "--config.data.valid=",
        "--config.checkpoint.every.steps=5",
        "--config.log.writers=jsonl",
        f"--config.hosts.timeout={LIMIT}",
    ]


def hosts_of(launcher: subprocess.Popen) -> dict[int, int]:
    """Return {index: process id} of a launcher's processes."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    found = {}
    for pid in map(int, children.split()):
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (index,) = (x.split(b"=")[1] for x in said if x.startswith(b"JAX_PROCESS_ID="))
        found[int(index)] = pid
    return found


def last_saved(workdir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return (manifest.steps(workdir) or [0])[-1]


def last_row(workdir: Path) -> int:
    """Return the step of the last complete row of a run that is still training."""
    lines = (workdir / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def strike(workdir, hosts, victim, number, arguments, environment):
    """Run, send one host a signal after the first save; return (status, output,
    seconds from the signal to the end)."""
    before = last_saved(workdir)
    process = start(hosts, 1, [*arguments, f"--workdir={workdir}"], environment)
    try:
        # Wait for a save too: rows of the previous run are in the file until this one
        # resumes, and then some of its processes may not have started yet.
        while not (
            last_saved(workdir) > before and last_row(workdir) > last_saved(workdir) + 1
        ):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        os.kill(hosts_of(process)[victim], number)
        struck = time.monotonic()
        said, _ = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said, time.monotonic() - struck


@pytest.mark.slow
def test_lost_hosts(command, faulty, environment, tmp_path):
    """A run that goes through every fault in turn ends like an uninterrupted one."""
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    succeeded(command("train", *faulty, f"--workdir={whole}"))
    faults = [
        (2, 1, signal.SIGTERM, 143, ["stopped by a signal"]),
        (4, 3, signal.SIGKILL, 137, ["host 3 was lost .SIGKILL", "host 3 gives no"]),
        (2, 0, signal.SIGKILL, 137, ["host 0 was lost .SIGKILL"]),
        (2, 1, signal.SIGSTOP, 1, ["host 1 was stopped", SILENT[1]]),
        (4, 0, signal.SIGSTOP, 1, ["host 0 was stopped", SILENT[0]]),
        (4, 2, signal.SIGTERM, 143, ["stopped by a signal"]),
    ]
    for hosts, victim, number, status, words in faults:
        code, said, seconds = strike(struck, hosts, victim, number, faulty, environment)
        saved = manifest.steps(struck)[-1]
        rows = train_losses(struck)
        assert code == status, said
        for word in words:
            assert re.search(word, said), said
        assert seconds < 5 * LIMIT, said
        assert manifest.problem(struck / "checkpoints" / str(saved)) is None
        # Two steps may be in flight, and a save in progress.
        assert len(rows) - saved <= (0 if number == signal.SIGTERM else 11)
    succeeded(command("train", *faulty, f"--workdir={struck}"))
    assert [r["step"] for r in read_rows(struck)] == list(range(1, STEPS + 1))
    assert train_losses(struck) == pytest.approx(train_losses(whole), rel=1e-5)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB; skipped if this machine does not allow to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a small disk cannot be mounted: there is no mount")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_during_a_save(command, faulty, environment, small_disk):
    """With one process and with two the run ends in one line, and resumes once there is
    space."""
    workdir, filler = small_disk / "run", small_disk / "filler"
    short = [*faulty, f"--workdir={workdir}", "--config.total.steps=30"]
    succeeded(command("train", *short, "--config.total.steps=10"))
    saved = manifest.steps(workdir)
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(max(free - 100_000, 0)))
    more = [*short, "--allow_config_change"]
    refused(command("train", *more), "cannot write", "checkpoints/15", status=1)
    assert manifest.steps(workdir) == saved
    assert not list((workdir / "checkpoints").glob("saving-*"))
    process = start(2, 1, more, environment)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 1 and "Traceback" not in said, said
    # The save fails or, during it, the write of a row.
    assert "cannot write" in said or "cannot be written" in said
    assert manifest.steps(workdir) == saved
    filler.unlink()
    succeeded(command("train", *more))
    steps = [r["step"] for r in read_rows(workdir) if "train/loss" in r]
    assert steps == list(range(1, 31))


def test_a_checkpoint_damaged_in_each_of_its_files(trained, tmp_path):
    """Any file of a checkpoint that is truncated, changed or missing is detected."""
    before, newest = manifest.steps(trained)[-2:]
    names = [*manifest.files(trained / "checkpoints" / str(newest)), manifest.MANIFEST]
    assert len(names) > 5
    for i, name in enumerate(names):
        workdir = tmp_path / str(i)
        shutil.copytree(trained / "checkpoints", workdir / "checkpoints")
        path = workdir / "checkpoints" / str(newest) / name
        data = path.read_bytes()
        kind = i % 3 if data else 2
        if kind == 2:
            path.unlink()
        else:
            flipped = data[:-1] + bytes([data[-1] ^ 1])
            path.write_bytes(data[: len(data) // 2] if kind == 0 else flipped)
        said: list[str] = []
        assert manifest.newest_intact(workdir, said.append) == before
        (line,) = said
        assert f"checkpoints/{newest} is damaged" in line
        assert (workdir / "damaged" / str(newest)).is_dir()

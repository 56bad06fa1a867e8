# SPDX-License-Identifier: Apache-2.0
"""Signals while temporary files exist, and while the main thread runs C code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertjax.training import signals

# A call in C that does not return to Python before the process ends.
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
CODE = """
import hashlib, signal, sys, tempfile, time
from bertjax.training.signals import StopCommand, Stopped
stop = StopCommand(grace=0.5)
stop.install()
try:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("ready", flush=True)
        {wait}
except Stopped as e:
    sys.exit(e.status)
"""


def wait_until_in_c(process):
    """Wait until the process has used processor time: after "ready" only IN_C does."""

    def computed():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1]
        return int(fields.split()[11])  # ticks of user time

    begun = computed()
    while computed() < begun + 20:
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("wait, left", [("time.sleep(300)", 0), (IN_C, 1)])
def test_a_command_is_stopped(number, wait, left, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(wait=wait), tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    if wait is IN_C:
        wait_until_in_c(process)
    process.send_signal(number)
    said, error = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert (said, error) == ("", f"stopped by {number.name}\n")
    assert len(list(tmp_path.iterdir())) == left


def test_a_run_that_waits_for_others_leaves_at_once():
    code = f"""
import hashlib
from bertjax.training.signals import StopSignal
StopSignal().install()
print("ready", flush=True)
{IN_C}
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    wait_until_in_c(process)
    process.terminate()
    assert process.wait(timeout=120) == 128 + signal.SIGTERM


def test_signals_of_others_stop_nothing():
    """Other code's handlers of SIGUSR1 or SIGALRM cause bytes in the same pipe."""
    noted = []
    listener = signals.StopSignal()
    listener._note = noted.append
    reader, writer = os.pipe()
    os.write(writer, bytes([signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM]))
    os.close(writer)
    listener._listen(reader)
    os.close(reader)
    assert noted == [signal.SIGTERM]


def test_a_signal_that_comes_again_is_no_later(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop = signals.StopSignal()
    stop.training = True
    assert not stop.overdue
    for now[0] in (1.0, 5.0, 1.0 + signals.GRACE):
        stop._note(signal.SIGTERM)
        assert not stop.overdue
    now[0] += 1.0
    assert stop.overdue and stop.status == 128 + signal.SIGTERM

# SPDX-License-Identifier: Apache-2.0
"""What a program needs of memory, without waiting for its machine code.

The TPU compiler knows a program's memory seconds after it began, and then writes
machine code for minutes; no option leaves that out. So it compiles in a process of its
own, which is ended once the compiler's report is on the disk.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import RunError
from bertjax import config as c
from bertjax.training.signals import STOPS

RESULT = "facts.json"
DONE = "*.after_optimizations.txt"  # written after the report
REPORT = "*after_optimizations-memory-usage-report.txt"
LOOK = 0.1  # seconds between looks


def needed(
    config: ConfigDict, vocab_size: int, topology: str, step: str, shape: Sequence[int]
) -> dict[str, Any]:
    """Return fits, and the bytes `needed` on a device: inputs and temporaries.

    step: "train" or "eval"; shape: see compiled.Shape. Raises RunError where the
    compiler fails for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = c.to_json(config), vocab_size, topology, step, shape, name
        process = multiprocessing.get_context("spawn").Process(
            target=_compile, args=job, daemon=True
        )
        # Signals do not reach it, whatever handlers the compiler has: it is ended here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            while process.is_alive() and not list(folder.glob(DONE)):
                time.sleep(LOOK)
            if not list(folder.glob(DONE)):  # refused
                return _result(folder)
        finally:
            process.kill()
            process.join()
        (report,) = folder.glob(REPORT)
        return {"fits": True, "needed": total(report.read_text())}


def total(report: str) -> int:
    """Read the bytes of a device's memory from the compiler's report.

    Raises ValueError where it has another form.
    """
    found = re.search(r"\(color=0\)\s+Total bytes: (\d+)", report)
    if not found:
        raise ValueError("the compiler's report of memory is of an unknown form")
    return int(found[1])


def _result(folder: Path) -> dict[str, Any]:
    """Read what a process left that came to its end."""
    try:
        return json.loads((folder / RESULT).read_text())
    except FileNotFoundError as e:
        raise RunError("the TPU compiler failed: its message is above") from e


def _compile(
    config: str, vocab_size: int, topology: str, step: str, shape: Any, folder: str
) -> None:
    """Compile in a process of its own; the compiler reports into the folder."""
    from bertjax.measuring import compiled, topologies

    # Nobody waits for what outlives the command, however that ended.
    end = threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True)
    end.start()
    given = c.from_json(config)
    devices = topologies.find_devices(topology)
    target = compiled.Target(given, vocab_size, topology, devices)
    lowered = target.lower(step, compiled.Shape(*shape))
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    found = compiled.compile_lowered(lowered, options)
    said = {"fits": found["fits"], "needed": compiled.memory_bytes(found)}
    Path(folder, RESULT).write_text(json.dumps(said))


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

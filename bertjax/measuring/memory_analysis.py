# SPDX-License-Identifier: Apache-2.0
"""What a program needs of memory and sends, without waiting for its machine code.

The TPU compiler knows a program's memory seconds after it began, and then writes
machine code for minutes; no option leaves that out. So it compiles in a process of its
own, which is ended once the compiler's report is on the disk. What the machine code
itself takes of the memory is not in the report.
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
from bertjax.config import serialize
from bertjax.measuring import hlo
from bertjax.training.signals import STOPS

RESULT = "facts.json"
REPORT = "*.after_optimizations-memory-usage-report.txt"
TEXT = "*.after_optimizations.txt"  # written after the report
LOOK = 0.1  # seconds between looks
# Bytes that are left for the code of a program that was not compiled to the end: of
# the shipped configs' programs the largest has 0.46 GiB (electra.py:base).
PROGRAM = 2**29


def needed(
    config: ConfigDict, vocab_size: int, topology: str, step: str, shape: Sequence[int]
) -> dict[str, Any]:
    """Return fits, the bytes `needed` on a device (inputs, temporaries), collectives.

    step: "train" or "eval"; shape: see compiled.Shape; collectives: see hlo. Where the
    compiler refuses there are none. Raises RunError where it fails for another reason
    than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = serialize.to_json(config), vocab_size, topology, step, shape, name
        process = multiprocessing.get_context("spawn").Process(
            target=_compile, args=job, daemon=True
        )
        # Signals do not reach it, whatever handlers the compiler has: it is ended here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            found = None
            while process.is_alive() and (found := early(folder)) is None:
                time.sleep(LOOK)
            # Refused, or the reports are of an unknown form: it came to its end.
            return found or _result(folder)
        finally:
            process.kill()
            process.join()


def early(folder: Path) -> dict[str, Any] | None:
    """Read what the compiler writes on its way; None where it is not all there."""
    needed = total("".join(file.read_text() for file in folder.glob(REPORT)))
    if needed is None:
        return None
    text = "".join(file.read_text() for file in folder.glob(TEXT))
    if "\nENTRY " not in text or not text.rstrip("\n").endswith("\n}"):
        return None
    collectives = hlo.collectives(hlo.read(text))
    return {"fits": True, "needed": needed, "collectives": collectives}


def total(report: str) -> int | None:
    """Read the bytes of a device's memory from the compiler's report; None: not there.

    >>> total("allocations (color=0)  Total bytes: 4096 (4.0KiB)")
    4096
    """
    found = re.search(r"\(color=0\)\s+Total bytes: (\d+)", report)
    return int(found[1]) if found else None


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
    from bertjax.measuring import compile_steps, topologies

    # Nobody waits for what outlives the command, however that ended.
    end = threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True)
    end.start()
    given = serialize.from_json(config)
    devices = topologies.find_devices(topology)
    target = compile_steps.Target(given, vocab_size, topology, devices)
    lowered = target.lower(step, compile_steps.Shape(*shape))
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    found = compile_steps.compile_lowered(lowered, options)
    Path(folder, RESULT).write_text(json.dumps(compile_steps.early_facts(found)))


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

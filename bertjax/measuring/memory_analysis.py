# SPDX-License-Identifier: Apache-2.0
"""Compile a program to learn its memory and collectives, completely or only in part.

The TPU compiler knows a program's memory after seconds, and then writes machine
code for minutes; no option skips that. So it runs in a process of its own, which is
ended once the compiler's report is on disk. The report does not include the memory
of the machine code.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from bertjax import RunError
from bertjax.measuring import hlo
from bertjax.training.signals import STOPS

RESULT = "facts.json"
REPORT = "*.after_optimizations-memory-usage-report.txt"
TEXT = "*.after_optimizations.txt"  # written after the report
POLL_SECONDS = 0.1
# Bytes to reserve for the code of a program that was not fully compiled. The largest
# code of a shipped config is 0.46 GiB (electra.py:base).
PROGRAM_BYTES = 2**29

CompileStep = Callable[[dict[str, Any]], dict[str, Any]]


def compile_lowered(
    lowered: Any, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Compile with the compiler's `options` and return plain values.

    They are fits; if it fits, the bytes of memory_analysis() and hlo.summary();
    otherwise `needed` bytes (None if the compiler does not report them);
    compile_seconds.
    """
    begun = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        seconds, needed = time.perf_counter() - begun, needed_bytes(str(e))
        return {"fits": False, "needed": needed, "compile_seconds": seconds}
    sizes = compiled.memory_analysis()
    return {
        "fits": True,
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
        "compile_seconds": time.perf_counter() - begun,
        **hlo.summary(compiled.as_text()),
    }


def early_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of compile_early, derived from a full compilation."""
    needed = memory_bytes(facts)
    if needed is not None:
        needed -= facts.get("program", 0)
    collectives = facts.get("collectives", {})
    return {"fits": facts["fits"], "needed": needed, "collectives": collectives}


def memory_bytes(facts: Mapping[str, Any]) -> int | None:
    """Return the bytes of a device that a program needs, its inputs included."""
    if "needed" in facts:
        return facts["needed"]
    names = ("arguments", "temporaries", "outputs", "program")
    return sum(facts[name] for name in names)


def needed_bytes(message: str) -> int | None:
    """Parse the needed memory from the compiler's error message.

    >>> needed_bytes("required for HLO temporaries (2.50G) exceeds available HBM (1G)")
    2684354560
    """
    match = re.search(
        r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of", message
    )
    if not match:
        return None
    number, unit = match[1] or match[3], match[2] or match[4] or " "
    return int(float(number) * 1024 ** " KMGT".index(unit))


def compile_early(compile_step: CompileStep) -> dict[str, Any]:
    """Compile in another process until the compiler has reported the memory.

    compile_step(options) compiles with these options and returns the result of
    compile_lowered; it is pickled. Returns fits, the bytes `needed` on a device
    (inputs, temporaries) and collectives (see hlo; none if the program does not fit).
    Raises RunError if compilation fails for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = multiprocessing.get_context("spawn").Process(
            target=_compile_into, args=(compile_step, os.getpid(), name), daemon=True
        )
        # Block signals in it, whatever handlers the compiler
        # installs: it is ended here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            facts = None
            while process.is_alive() and (facts := read_early(folder)) is None:
                time.sleep(POLL_SECONDS)
            if facts is None:  # it did not fit, or the report has an unknown format
                facts = json.loads((folder / RESULT).read_text())
            return facts
        except FileNotFoundError as e:
            raise RunError("the TPU compiler failed: its message is above") from e
        finally:
            process.kill()
            process.join()


def read_early(folder: Path) -> dict[str, Any] | None:
    """Read the compiler's reports in a folder; None while they are incomplete."""
    report = "".join(file.read_text() for file in folder.glob(REPORT))
    needed = re.search(r"\(color=0\)\s+Total bytes: (\d+)", report)
    text = "".join(file.read_text() for file in folder.glob(TEXT))
    is_whole = "\nENTRY " in text and text.rstrip("\n").endswith("\n}")
    if not needed or not is_whole:
        return None
    collectives = hlo.collectives(hlo.read(text))
    return {"fits": True, "needed": int(needed[1]), "collectives": collectives}


def _compile_into(compile_step: CompileStep, parent: int, folder: str) -> None:
    """Compile in this separate process, with the compiler's reports in the folder."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    # When the command has ended, for whatever reason, nobody needs the result.
    threading.Thread(target=end_with_parent, daemon=True).start()
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    facts = early_facts(compile_step(options))
    Path(folder, RESULT).write_text(json.dumps(facts))

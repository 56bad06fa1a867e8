# SPDX-License-Identifier: Apache-2.0
"""The table of all shipped configs on several slices (docs/tpu_estimates.md)."""

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.measuring import topologies
from bertjax.measuring.memory_analysis import PROGRAM_BYTES

# Config -> a slice on which it fits; tests/test_preflight.py compiles them.
FITS = {
    "quickstart.py": "v5e:1x1",
    "bert.py:mini": "v5e:1x1",
    "bert.py:base": "v5e:2x4",
    "bert.py:large": "v5e:2x4",
    "electra.py:small": "v5e:2x2",
    "electra.py:base": "v5e:4x4",
    "electra.py:large": "v5e:16x16",
    "roberta.py:base": "v5e:16x16",
    "roberta.py:large": "v5e:16x16",
    "albert.py:base": "v5e:16x16",
    "albert.py:xxlarge": "v5p:4x8x8",
    "finetune/choose.py": "v5e:2x4",
    "finetune/classify.py": "v5e:2x4",
    "finetune/qa.py": "v5e:2x4",
    "finetune/retrieve.py": "v5e:2x4",
    "finetune/tag.py": "v5e:2x4",
}
# What a table of the user's would say.
FLAGS = {
    "finetune/choose.py": (
        "--config.task.text=context",
        "--config.task.choices=first,second,third,fourth",
        "--config.task.label=right",
    ),
    "finetune/classify.py": (
        "--config.task.text=text",
        "--config.task.label=label",
        "--config.task.labels=no,yes",
    ),
}
MULTISLICE = {"bert.py:base": "2xv5e:2x4"}
SLICES = ("v5e:2x4", "v4:2x2x1", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
HEAD = (
    "config",
    "slice",
    "batch",
    "micro-batches",
    "fits",
    "GiB a device",
    "step, ms",
    "tokens/s a chip",
    "MFU",
)
Say = Callable[[str], None]
Preflight = Callable[..., dict[str, Any]]


def write(
    path: str, slices: str | None, quick: bool, preflight: Preflight, say: Say
) -> None:
    """Write the table as a page; slices: with commas, else SLICES, FITS, MULTISLICE.

    Times, which take minutes each, are of the slices in FITS; quick: where known. These
    slices come first, and the page is written after each row. What was compiled before
    is looked up, so the command can be broken off and run again. Raises UserError for a
    page that cannot be written, and slices that are none.
    """
    page = Path(path).expanduser()
    if page.is_dir() or not os.access(page.parent, os.W_OK):
        raise UserError(f"--table={path} is no file that could be written")
    given = tuple(slices.split(",")) if slices else SLICES
    for topology in given:
        topologies.parse(topology)
    flags = f"--table={path}" + f" --topology={slices}" * bool(slices)
    flags += " --quick" * quick
    todo = {} if slices else dict.fromkeys(FITS.items())
    todo |= {} if slices else dict.fromkeys(MULTISLICE.items())
    todo |= dict.fromkeys((name, topology) for name in FITS for topology in given)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FITS}
    for name, topology in list(todo):
        timed = topology == FITS[name] and not quick
        del todo[name, topology]
        try:
            found = row(shipped(name), topology, timed, preflight, say)
        except UserError as e:  # a batch that the slice does not divide
            say(f"{name} on {topology}: {e}")
            continue
        rows[name] += [{**found, "config": name, **phase} for phase in found["phases"]]
        text = "\n".join(lines([*chain(*rows.values())], flags, [*todo]))
        try:
            page.write_text(f"{text}\n", "utf-8")
        except OSError as e:
            raise UserError(f"--table={path} cannot be written: {e.strerror}") from e
    if not any(rows.values()):
        raise UserError(f"--topology={slices}: no config goes with it, nothing written")
    say(f"wrote {page}")


def row(
    config: ConfigDict, topology: str, timed: bool, preflight: Preflight, say: Say
) -> dict[str, Any]:
    """Estimate a config, in as many micro-batches as it takes to fit."""

    def look(quick: bool) -> dict[str, Any]:
        return preflight(config, topology, say, quick, search=False)

    found = look(quick=True)
    while not found["fits"] and found["rows_per_device"] > 1:
        over = (found["hbm_gib"] or 0) / found["hbm_gib_available"]
        parts = max(2 ** int(math.log2(max(over, 2))), 2)
        config.accumulate *= min(parts, found["rows_per_device"])
        found = look(quick=True)
    return look(quick=False) if timed and found["fits"] else found


def shipped(name: str) -> ConfigDict:
    """Read a shipped config; its text is not looked at."""
    config = command_line.parse([f"--config={name}", *FLAGS.get(name, ())]).config
    config.data.train = config.data.valid = ""
    return config


def lines(
    rows: list[dict[str, Any]], flags: str, missing: Sequence[tuple[str, str]] = ()
) -> Iterator[str]:
    """Yield the lines of the page, which a command with these flags writes.

    missing: configs and slices that are yet to be compiled.
    """
    versions = rows[0]["versions"] if rows else {}
    said = ", ".join(f"{k} {v}" for k, v in versions.items())
    yield "# Shipped configs on TPU slices: estimates"
    yield ""
    yield from wrapped(
        f"Written by `python -m bertjax.preflight {flags}`, with the TPU compiler and "
        f"no TPU ({said}). Times are **the compiler's estimates, no measurements**: "
        "cycles over the clock, custom kernels by a formula, collectives not in them. "
        "A batch that does not fit at once is parted into micro-batches "
        "(`accumulate`)."
    )
    yield ""
    yield from wrapped(memory_note(rows))
    if missing:
        slices = {n: ", ".join(t for m, t in missing if m == n) for n, _ in missing}
        named = "; ".join(f"{name} on {on}" for name, on in slices.items())
        yield ""
        yield from wrapped(
            f"Missing, since not compiled yet: {named}. The same command goes on with "
            "them."
        )
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield "|" + "---|" * len(HEAD)
    for one in rows:
        yield f"| {' | '.join(cells(one))} |"


def memory_note(rows: list[dict[str, Any]]) -> str:
    """Say what the memory of the rows with and without times is."""
    known = [r["hbm_parts_gib"]["program"] for r in rows if r["estimated_step_ms"]]
    took = f" ({min(known):.2f} to {max(known):.2f} GiB in the former)" if known else ""
    return (
        "Rows with times were compiled to the end, and their memory is all that the "
        "program needs. The others were not: without `--quick` one slice of each "
        "config is, and what was compiled before is looked up. Their memory is the "
        f"compiler's early report, to which the program's code{took} is to be added; "
        f"they fit if {PROGRAM_BYTES / 2**30:g} GiB are left for it."
    )


def wrapped(text: str) -> list[str]:
    """Break a paragraph into lines."""
    return textwrap.wrap(text, 88, break_on_hyphens=False)


def cells(found: dict[str, Any]) -> list[str]:
    """Write a row's values."""

    def number(key: str, form: str) -> str:
        return "" if found[key] is None else format(found[key], form)

    return [
        found["config"],
        found["topology"],
        f"{found['batch_size']} x {found['length']}",
        str(found["accumulate"]),
        "yes" if found["fits"] else "no",
        f"{number('hbm_gib', '.2f')} of {found['hbm_gib_available']:.2f}",
        number("estimated_step_ms", ".1f"),
        number("estimated_tokens_per_second_per_chip", ",.0f"),
        number("estimated_mfu", ".3f"),
    ]

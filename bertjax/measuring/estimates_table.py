# SPDX-License-Identifier: Apache-2.0
"""Write the table of all shipped configs on several slices (docs/tpu_estimates.md)."""

import math
import textwrap
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.measuring import topologies
from bertjax.measuring.estimates import estimate_config
from bertjax.measuring.memory_analysis import PROGRAM_BYTES
from bertjax.storage import atomic
from bertjax.tasks.tables import Say

# Config -> a slice on which it fits, as tests/test_preflight.py checks.
FITS = {
    "quickstart.py": "v5e:1x1",
    "modern.py:small": "v5e:1x1",
    "modern.py:base": "v5e:2x4",
    "bert.py:mini": "v5e:1x1",
    "bert.py:base": "v5e:2x4",
    "bert.py:large": "v5e:2x4",
    "distilbert.py:base": "v5e:4x8",
    "electra.py:small": "v5e:2x2",
    "electra.py:base": "v5e:4x4",
    "electra.py:large": "v5e:16x16",
    "roberta.py:base": "v5e:16x16",
    "roberta.py:large": "v5e:16x16",
    "macbert.py:base": "v5e:4x4",
    "retromae.py:base": "v5e:4x4",
    "causalm.py:base": "v5e:2x4",
    "albert.py:base": "v5e:16x16",
    "albert.py:xxlarge": "v5p:4x8x8",
    "gpt.py:base": "v5e:4x8",
    "hybrid.py:small": "v5e:2x4",
    "unilmv2.py:base": "v5e:16x16",
    "diffusion.py:base": "v5e:4x4",
    "t5.py:base": "v5e:16x16",
    "bart.py:base": "v5e:16x16",
    "plato.py:base": "v5e:4x4",
    "cuglm.py:base": "v5e:2x4",
    "coke.py:wn18rr": "v5e:2x4",
    "edges.py:small": "v5e:2x2",
    "mlmlm.py:base": "v5e:2x4",
    "regions.py:base": "v5e:2x4",
    "finetune/choose.py": "v5e:2x4",
    "finetune/classify.py": "v5e:2x4",
    "finetune/colbert.py": "v5e:2x4",
    "finetune/qa.py": "v5e:2x4",
    "finetune/rag.py": "v5e:2x4",
    "finetune/read.py": "v5e:2x4",
    "finetune/rerank.py": "v5e:2x4",
    "finetune/retrieve.py": "v5e:2x4",
    "finetune/seq2seq.py": "v5e:2x4",
    "finetune/splade.py": "v5e:2x4",
    "finetune/tag.py": "v5e:2x4",
}
# Keys that users have to set, such as columns of their tables.
FLAGS = {
    "causalm.py:base": (
        "--config.data.concept=words:good,bad",
        "--config.data.control=words:food,room",
    ),
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


def write(path: str, slices: str | None, quick: bool, say: Say) -> None:
    """Write the table as a page; slices: with commas, or SLICES, FITS and MULTISLICE.

    Times, which take minutes each, are for the slices in FITS; quick: only known times.
    These slices come first, and the page is written after each row. Earlier
    compilations are looked up, so an interrupted command can be run again. Raises
    UserError for a page that cannot be written, and for unknown slices.
    """
    page = atomic.check_out(path, "--table")
    given = tuple(slices.split(",")) if slices else SLICES
    for topology in given:
        topologies.parse(topology)
    flags = f"--table={path}" + f" --topology={slices}" * bool(slices)
    flags += " --quick" * quick
    todo = dict.fromkeys((name, topology) for name in FITS for topology in given)
    if not slices:
        todo = dict.fromkeys([*FITS.items(), *MULTISLICE.items(), *todo])
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FITS}
    for name, topology in list(todo):
        timed = topology == FITS[name] and not quick
        del todo[name, topology]
        try:
            results = estimate_row(shipped(name), topology, timed, say)
        except UserError as e:  # the slice does not divide the batch
            say(f"{name} on {topology}: {e}")
            continue
        rows[name] += [{**results, "config": name, **p} for p in results["phases"]]
        text = make_page([*chain(*rows.values())], flags, [*todo])
        atomic.write_file(page, text, f"--table={path}")
    if not any(rows.values()):
        raise UserError(
            f"--topology={slices}: the slice divides no shipped config's batch, and "
            "nothing is written"
        )
    say(f"wrote {page}")


def estimate_row(
    config: ConfigDict, topology: str, timed: bool, say: Say
) -> dict[str, Any]:
    """Estimate a config, with as many micro-batches as it needs to fit."""
    while True:
        results = estimate_config(config, topology, say, quick=True, search=False)
        rows = results["rows_per_device"]
        if results["fits"] or rows == 1:
            break
        over = (results["hbm_gib"] or 0) / results["hbm_gib_available"]
        config.accumulate *= min(max(2 ** int(math.log2(max(over, 2))), 2), rows)
    if timed and results["fits"]:
        results = estimate_config(config, topology, say, quick=False, search=False)
    return results


def shipped(name: str) -> ConfigDict:
    """Read a shipped config, without its text."""
    config = command_line.parse([f"--config={name}", *FLAGS.get(name, ())]).config
    config.data.train = config.data.valid = ""
    return config


def make_page(
    rows: list[dict[str, Any]], flags: str, missing: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the page that a command with these flags writes.

    missing: configs and slices that are not compiled yet.
    """
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items())
    known = [r["hbm_parts_gib"]["program"] for r in rows if r["estimated_step_ms"]]
    took = f" ({min(known):.2f} to {max(known):.2f} GiB in the former)" if known else ""
    paragraphs = [
        f"Written by `python -m bertjax.preflight {flags}`, with the TPU compiler and "
        f"no TPU ({versions}). Times are **the compiler's estimates, no "
        "measurements**: cycles over the clock, custom kernels by a formula, "
        "collectives not in them. A batch that does not fit at once is parted into "
        "micro-batches (`accumulate`). The hours are those of the config's whole run, "
        "without evaluations and saves.",
        "Rows with times were compiled to the end, and their memory is all that the "
        "program needs. The others were not: without `--quick` one slice of each "
        "config is, and what was compiled before is looked up. Their memory is the "
        f"compiler's early report, to which the program's code{took} is to be added; "
        f"they fit if {PROGRAM_BYTES / 2**30:g} GiB are left for it.",
    ]
    if missing:
        slices = {n: ", ".join(t for m, t in missing if m == n) for n, _ in missing}
        named = "; ".join(f"{name} on {on}" for name, on in slices.items())
        paragraphs.append(
            f"Missing, since not compiled yet: {named}. The same command goes on with "
            "them."
        )
    wrapped = [textwrap.fill(p, 88, break_on_hyphens=False) for p in paragraphs]
    cells = [*map(make_cells, rows)]
    head, *lines = (
        f"| {' | '.join(c)} |" for c in (cells[0], *map(dict.values, cells))
    )
    table = "\n".join([head, "|" + "---|" * len(cells[0]), *lines])
    title = "# Shipped configs on TPU slices: estimates"
    return "\n\n".join([title, *wrapped, table]) + "\n"


def make_cells(row: dict[str, Any]) -> dict[str, str]:
    """Format a row's values by column; unknown ones are blank."""

    def number(key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    return {
        "config": row["config"],
        "slice": row["topology"],
        "batch": f"{row['batch_size']} x {row['length']}",
        "micro-batches": str(row["accumulate"]),
        "fits": "yes" if row["fits"] else "no",
        "GiB per device": (
            f"{number('hbm_gib', '.2f')} of {row['hbm_gib_available']:.2f}"
        ),
        "step, ms": number("estimated_step_ms", ".1f"),
        "tokens/s per chip": number("estimated_tokens_per_second_per_chip", ",.0f"),
        "MFU": number("estimated_mfu", ".3f"),
        "run, hours": number("estimated_run_hours", ".3g"),
    }

# SPDX-License-Identifier: Apache-2.0
"""Embeddings of a file's lines, block by block, so that they need not fit in memory.

The vectors are written to a draft beside the .npy file, which replaces it once it is
complete. After each block a note beside the draft stores the progress, from which the
same command resumes.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.corpus import files
from bertjax.inference.embed_texts import Embedder, narrow
from bertjax.storage import atomic
from bertjax.tasks import tables

__all__ = ["embed_file", "line_blocks"]

BLOCK = 2**16  # lines per block


def line_blocks(path: str, name: str) -> Iterator[list[str]]:
    """Yield the lines of a file in blocks of BLOCK, without line ends.

    name: of the file, for messages. Raises UserError with the number of a line that is
    not UTF-8.
    """
    lines = _lines(path)
    first = 0
    while block := [*islice(lines, BLOCK)]:
        text = tables.decode(b"\n".join(block), name, first)
        first += len(block)
        yield [line.removesuffix("\r") for line in text.split("\n")]


def _lines(path: str) -> Iterator[bytes]:
    rest = b""
    for chunk in files.unpacked(path):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:  # a file that ends with a newline has no further line
        yield rest


def embed_file(
    model: Embedder,
    path: str,
    out: Path,
    batch_size: int,
    width: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[tuple[int, int], int, int]:
    """Write the vectors of a file's lines; resume where the same command stopped.

    width: truncates the vectors; None: their own width. Returns their shape, the number
    of lines that were cut, and of empty ones. Raises UserError for invalid input, and
    OSError if a file cannot be written.
    """
    name = f"--text={path}"
    total, digest = 0, hashlib.sha256()
    for lines in line_blocks(path, name):
        total += len(lines)
        digest.update("\n".join(lines).encode())
    if not total:
        raise UserError(f"{name} is empty")
    what = {
        "text": digest.hexdigest(),
        "lines": total,
        "model": [model.meta.get("tokenizer"), model.meta.get("step", 0), model.digest],
        "how": dataclasses.asdict(model.how) | {"width": width},
        "dtype": str(model.config.dtype),
    }
    what = json.loads(json.dumps(what))  # in the form in which it is read from the note
    draft, note = (out.with_name(f".{out.name}.{end}") for end in ("partial", "json"))
    state = _read_note(note, what) if draft.exists() else None
    state = state or {"of": what, "done": 0, "cut": 0, "empty": 0, "width": 0}
    if state["done"]:
        say(f"{out}: {state['done']:,} of {total:,} lines were embedded before")
    vectors = np.load(draft, mmap_mode="r+") if state["done"] else None
    began, before = time.monotonic(), state["done"]
    position = 0
    for lines in line_blocks(path, name):
        position += len(lines)
        if position <= state["done"]:
            continue
        block, cut = model.embed(lines, batch_size)
        block = narrow(block, width, model.how.normalize)
        if vectors is None:
            note.unlink(missing_ok=True)  # it belongs to another draft
            vectors = _make_draft(draft, (total, block.shape[1]))
        vectors[position - len(lines) : position] = block
        vectors.flush()
        empty = sum(not line.strip() for line in lines)
        state |= {"done": position, "width": block.shape[1]}
        state |= {"cut": state["cut"] + cut, "empty": state["empty"] + empty}
        if position < total:
            atomic.write_file(note, json.dumps(state))
            left = (time.monotonic() - began) / (position - before)
            minutes = left * (total - position) / 60
            say(f"{position:,} of {total:,} lines, {minutes:.1f} min left")
    del vectors
    draft.replace(out)
    note.unlink(missing_ok=True)
    return (total, state["width"]), state["cut"], state["empty"]


def _make_draft(draft: Path, shape: tuple[int, int]) -> np.memmap:
    """Create a file with space for all vectors. Raises OSError on a full disk.

    Without this a full disk would end the process when mapped memory is written.
    """
    try:
        vectors = np.lib.format.open_memmap(draft, "w+", np.float32, shape)
        if hasattr(os, "posix_fallocate"):  # macOS does not have it
            with draft.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return vectors


def _read_note(note: Path, what: Any) -> dict[str, Any] | None:
    """Return the progress of a draft, None if it is of another text or model."""
    try:
        state = json.loads(note.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return state if state.get("of") == what else None

# SPDX-License-Identifier: Apache-2.0
"""What a part from outside raises, in a line that names the part and its own line."""

import importlib.util
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import bertjax
from bertjax import registry

# Where a part from outside is not: this package, the libraries, Python's own modules.
_JAX = importlib.util.find_spec("jax")
_FOLDERS = (
    Path(bertjax.__file__).parent,
    Path(os.__file__).parent,
    Path(_JAX.origin if _JAX and _JAX.origin else os.__file__).parents[1],
)
INSIDE = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
SITE = INSIDE[-1]  # where a part from outside may be installed, too
_LIBRARIES = "flax", "jax", "jaxlib", "ml_collections", "numpy", "optax", "tensorflow"
LIBRARIES = INSIDE[0], *(f"{SITE}{name}{os.sep}" for name in _LIBRARIES)


def describe(error: Exception) -> str:
    """Return what was raised, and the line at fault: "KeyError: 'a' (FILE, line 3)"."""
    frame = line_at_fault(traceback.extract_tb(error.__traceback__))
    reason = " ".join(str(error).split())
    reason = f"{type(error).__name__}{f': {reason}' if reason else ''}"
    return f"{reason} ({frame.filename}, line {frame.lineno})"


def line_at_fault(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the last line of a part from outside; of one that is installed among the
    libraries the last that is none of those which compute; without one the last."""
    outside = [f for f in frames if not f.filename.startswith(INSIDE)]
    installed = [
        f
        for f in frames
        if f.filename.startswith(SITE) and not f.filename.startswith(LIBRARIES)
    ]
    return (outside or installed or frames)[-1]


def part_at_fault(error: Exception) -> str:
    """Return the part from outside that raised, as a config or a flag names it:
    "data.masking='my_lab.thirds'"; "" where none was at work."""
    walked = (
        f.f_globals.get("__name__") for f, _ in traceback.walk_tb(error.__traceback__)
    )
    known = [registry.OUTSIDE[name] for name in walked if name in registry.OUTSIDE]
    return known[-1] if known else ""

# SPDX-License-Identifier: Apache-2.0
"""Paths as people write them."""

import os
from pathlib import Path

from bertjax import UserError


def expand(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ~ is a home directory. Raises UserError: no such home."""
    found = os.path.expanduser(path)  # pathlib would expand ./~name too
    if found.startswith("~"):
        home = found.partition("/")[0]
        raise UserError(f"{path}: there is no directory {home}: give the whole path")
    return Path(found)

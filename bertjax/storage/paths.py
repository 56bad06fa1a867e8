# SPDX-License-Identifier: Apache-2.0
"""Paths as people write them."""

import os
from pathlib import Path

from bertjax import UserError


def expand(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ~ is a home directory.

    Raises UserError: no such home, or nothing can be there (a text, too long for a
    name; a directory that may not be looked into).
    """
    found = os.path.expanduser(path)  # pathlib would expand ./~name too
    if found.startswith("~"):
        home = found.partition("/")[0]
        raise UserError(f"{path}: there is no directory {home}: give the whole path")
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"{str(path)[:60]!r} is no path here: {why}") from None
    return Path(found)

# SPDX-License-Identifier: Apache-2.0
"""Paths as users write them."""

import os
import tempfile
from pathlib import Path

from bertjax import UserError


def expand(path: str | os.PathLike[str], key: str = "") -> Path:
    """Return a path with ~ expanded to a home directory.

    key: the flag or config key of the path, with which messages begin. Raises UserError
    if there is no such home directory, or if nothing can exist at the path (a text that
    is too long for a name; a directory without permission).
    """
    where, found = f"{key}=" * bool(key), os.path.expanduser(path)
    if found.startswith("~"):
        home = found.partition("/")[0]
        raise UserError(
            f"{where}{path}: there is no directory {home}: give the whole path"
        )
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"{where}{str(path)[:60]!r} is no path here: {why}") from None
    return Path(found)


def check_writable(path: Path, what: str) -> None:
    """Refuse a path of this machine below which nothing can be made.

    what: the flag and its value, with which the message begins. Raises UserError.
    """
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    try:
        # Create and remove a directory: permissions alone prove nothing, e.g. in /proc.
        tempfile.TemporaryDirectory(prefix=".bertjax-", dir=parent).cleanup()
    except OSError as e:
        why = f"nothing can be made in {parent}"
        if not isinstance(e, FileNotFoundError):
            why += f" ({e.strerror})"
        raise UserError(f"{what} cannot be written: {why}") from e

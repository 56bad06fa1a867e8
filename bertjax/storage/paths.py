# SPDX-License-Identifier: Apache-2.0
"""Paths as people write them."""

import os
from pathlib import Path

from bertjax import UserError


def expand(path: str | os.PathLike[str], key: str = "") -> Path:
    """Return a path in which ~ is a home directory.

    key: the flag or key of a config that names it. Raises UserError, which begins with
    that: no such home, or nothing can be there (a text, too long for a name; a
    directory that may not be looked into).
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

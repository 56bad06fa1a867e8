# SPDX-License-Identifier: Apache-2.0
"""Directories that are there whole or not at all."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bertjax import UserError

TEMPORARY = ".unfinished-"


def check_cache(cache: str | os.PathLike[str]) -> Path:
    """Return data.cache as a path.

    Raises UserError where no directory can be made or written there.
    """
    where = os.fspath(cache)
    if "://" in where:
        raise UserError(f"data.cache={where}: must be a directory of this machine")
    path = Path(where).expanduser()
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"data.cache={where}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"data.cache={where}: {there} cannot be written to")
    return path


def make_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Call `write` on an empty directory and rename it to `target` when it returns.

    Whatever happens before leaves nothing that could be taken for `target`. Where
    another process finishes the same `target` first, its result is kept. Directories
    left behind by processes that died are removed.

    Raises UserError naming the directory when the disk is full or refuses.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        lock, temporary = _claim(parent, target.name)
    except OSError as e:
        raise _refused(parent, e) from None
    try:
        try:
            temporary.mkdir()
            write(temporary)
            sync(temporary)
            try:
                temporary.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
            sync(parent)
        except OSError as e:
            raise _refused(parent, e) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def sync(path: Path) -> None:
    """Have a file or the names in a directory written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(parent: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"data.cache={parent}: cannot be written to ({reason})")


def _claim(parent: Path, name: str) -> tuple[IO[bytes], Path]:
    """Return a locked file and the temporary directory that the lock stands for.

    The kernel gives the lock back when the process dies, however it dies; process
    ids would not do, they come again (a container's first process is always 1).
    """
    while True:
        temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
        lock = open(f"{temporary}.lock", "xb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Somebody's _sweep may have come between the two lines above.
        if os.path.exists(lock.name):
            return lock, temporary
        lock.close()


def _sweep(parent: Path) -> None:
    """Remove what processes that died left behind."""
    for path in parent.glob(f"{TEMPORARY}*.lock"):
        try:
            with open(path, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
        except OSError:
            continue  # somebody is at work there, or swept it just now

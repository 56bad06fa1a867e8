# SPDX-License-Identifier: Apache-2.0
"""Directories that are there whole or not at all."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bertjax import UserError

TEMPORARY = ".unfinished-"
ABANDONED = 86_400.0  # seconds


def make_whole(
    target: Path, write: Callable[[Path], None], root: Path | None = None
) -> None:
    """Call `write` on an empty directory and rename it to `target` when it returns.

    Whatever happens before leaves nothing that could be taken for `target`. Where
    another process finishes the same `target` first, its result is kept. Directories
    left behind by processes that died are removed.

    Raises UserError naming the directory (or `root`, the cache) when the disk is full
    or refuses.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        lock, temporary = _claim(parent, target.name)
    except OSError as e:
        raise _refused(root or parent, e) from None
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
            raise _refused(root or parent, e) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def remove(target: Path) -> None:
    """Remove a directory at once: nobody finds half of it. It may be gone already."""
    if not target.is_dir():
        return
    try:
        lock, temporary = _claim(target.parent, target.name)
    except OSError as e:
        raise _refused(target.parent, e) from None
    try:
        with contextlib.suppress(FileNotFoundError):
            target.rename(temporary)
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
        try:
            lock = open(f"{temporary}.lock", "xb")  # noqa: SIM115
        except FileNotFoundError:  # somebody has just removed the empty parent
            parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody's _sweep came between, and has it
            lock.close()
            continue
        lock.write(socket.gethostname().encode())
        lock.flush()
        # Or it came and went.
        if os.path.exists(lock.name):
            return lock, temporary
        lock.close()


def _sweep(parent: Path) -> None:
    """Remove what processes that died left behind.

    On some shared disks a lock holds on its own host alone, so that the work of other
    hosts is left for ABANDONED seconds.
    """
    here = socket.gethostname().encode()
    for path in parent.glob(f"{TEMPORARY}*.lock"):
        try:
            with open(path, "r+b") as lock:  # over NFS a lock is of what one may write
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = time.time() - os.fstat(lock.fileno()).st_mtime
                if lock.read() not in (b"", here) and age < ABANDONED:
                    continue
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
        except OSError:
            continue  # somebody is at work there, or swept it just now

# SPDX-License-Identifier: Apache-2.0
"""Directories that are there whole or not at all."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from bertjax import UserError
from bertjax.storage.atomic import copy_files, is_remote

T = TypeVar("T")

TEMPORARY = ".unfinished-"
ABANDONED = 86_400.0  # seconds


def make_whole(
    target: Path, write: Callable[[Path], None], what: str | None = None
) -> bool:
    """Call `write` on an empty directory; rename it to `target` once it is on the disk.

    Whatever happens before leaves nothing that could be taken for `target`, no new
    parents either. Directories left behind by processes that died are removed.
    Returns False where another process finished the same `target` first, whose result
    is kept. Raises UserError "WHAT cannot be written: REASON"; without `what` it names
    the cache that holds `target`.
    """
    new_parents = [p for p in target.parents if not p.exists()]
    try:
        with _draft(target, what) as temporary:
            temporary.mkdir()
            write(temporary)
            for path in (*temporary.rglob("*"), temporary):
                _sync(path)
            try:
                temporary.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
                return False
            _sync(target.parent)
            return True
    finally:
        for parent in new_parents:  # the deepest first; what holds the target stays
            with contextlib.suppress(OSError):
                parent.rmdir()


def remove(target: Path) -> None:
    """Remove a directory at once: nobody finds half of it. It may be gone already."""
    if target.is_dir():
        with _draft(target) as temporary, contextlib.suppress(FileNotFoundError):
            target.rename(temporary)


def write_directory(path: Any, write: Callable[[Path], None]) -> None:
    """Let `write(local directory)` replace the files of a directory, maybe remote."""
    with tempfile.TemporaryDirectory() as local:
        write(Path(local))
        copy_files(Path(local), path)


def read_directory(path: Any, read: Callable[[Path], T]) -> T:
    """Return `read(local directory)` of a directory that may be remote."""
    if not is_remote(path):
        return read(Path(path))
    with tempfile.TemporaryDirectory() as local:
        for file in path.iterdir():
            (Path(local) / file.name).write_bytes(file.read_bytes())
        return read(Path(local))


def lock(
    path: Any, flag: str = "--workdir", does: str = "trains in it"
) -> contextlib.AbstractContextManager:
    """Keep a second process of this machine out of a workdir, as long as it is open.

    Nothing keeps it out of a remote one. flag, does: name the path in messages, which
    may be a file's, and what is done there. Raises UserError when another process has
    it. The kernel lets go when a process dies.
    """
    if is_remote(path):
        return contextlib.nullcontext()
    key = hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16]
    name = f"bertjax-{os.getuid()}-{key}.lock"
    file = open(Path(tempfile.gettempdir()) / name, "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise UserError(f"{flag}={path}: another process {does}") from e
    return file


@contextlib.contextmanager
def _draft(target: Path, what: str | None = None) -> Iterator[Path]:
    """Give the path of a draft of `target` beside it; remove what is left of it."""
    parent, lock, temporary = target.parent, None, None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        lock, temporary = _claim(parent, target.name)
        yield temporary
    except OSError as e:
        what = what or f"data.cache={parent}"
        raise UserError(f"{what} cannot be written: {e.strerror or e}") from None
    finally:
        if lock is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            Path(lock.name).unlink(missing_ok=True)
            lock.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
            if parent.exists():  # or nothing can be made in it, as in /proc
                raise
            parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody's _sweep came between, and has it
            lock.close()
            continue
        lock.write(socket.gethostname().encode())
        lock.flush()
        if os.path.exists(lock.name):  # or a _sweep came and went
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

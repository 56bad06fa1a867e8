# SPDX-License-Identifier: Apache-2.0
"""Atomic creation and removal of directories, and locks."""

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
ABANDONED = 86_400.0  # seconds after which another host's draft is removed


def make_whole(
    target: Path, write: Callable[[Path], None], what: str | None = None
) -> bool:
    """Call `write` on an empty directory, sync it, and rename it to `target`.

    A failure before the renaming leaves nothing that could be mistaken for `target`,
    and no new parent directories. Directories left behind by processes that died are
    removed. Returns False if another process finished the same `target` first; its
    result is kept. Raises UserError "WHAT cannot be written: REASON"; without `what`
    the message names the cache that holds `target`.
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
        # The deepest comes first. A parent that is not empty cannot be removed, so
        # those of the target stay.
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()


def remove(target: Path) -> None:
    """Remove a directory atomically, if it exists."""
    if target.is_dir():
        with _draft(target) as temporary, contextlib.suppress(FileNotFoundError):
            target.rename(temporary)


def write_directory(path: Any, write: Callable[[Path], None]) -> None:
    """Call `write(local directory)` and copy its files to `path`, maybe remote."""
    with tempfile.TemporaryDirectory() as local:
        write(Path(local))
        copy_files(Path(local), path)


def read_directory(path: Any, read: Callable[[Path], T]) -> T:
    """Return `read(local directory)` for a directory that may be remote."""
    if not is_remote(path):
        return read(Path(path))
    with tempfile.TemporaryDirectory() as local:
        for file in path.iterdir():
            (Path(local) / file.name).write_bytes(file.read_bytes())
        return read(Path(local))


def lock(
    path: Any, flag: str = "--workdir", does: str = "trains in it"
) -> contextlib.AbstractContextManager:
    """Lock a workdir or file against other processes of this machine.

    The lock holds until the result is closed; the kernel releases it when the process
    dies. A remote workdir is not locked. flag, does: for messages, the flag of the path
    and what is done there. Raises UserError if another process has the lock.
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
    """Yield the path of a draft beside `target`; remove it if it still exists."""
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
    """Return a locked file, and the path of the temporary directory that it protects.

    The kernel releases the lock when the process dies, however it dies. Process ids
    would not be enough, because they are reused (a container's first process is always
    1).
    """
    while True:
        temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            lock = open(f"{temporary}.lock", "xb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:  # another process just removed the empty parent
            if parent.exists():  # or files cannot be created in it, as in /proc
                raise
            parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process's _sweep has the lock
            lock.close()
            continue
        try:
            lock.write(socket.gethostname().encode())
        except OSError:  # the disk is full
            Path(lock.name).unlink(missing_ok=True)
            lock.close()
            raise
        if os.path.exists(lock.name):  # otherwise a _sweep removed it meanwhile
            return lock, temporary
        lock.close()


def _sweep(parent: Path) -> None:
    """Remove the drafts of processes that died.

    On some shared disks a lock is valid only on its own host, so drafts of other hosts
    are kept for ABANDONED seconds.
    """
    here = socket.gethostname().encode()
    for path in parent.glob(f"{TEMPORARY}*.lock"):
        try:
            with open(path, "r+b") as lock:  # NFS locks only files opened for writing
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = time.time() - os.fstat(lock.fileno()).st_mtime
                if lock.read() not in (b"", here) and age < ABANDONED:
                    continue
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
        except OSError:
            continue  # another process is writing there, or just removed it

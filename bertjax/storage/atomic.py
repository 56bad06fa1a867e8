# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all, on a disk or in a bucket."""

import glob
import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bertjax import UserError
from bertjax.storage.paths import expand


def is_remote(path: Any) -> bool:
    """True for gs:// and the like."""
    return "://" in str(path)


def write_file(
    path: Any,
    content: bytes | str | Callable[[IO[bytes]], Any],
    what: str | None = None,
) -> None:
    """Write a file, and its parents, so that nobody ever finds half of it.

    On a disk the content goes to a draft beside the file, which takes its place once it
    is on the disk. Object stores make a file appear whole, and have no cheap rename.

    path: a pathlib.Path, or etils.epath's of a URL. content: text is UTF-8; a function
    writes to an open file. Raises OSError; with `what`, which names the file, UserError
    "WHAT cannot be written: REASON".
    """

    def write(file: IO[bytes]) -> None:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_remote(path):
            buffer = io.BytesIO()
            write(buffer)
            path.write_bytes(buffer.getvalue())
        else:
            _replace(Path(path), write)
    except OSError as e:
        if what is None:
            raise
        raise UserError(f"{what} cannot be written: {e.strerror or e}") from e


def _replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    # Processes of several hosts may write the same file of a shared disk.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def copy_files(source: Path, target: Any) -> None:
    """Copy the files of a directory tree, each whole or not at all.

    target: a directory that may be remote; it is made. Raises OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in filter(Path.is_file, source.rglob("*")):
        write_file(target / file.relative_to(source), file.read_bytes())


def check_out(
    name: str,
    flag: str,
    ending: str = "",
    source: tuple[str, str | Sequence[str] | None] = ("", None),
) -> Path:
    """Return the file to write, which a flag names.

    ending: of its name, in any case. source: the flag of what is read, and its value:
    files and patterns, with commas, each maybe named; or the files. Raises UserError
    for what cannot be such a file, and for a file that is read.
    """
    out = expand(name, flag)
    if is_remote(name):
        raise UserError(f"{flag}={name}: it is written to a disk of this machine")
    if ending and out.suffix.lower() != ending:
        raise UserError(f"{flag}={name} is no name of such a file: it ends in {ending}")
    if out.is_dir():
        raise UserError(f"{flag}={name} is a directory: name a file in it")
    if not out.parent.is_dir():
        raise UserError(
            f"{flag}={name} cannot be written: {out.parent} is no directory"
        )
    read, value = source
    is_text = isinstance(value, str)
    files = _files_of(value) if is_text else filter(os.path.exists, value or ())
    if out.exists() and any(map(out.samefile, files)):
        what = read if is_text and _exists(value) else f"a file of {read}"
        raise UserError(f"{flag}={name} is {what}, which it would replace")
    return out


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _files_of(value: str) -> Iterator[str]:
    """Yield the files that there are of a path or pattern, or of several with commas,
    each maybe named: a=x.txt,b=y/*.txt."""
    path = os.path.expanduser(value)
    if os.path.exists(path):
        yield path
    elif "," in value:
        for part in value.split(","):
            yield from _files_of(part.strip())
    elif found := glob.glob(path, recursive=True):
        yield from filter(os.path.exists, found)
    elif "=" in value:
        yield from _files_of(value.partition("=")[2])

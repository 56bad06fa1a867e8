# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files, on a disk or in a bucket."""

import contextlib
import glob
import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bertjax import UserError
from bertjax.storage.paths import check_writable, expand


def is_remote(path: Any) -> bool:
    """Return True for a URL such as gs://."""
    return "://" in str(path)


def write_file(
    path: Any,
    content: bytes | str | Callable[[IO[bytes]], Any],
    what: str | None = None,
) -> None:
    """Write a file atomically, and create its parent directories.

    On a disk the content is written to a draft beside the file, which replaces the file
    once it is synced. In object stores a file appears as a whole anyway, and renaming
    is not cheap, so there it is written directly.

    path: a pathlib.Path, or an etils.epath.Path for a URL. content: bytes, text (as
    UTF-8), or a function that writes to an open file. what: the name of the file in
    messages. Raises OSError; with `what` UserError "WHAT cannot be written: REASON".
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
    # The name is random, because processes of several hosts may write the same file on
    # a shared disk.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def append_line(file: IO[str], line: str) -> None:
    """Write a line at once, and close the file if that raises OSError.

    Otherwise Python would try again at exit, and print a traceback.
    """
    try:
        file.write(line)
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        raise


def copy_files(source: Path, target: Any) -> None:
    """Copy the files of a directory tree, each of them atomically.

    target: a directory, maybe a remote one, which is created. Raises OSError.
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
    """Check the output file that a flag names, and return its path.

    ending: the required suffix of its name, in upper or lower case. source: the flag of
    the input, and its value: comma-separated files and patterns, each with an optional
    name; or a sequence of files. Raises UserError if the path cannot be such a file, if
    it is one of the input files, or if its directory cannot be written.
    """
    out = expand(name, flag)
    if is_remote(name):
        raise UserError(f"{flag}={name}: it is written to a disk of this machine")
    if ending and out.suffix.lower() != ending:
        raise UserError(
            f"{flag}={name} is not a name of such a file: it ends in {ending}"
        )
    if out.is_dir():
        raise UserError(f"{flag}={name} is a directory: name a file in it")
    if (out.exists() and not out.is_file()) or out.absolute().parent == Path("/dev"):
        raise UserError(f"{flag}={name} is a device or pipe, which it would replace")
    if not out.parent.is_dir():
        raise UserError(
            f"{flag}={name} cannot be written: {out.parent} is not a directory"
        )
    read, value = source
    is_text = isinstance(value, str)
    files = _files_of(value) if is_text else filter(os.path.exists, value or ())
    if out.exists() and any(map(out.samefile, files)):
        is_one = is_text and os.path.exists(os.path.expanduser(value))
        what = read if is_one else f"a file of {read}"
        raise UserError(f"{flag}={name} is {what}, which it would replace")
    check_writable(out.parent, f"{flag}={name}")
    return out


def _files_of(value: str) -> Iterator[str]:
    """Yield the existing files of a path or pattern, or of a comma-separated list.

    The parts of a list may have names: a=x.txt,b=y/*.txt.
    """
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

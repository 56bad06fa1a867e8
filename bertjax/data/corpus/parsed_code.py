# SPDX-License-Identifier: Apache-2.0
"""Parses of code, kept on disk from one reading of a text to the next.

A text of code is read up to three times: to train a tokenizer, to count the values of
its streams, and to encode it; parsing takes most of the time of each. The result of a
parse is found by a hash of the text: lines, types of names, and whether it was broken.
"""

import contextlib
import functools
import hashlib
import marshal
import sqlite3
from pathlib import Path
from typing import NamedTuple

FILE = "code.sqlite"
_own: dict[str, sqlite3.Connection] = {}  # the files that this process fills


class Parsed(NamedTuple):
    """lines, names: as in code_names.Code; names is None if they were not requested."""

    lines: list[str]
    names: list[tuple[tuple[int, int, str], ...]] | None
    broken: bool


def keep_parses(folder: Path) -> str:
    """Create a file in a folder that this process fills and others may read.

    Returns its path, or "" if that fails: a disk may be full, and some network disks
    have no locks.
    """
    path = str(folder / FILE)
    try:
        _own[path] = connection = sqlite3.connect(path, isolation_level=None)
        # The file ends with the process, so that nothing has to survive a crash.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE parses (text BLOB PRIMARY KEY, parsed BLOB)")
    except sqlite3.Error:
        forget_parses(path)
        return ""
    return path


def forget_parses(path: str) -> None:
    """Close and remove a file of `keep_parses`."""
    if connection := _own.pop(path, None):
        connection.close()
    Path(path).unlink(missing_ok=True)


@functools.lru_cache(1)
def _opened(path: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def _key(text: str, language: str, with_names: bool) -> bytes:
    digest = hashlib.blake2b(f"{language} {with_names} ".encode(), digest_size=16)
    digest.update(text.encode())
    return digest.digest()


def find_parse(path: str, text: str, language: str, with_names: bool) -> Parsed | None:
    """Return the stored parse of a clean text; None if there is none to be read."""
    with contextlib.suppress(sqlite3.Error):
        connection = _own.get(path) or _opened(path)
        query = "SELECT parsed FROM parses WHERE text = ?"
        for (found,) in connection.execute(query, (_key(text, language, with_names),)):
            return Parsed(*marshal.loads(found))
    return None


def keep_parse(
    path: str, text: str, language: str, with_names: bool, parsed: Parsed
) -> None:
    """Store a parse, if this process fills the file and the disk has room; otherwise
    the text is parsed again."""
    if (connection := _own.get(path)) is None:
        return
    row = _key(text, language, with_names), marshal.dumps(tuple(parsed))
    with contextlib.suppress(sqlite3.Error):
        connection.execute("INSERT OR IGNORE INTO parses VALUES (?, ?)", row)

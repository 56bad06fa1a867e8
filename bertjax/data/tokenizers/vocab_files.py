# SPDX-License-Identifier: Apache-2.0
"""Read the files of vocabularies and dictionaries.

Every function raises UserError, which begins with `place`, if a file cannot be read.
"""

import codecs
import gzip
import zlib
from pathlib import Path

from bertjax import UserError
from bertjax.storage.paths import expand


def read_bytes(path: Path, place: str) -> bytes:
    """Read a regular file that holds more than white space."""
    path = expand(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{place}: not a regular file")
    try:
        content = path.read_bytes()
    except OSError as err:
        raise UserError(f"{place}: cannot be read ({err.strerror or err})") from None
    return _refuse_empty(content, place)


def _refuse_empty(content: bytes, place: str) -> bytes:
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise UserError(f"{place}: the file is empty")
    return content


def read_unzipped(path: Path, place: str) -> bytes:
    """Read a file as `read_bytes` does, and decompress it if it is a .gz file."""
    content = read_bytes(path, place)
    if path.suffix != ".gz":
        return content
    try:
        content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise UserError(f"{place}: damaged or truncated .gz file ({err})") from None
    return _refuse_empty(content, place)


def read_text(path: Path, place: str) -> str:
    """Read a UTF-8 file, also .gz."""
    content = read_unzipped(path, place)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        raise UserError(f"{place}: not UTF-8 (byte {err.start}, line {line})") from None


def read_lines(path: Path, place: str) -> list[str]:
    """Read the lines of a UTF-8 file; empty lines at its end are dropped."""
    # Only line feeds end lines: U+2028 may be a piece.
    lines = [line.removesuffix("\r") for line in read_text(path, place).split("\n")]
    while not lines[-1]:
        lines.pop()
    return lines

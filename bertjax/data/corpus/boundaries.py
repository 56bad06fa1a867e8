# SPDX-License-Identifier: Apache-2.0
"""Where pieces of a file begin: between documents, between lines."""

import re
from collections.abc import Iterator
from typing import IO

from bertjax.data.corpus import files
from bertjax.data.corpus.line_repair import DOCUMENT_LIMIT


def byte_range(raw: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes [start, end) of an open file, or what there is of them."""
    raw.seek(start)
    while start < end and (data := raw.read(min(files.CHUNK, end - start))):
        start += len(data)
        yield data


# Where a piece may begin: behind a line end and a blank line. The characters that
# make a line blank are those that `line_repair.clean` and `strip` leave nothing of;
# rarer ones and longer lines are missing, which costs a cut, never a document.
_WHITE = rb"(?:[\x00-\x09\x0b\x0c\x0e-\x20]|\xc2\xa0|\xe3\x80\x80){0,99}[\r\n]"
_BLANK = re.compile(rb"(?:\n|\r(?!\n))" + _WHITE)
# The same where there is no \r; far faster, since it begins with one byte.
_USUAL = re.compile(rb"\n(?=[\x00-\x20\xc2\xe3])" + _WHITE)
_NEWLINE = re.compile(rb"\n")
# Where nothing is blank for so long: behind a line end, or else between characters.
# SPAN is as many bytes as DOCUMENT_LIMIT characters may have, so that no document is
# cut there but those that are cut anyway; it is longer than a match of _BLANK.
SPAN = 4 * DOCUMENT_LIMIT
_PLACES = (re.compile(rb"[\r\n]"), re.compile(rb"[\x80-\xbf]{0,3}"))
# Of WikiText: before a title, which `line_repair.group` takes for one; rarer ones are
# missing here, too.
_TITLE = re.compile(
    rb"\n[ \t]{0,99}\r?\n(?= = [!-<>-~][ -~]{0,200} = \r?\n[ \t]{0,99}\r?\n)"
)
CUTS = "spans-1"  # names these rules


def _search(
    raw: IO[bytes], start: int, end: int, pattern: re.Pattern[bytes]
) -> int | None:
    """Return where the first match that begins in the bytes [start, end) ends."""
    tail, at = b"", start
    for chunk in byte_range(raw, start, end + 512):
        tail += chunk
        at += len(chunk)
        usual = pattern is _BLANK and b"\r" not in tail
        if match := (_USUAL if usual else pattern).search(tail):
            begins, ends = (at - len(tail) + n for n in match.span())
            return ends if begins < end else None
        tail = tail[-512:]  # longer than a match: it may begin here
    return None


def text_edge(
    raw: IO[bytes], at: int, size: int, titled: bool = False
) -> tuple[int, bool]:
    """Return where the piece that has `at` begins, and whether that cuts a document.

    titled: documents begin at titles, as in WikiText, not behind blank lines.

    A function of the bytes and `at` alone, which grows with `at`: where one piece ends
    the next begins. Reads no further than 3 SPAN, however long a document is.
    """
    if at == 0:
        return 0, False
    whole = _TITLE if titled else _BLANK
    for pattern in (whole, *_PLACES):
        edge = _search(raw, at, min(at + SPAN, size), pattern)
        if edge is not None:
            return edge, pattern is not whole
        at += SPAN
    return size, False


def json_edge(raw: IO[bytes], at: int, size: int) -> int:
    """Return where the first line begins that does so at `at` or behind it."""
    if at <= 1:
        return 0
    edge = _search(raw, at - 1, size, _NEWLINE)
    return size if edge is None else edge

# SPDX-License-Identifier: Apache-2.0
"""Repair text: from chunks of bytes to clean lines, every repair counted."""

import json
import re
from collections import Counter
from collections.abc import Iterator

from bertjax import UserError

CLEANING = "clean-1"  # names the repairs below; stores made by other rules are others
DOCUMENT_LIMIT = 1 << 24  # characters; a longer document is split, and counted

REPAIRS = {
    "bad_utf8": "byte sequences that are not UTF-8 were replaced by U+FFFD",
    "control_characters": "control characters were removed",
    "bom": "byte order marks were dropped",
    "crlf": "line ends other than \\n were read as line ends",
    "long_lines": "lines over data.max_line_bytes were split",
    "long_records": "JSON lines over data.max_line_bytes were skipped",
    "long_documents": f"documents over {DOCUMENT_LIMIT} characters were split",
    "empty_documents": "documents without text were skipped",
}


class Counts:
    """Count documents, paragraphs and repairs, source by source.

    `counts.documents`, `counts.paragraphs` and `counts.<repair>` (the names in REPAIRS)
    are the sums over all sources.
    """

    def __init__(self, by_source: dict[str, dict[str, int]] | None = None) -> None:
        given = by_source or {}
        self.by_source = {name: Counter(kinds) for name, kinds in given.items()}

    def of(self, source: str) -> Counter[str]:
        """Return the counter of one source, to add to."""
        return self.by_source.setdefault(source, Counter())

    def merge(self, other: "Counts") -> None:
        """Add what another process or source counted."""
        for name, kinds in other.by_source.items():
            self.of(name).update(kinds)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return plain dicts for JSON; `Counts(d)` reads them back."""
        return {name: dict(+kinds) for name, kinds in self.by_source.items()}

    def __getattr__(self, kind: str) -> int:
        if kind in REPAIRS or kind in ("documents", "paragraphs"):
            return sum(kinds[kind] for kinds in self.by_source.values())
        raise AttributeError(kind)

    def lines(self) -> list[str]:
        """Say what was repaired, one sentence a repair and source.

        >>> Counts({"a.txt": {"documents": 3, "bad_utf8": 2}}).lines()
        ['2 byte sequences that are not UTF-8 were replaced by U+FFFD (a.txt)']
        """
        return [
            f"{kinds[kind]} {words} ({name})"
            for name, kinds in self.by_source.items()
            for kind, words in REPAIRS.items()
            if kinds[kind]
        ]


def decode(data: bytes, counter: Counter[str]) -> str:
    """Decode UTF-8; a malformed sequence becomes U+FFFD and is counted.

    A genuine U+FFFD is EF BF BD, which decodes to itself wherever it stands (EF starts
    a sequence anew), so the difference of the two counts is the repairs.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        counter["bad_utf8"] += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
        return text


_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LINE_END = re.compile("\r\n?")
# Before a line end they are one with it: they never make a blank line.
_SEPARATOR = re.compile("[\u2028\u2029]+\n?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL_TABLE: dict[int, str | None] = dict.fromkeys([*range(32), *range(127, 160)])
_CONTROL_TABLE[0x0A] = "\n"
# What separates words goes on doing so.
_CONTROL_TABLE.update(dict.fromkeys([0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x1F, 0x85], " "))
_CONTROL_TABLE[0x09] = " "


def clean(text: str, counter: Counter[str]) -> str:
    """Repair characters: the result has \\n as its only line end and control character.

    >>> c = Counter(); clean("\\ufeffa\\tb\\x00c\\r\\nd", c), dict(+c)
    ('a bc\\nd', {'bom': 1, 'crlf': 1, 'control_characters': 1})
    """
    if _ODD.search(text):
        counter["bom"] += text.count("\ufeff")
        text = text.replace("\ufeff", "")
        for line_end in (_LINE_END, _SEPARATOR):
            text, n = line_end.subn("\n", text)
            counter["crlf"] += n
        # Halves of a pair, from escapes in JSON: no UTF-8 can hold them.
        text, n = _SURROGATE.subn("\ufffd", text)
        counter["bad_utf8"] += n
        counter["control_characters"] += len(_CONTROL.findall(text))
        text = text.translate(_CONTROL_TABLE)
    return text.replace("\t", " ")


def _cut(data: bytes | bytearray, start: int, limit: int) -> int:
    """Find where to end a piece of at most `limit` bytes: a space, or a character."""
    end = start + limit
    space = data.rfind(b" ", start + limit // 2, end)
    if space > start:
        return space + 1
    for back in range(min(4, limit)):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end


def _is_visible(piece: bytes, counter: Counter[str]) -> bool:
    """False when nothing is left of a piece once cleaned; then its repairs count."""
    repairs: Counter[str] = Counter()
    if clean(decode(piece, repairs), repairs).strip():
        return True
    counter.update(repairs)
    return False


def _split_long(block: bytes, limit: int, known: bool, counter: Counter[str]) -> bytes:
    """Put line ends into lines over `limit` bytes; `known`: the first is counted."""
    out = []
    for number, line in enumerate(block.splitlines(keepends=True)):
        if len(line.rstrip(b"\r\n")) > limit:
            counter["long_lines"] += not (known and number == 0)
            start = 0
            pieces = []
            while len(line) - start > limit:
                cut = _cut(line, start, limit)
                pieces.append(line[start:cut].strip())
                start = cut
            pieces.append(line[start:])
            # A piece with nothing to see must not become a blank line.
            seen = [p for p in pieces if _is_visible(p, counter)]
            line = b"\n".join(seen).rstrip() + b"\n"
        out.append(line)
    return b"".join(out)


def _blocks(chunks: Iterator[bytes], limit: int, mac: bool) -> Iterator[tuple]:
    """Regroup chunks into (block, goes on): blocks end at a line end.

    Where none comes within `limit` bytes the line goes on in the next block. With
    `mac` a lone \\r is a line end as well.
    """
    held = bytearray()
    for chunk in chunks:
        if mac and held.endswith(b"\r"):
            chunk = bytes(held) + chunk
            held.clear()
        cut = chunk.rfind(b"\n")
        if mac:  # a \r in the last place may be half of \r\n
            cut = max(cut, chunk.rfind(b"\r", 0, len(chunk) - 1))
        if cut >= 0:
            held += chunk[: cut + 1]
            yield bytes(held), False
            held = bytearray(chunk[cut + 1 :])
        else:
            held += chunk
        while len(held) > limit + 1:
            cut = _cut(held, 0, limit)
            yield bytes(held[:cut]), True
            del held[:cut]
    if held:
        yield bytes(held), False


def text_lines(
    chunks: Iterator[bytes], limit: int, counter: Counter[str]
) -> Iterator[str]:
    """Yield cleaned, stripped lines; an empty one stands for each blank line."""
    inside = False  # the line began in the block before
    for block, goes_on in _blocks(chunks, limit, mac=True):
        if goes_on and not inside:
            counter["long_lines"] += 1
        if len(block) > limit:
            block = _split_long(block, limit, inside, counter)
        lines = clean(decode(block, counter), counter).split("\n")
        if not goes_on and not lines[-1]:
            lines.pop()  # what follows the last line end
        for number, line in enumerate(lines):
            line = line.strip()
            part = (number == 0 and inside) or (goes_on and number == len(lines) - 1)
            if line or not part:
                yield line
        inside = goes_on


def json_texts(
    name: str, chunks: Iterator[bytes], limit: int, counter: Counter[str]
) -> Iterator[str]:
    """Yield the cleaned `text` of each JSON line."""
    number = 0
    skipping = False
    for block, goes_on in _blocks(chunks, limit, mac=False):
        lines = block.split(b"\n")
        if not goes_on and not lines[-1]:
            lines.pop()
        for line in lines:
            if not skipping:
                number += 1
            if len(line) > limit or goes_on or skipping:
                # JSON cannot be split: the whole record goes.
                counter["long_records"] += not skipping
                skipping = goes_on
                continue
            text = decode(line, counter)
            if text.startswith("\ufeff"):
                counter["bom"] += 1
                text = text[1:]
            if not text.strip():
                continue
            where = f"{name}, line {number}"
            try:
                # Raw control characters are repaired below, not refused.
                record = json.loads(text, strict=False)
            except (ValueError, RecursionError) as err:
                raise UserError(f"{where}: not JSON ({err})") from None
            if not isinstance(record, dict) or "text" not in record:
                raise UserError(f"{where}: not a JSON object with a `text` field")
            if not isinstance(record["text"], str):
                raise UserError(f"{where}: the `text` field is not a string")
            yield clean(record["text"], counter)


def group(lines: Iterator[str], counter: Counter[str]) -> Iterator[list[str]]:
    """Group lines into documents at blank lines, and where one grows too long."""
    held: list[str] = []
    size = 0
    for line in lines:
        if held and (not line or size > DOCUMENT_LIMIT):
            counter["long_documents"] += bool(line)
            yield held
            held, size = [], 0
        if line:
            held.append(line)
            size += len(line)
    if held:
        yield held


def paragraphs(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]

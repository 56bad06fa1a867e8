# SPDX-License-Identifier: Apache-2.0
"""Repair text: from chunks of bytes to clean lines, every repair counted."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

from bertjax import UserError, counted, join_names

CLEANING = "clean-2"  # version of the repairs below; part of the keys of stores
DOCUMENT_LIMIT = 1 << 24  # characters; a longer document is split, and counted

REPAIRS = {  # what is counted, and how it is repaired
    "bad_utf8": ("byte sequence", "outside UTF-8, replaced by U+FFFD"),
    "control_characters": ("control character", "removed"),
    "bom": ("byte order mark", "removed"),
    "crlf": ("line end", "other than \\n, read as \\n"),
    "long_lines": ("line", "over data.max_line_bytes, split"),
    "long_records": ("JSON line", "over data.max_line_bytes, skipped"),
    "long_documents": ("document", f"over {DOCUMENT_LIMIT:,} characters, split"),
    "long_code": ("file of code", "over data.max_line_bytes, skipped"),
    "broken_code": ("file of code", "that is not all understood, read as far as it is"),
    "other_languages": ("record", "of a language that is not read as code, skipped"),
    "empty_documents": ("document", "without text, skipped"),
    "empty_files": ("file", "without text"),
}
SOME = 3  # up to this many sources get a line each


class Counts(dict[str, Counter[str]]):
    """Count documents, paragraphs and repairs (the names in REPAIRS) of each source.

    read: is called with the megabytes of text that were read, even if they yield no
    document.
    """

    def __init__(
        self,
        by_source: Mapping[str, Mapping[str, int]] | None = None,
        read: Callable[[float], None] = float,
    ) -> None:
        given = (by_source or {}).items()
        super().__init__({name: Counter(kinds) for name, kinds in given})
        self.read = read

    def __missing__(self, source: str) -> Counter[str]:
        return self.setdefault(source, Counter())

    def reading(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks unchanged and report their sizes."""
        for chunk in chunks:
            self.read(len(chunk) / 1e6)
            yield chunk

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return plain dicts for JSON; `Counts(d)` reads them back."""
        return {name: dict(+kinds) for name, kinds in self.items()}

    def lines(self) -> list[str]:
        """Return lines that report the repairs, one line per repair and source.

        Repairs that many sources need, such as files of code, and blank files get one
        line for all sources.

        >>> Counts({"a.txt": {"documents": 3, "bad_utf8": 2}}).lines()
        ['2 byte sequences outside UTF-8, replaced by U+FFFD (a.txt)']
        """
        known = {kind: text for kind, text in REPAIRS.items() if kind != "empty_files"}
        of = {kind: [n for n, kinds in self.items() if kinds[kind]] for kind in known}
        lines = [
            f"{counted(kinds[kind], what)} {words} ({name})"
            for name, kinds in self.items()
            for kind, (what, words) in known.items()
            if kinds[kind] and len(of[kind]) <= SOME
        ]
        for kind, (what, words) in known.items():
            if len(names := of[kind]) > SOME:
                total = sum(self[name][kind] for name in names)
                lines.append(f"{counted(total, what)} {words} ({join_names(names)})")
        blank = [name for name, kinds in self.items() if kinds["empty_files"]]
        if blank:
            number = counted(len(blank), "file")
            lines.append(f"{number} without text ({join_names(blank)})")
        return lines


def decode(data: bytes, counter: Counter[str]) -> str:
    """Decode UTF-8; a malformed sequence becomes U+FFFD and is counted.

    A genuine U+FFFD is EF BF BD, which decodes to itself at any place (EF starts a new
    sequence), so that the number of repairs is the difference of the two counts.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        counter["bad_utf8"] += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
        return text


_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_LINE_END = re.compile("\r\n?")
# A line end after these belongs to them, so that they never make a blank line.
_SEPARATOR = re.compile("[\u2028\u2029]+\n?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"  # these separate words; they become spaces
_CONTROL_TABLE = dict.fromkeys([*range(32), *range(127, 160)])
_CONTROL_TABLE |= {ord("\n"): "\n", **str.maketrans(dict.fromkeys(_SPACES + "\t", " "))}


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
        # Surrogates from escapes in JSON, which UTF-8 cannot hold.
        text, n = _SURROGATE.subn("\ufffd", text)
        counter["bad_utf8"] += n
        counter["control_characters"] += sum(map(text.count, _SPACES)) + len(text)
        text = text.translate(_CONTROL_TABLE)
        counter["control_characters"] -= len(text)
    return text.replace("\t", " ")


def check_utf8(text: str) -> None:
    """Refuse a text with a surrogate, which no tokenizer accepts: raise UserError.

    Surrogates come from command lines that are not UTF-8, and from escapes in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{text[:60]!r} is not UTF-8") from e


_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of a surrogate


def load_json(text: str, place: str) -> Any:
    """Read JSON; raise UserError, which begins with the place, if it is invalid.

    An escape of half a character, "\\ud83d" without the other half, is invalid too: no
    UTF-8 can hold it and no tokenizer accepts it.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        reason, line = getattr(e, "msg", e), getattr(e, "lineno", 1)
        at = f":{line}" * (line > 1)
        raise UserError(f"{place}{at}: is not JSON ({reason})") from None
    if _HALF.search(text):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            half = e.object[e.start]
            raise UserError(
                f"{place}: is not UTF-8: {half!r} is half a character"
            ) from None
    return data


def _cut(data: bytes | bytearray, start: int, limit: int) -> int:
    """Return where to end a piece of at most `limit` bytes: at a space or character."""
    end = start + limit
    space = data.rfind(b" ", start + limit // 2, end)
    if space > start:
        return space + 1
    for back in range(min(4, limit)):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end


def _blocks(
    chunks: Iterator[bytes], limit: int, mac: bool
) -> Iterator[tuple[bytes, int]]:
    """Regroup chunks into (block, part), in a way that does not depend on the chunks.

    A block of WHOLE lines ends at a line end. A line over `limit` bytes gets blocks of
    its own: parts with the value ON, and the LAST one. mac: a lone \\r is a line end
    too.
    """
    rest = bytearray()
    inside = False  # whether a part of the current line has been yielded
    for chunk in chain(chunks, [None]):
        new = len(rest) - rest.endswith(b"\r")  # there is no line end before it
        rest += chunk or b""
        cut = len(rest) if chunk is None else rest.rfind(b"\n", new) + 1
        if mac:  # a final \r may be half of \r\n
            cut = max(cut, rest.rfind(b"\r", new, -1) + 1)
        if cut:
            yield from _ended(bytes(rest[:cut]), limit, mac, inside)
            inside = False
            del rest[:cut]
        while len(rest) - rest.endswith(b"\r") > limit:
            cut = _cut(rest, 0, limit)
            yield bytes(rest[:cut]), ON
            inside = True
            del rest[:cut]


WHOLE, ON, LAST = range(3)


def _ended(
    block: bytes, limit: int, mac: bool, inside: bool
) -> Iterator[tuple[bytes, int]]:
    """Yield a block of complete lines; lines over `limit` bytes separately in parts."""
    if len(block) <= limit and not inside:
        yield block, WHOLE
        return
    whole = []  # cleaned together: two lines may hold the halves of one line end
    for line in (
        block.splitlines(True) if mac else re.findall(b"[^\n]*\n|[^\n]+", block)
    ):
        size = len(line.removesuffix(b"\n").removesuffix(b"\r"))
        if size <= limit and not inside:
            whole.append(line)
            continue
        if whole:
            yield b"".join(whole), WHOLE
            whole = []
        start = 0
        while size - start > limit:
            cut = _cut(line, start, limit)
            yield line[start:cut], ON
            start = cut
        yield line[start:], LAST
        inside = False
    if whole:
        yield b"".join(whole), WHOLE


def text_lines(
    chunks: Iterator[bytes], limit: int, counter: Counter[str]
) -> Iterator[str]:
    r"""Yield cleaned, stripped lines; an empty string for each blank line.

    >>> list(text_lines(iter([b"A \x00cat.\r\n\n", b" It sat"]), 99, Counter()))
    ['A cat.', '', 'It sat']
    """
    seen = False  # whether a part of the current long line has text
    for block, part in _blocks(chunks, limit, mac=True):
        lines = clean(decode(block, counter), counter).split("\n")
        if part == WHOLE and not lines[-1]:
            lines.pop()  # the text after the last line end
        for line in map(str.strip, lines):
            # A part without visible text must not become a blank line.
            if line or part == WHOLE:
                seen = True
                yield line
        if part == LAST:
            counter["long_lines"] += 1
            if not seen:
                yield ""
        if part != ON:
            seen = False


def json_lines(
    name: str,
    chunks: Iterator[bytes],
    limit: int,
    counter: Counter[str],
    skipped: Callable[[], int] = int,
) -> Iterator[tuple[dict[str, Any], Callable[[], str]]]:
    """Yield the object of each JSON line, and a function that returns its place.

    `skipped()` counts the lines before the chunks; it is called only for messages.
    """
    number = 0

    def where() -> str:
        return f"{name}, line {skipped() + number}"

    for block, part in _blocks(chunks, limit, mac=False):
        if part != WHOLE:  # JSON cannot be split, so the whole record is skipped
            number += part == LAST
            counter["long_records"] += part == LAST
            continue
        for line in block.removesuffix(b"\n").split(b"\n"):
            number += 1
            text = decode(line, counter)
            if text.startswith("\ufeff"):
                counter["bom"] += 1
                text = text[1:]
            if not text.strip():
                continue
            try:
                # Raw control characters are repaired later, not refused.
                record = json.loads(text, strict=False)
            except (ValueError, RecursionError) as err:
                raise UserError(f"{where()}: not JSON ({err})") from None
            if not isinstance(record, dict):
                raise UserError(f"{where()}: not a JSON object")
            yield record, where


# WikiText has a space at both ends of a title line and within each run of "=".
_TITLED = re.compile(rb"(?:[ \t]*\r?\n)* = [^=\s][^\n]* = \r?\n[ \t]*\r?\n")
_TITLE = re.compile("= [^=].* =")


def is_titled(head: bytes) -> bool:
    """Return whether the first bytes of a file show that it is WikiText.

    >>> is_titled(b" \\n = Homarus gammarus = \\n \\n Homarus gammarus , known as")
    True
    >>> is_titled(b"= Homarus gammarus =\\n\\nHomarus gammarus, known as")
    False
    """
    return bool(_TITLED.match(head))


def group(
    lines: Iterable[str], counter: Counter[str], titled: bool = False
) -> Iterator[list[str]]:
    """Group lines into documents, which begin after blank lines.

    titled: as in WikiText, documents begin with a title, " = Title = " between blank
    lines; headings of sections have more signs, " = = Section = = ".

    A document that grows over DOCUMENT_LIMIT is split, and counted.

    >>> list(group(["A cat.", "It sat.", "", "", "A dog."], Counter()))
    [['A cat.', 'It sat.'], ['A dog.']]
    """
    document: list[str] = []
    size = 0
    blank = True
    for line, after in pairwise(chain(lines, [""])):
        if line:
            begins = blank and not (titled and (after or not _TITLE.fullmatch(line)))
            if document and (begins or size > DOCUMENT_LIMIT):
                counter["long_documents"] += not begins
                yield document
                document, size = [], 0
            document.append(line)
            size += len(line)
        blank = not line
    if document:
        yield document

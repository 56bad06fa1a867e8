# SPDX-License-Identifier: Apache-2.0
"""Read tables of labeled text, from files or TensorFlow Datasets.

- `a.tsv`, `b.tsv.gz`: one row per line, cells separated by tabs; quotes are literal
- `c.csv`: as spreadsheets write it; quoted cells may hold commas, quotes, line ends
- `d.jsonl`, `e.json.gz`: one object per line, or a list of objects
- `f.txt`: one text per line, unchanged; only for a single column without labels
- `tfds:glue/rte:train`: TensorFlow Datasets on this machine

The first line of a TSV or CSV file names its columns, unless all requested columns are
numbers: then there is no such line, and column 1 is the first.

An empty line is an empty text in a table with one column; in other tables it is
skipped. Empty rows at the end of a file are left out. Both are reported.
"""

import codecs
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from bertjax import UserError, counted, join_names, registry
from bertjax.data.corpus import files, tfds_source
from bertjax.data.corpus.line_repair import load_json
from bertjax.data.corpus.sources import expand_paths
from bertjax.data.corpus.table_files import csv_rows
from bertjax.data.rendering import visible
from bertjax.storage.paths import expand

Say = Callable[[str], None]
Columns = Mapping[str, str]  # {config key or flag that requests a column: its name}

WANTED = "FILE.tsv, .csv or .jsonl"
SUFFIX = re.compile(r"\.(tsv|csv|jsonl|json|txt)(\.gz|\.zst)?$", re.IGNORECASE)
LOOK = 10_000  # lines to look at, to guess whether the first one names the columns
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
OBJECTS = re.compile(r"\s*(\{|\[\s*\{)")
SNAKE = re.compile(r"[a-z]+(_[a-z0-9]+)+")
NAMES = (
    "text texts sentence sentence1 sentence_a question question1 premise query title"
)
NAMES += " review comment content body input utterance document token word words label"
NAMES = {*NAMES.split(), "文本", "句子", "内容"}  # usual names of columns of texts


def silent(text: str) -> None:
    """Ignore a message; a Say for callers that report nothing."""


def report(
    say: Say, places: Sequence[str], what: str, note: str, source: str = ""
) -> None:
    """Report the number of things and the first places; report nothing for none.

    >>> report(print, ["t.tsv:3", "t.tsv:9"], "row", " with an empty text, kept")
    2 rows with an empty text, kept: t.tsv:3, t.tsv:9
    """
    if places:
        begin = f"{source}: " if source else ""
        say(f"{begin}{counted(len(places), what)}{note}: {join_names(places)}")


class Row(NamedTuple):
    """A row: its cells by column, and its place, "train.tsv:7"."""

    cells: Mapping[str, Any]
    place: str


def read_rows(
    value: str,
    key: str,
    columns: Columns,
    say: Say = silent,
    optional: Sequence[str] = (),
) -> list[Row]:
    """Read the rows of all sources that a config value names, in order.

    value: files, patterns, tfds:name:split, separated by commas; key: the config key,
    for messages. columns: {config key: name of the column}, which must all exist.
    optional: columns that may exist; from files all columns are read. Reports skipped
    lines. Raises UserError, naming file and line, for an invalid table.

    >>> read_rows("dev.tsv", "data.valid", {"task.text": "sentence"})[0]
    Row(cells={'sentence': 'good fun', 'label': '1'}, place='dev.tsv:2')
    """

    def read_tfds(entry: str) -> list[Row]:
        wanted = {column: key for key, column in columns.items()}
        builder, split = tfds_source.open_split(entry, wanted)
        features = builder.info.features
        read = [*wanted, *(name for name in optional if name in features)]
        rows = enumerate(tfds_source.read_split(builder, split, read))
        return [
            Row({k: decoded(v, features[k]) for k, v in row.items()}, f"{entry}[{i}]")
            for i, row in rows
        ]

    read_path = partial(read_file, columns=columns, say=say)
    return read_entries(value, key, WANTED, "rows", read_tfds, read_path)


Read = Callable[[str], Sequence[Any]]


def read_entries(
    value: str, key: str, pattern: str, what: str, read_tfds: Read, read_path: Read
) -> list[Any]:
    """Read all sources that a config value names, in order.

    pattern: the kinds of files; what: the things in them, for messages. Raises
    UserError for a source without any.
    """
    found: list[Any] = []
    for entry in registry.split_list(value):
        if entry.startswith("tfds:"):
            part = read_tfds(entry)
        else:
            paths = expand_paths(entry, key, pattern=pattern)
            part = [one for path in paths for one in read_path(path)]
        if not part:
            raise UserError(f"{key}={entry}: there are no {what}")
        found += part
    if not found:
        raise UserError(f"{key} is empty: give {what}, {pattern}")
    return found


def parse_text(text: str, name: str, columns: Columns, say: Say = silent) -> list[Row]:
    """Parse the rows of a text: JSON if it begins with an object, otherwise TSV."""
    kind = "json" if has_objects(text) else "tsv"
    return list(parse_rows(text, kind, name, columns, say))


def parse_lines(
    text: str, name: str, columns: Columns, say: Say = silent
) -> Iterator[Row]:
    """Yield one row per line; the line is the text."""
    return parse_rows(text, "txt", name, columns, say)


def read_file(path: str, columns: Columns, say: Say = silent) -> list[Row]:
    """Read the rows of one file, as `read_rows` does."""
    if not (kind := kind_of(path)):
        raise UserError(f"{path}: a table has to be a .tsv, .csv or .jsonl file")
    return list(parse_rows(read_text(path), kind, path, columns, say))


def kind_of(path: str) -> str:
    """Return the kind of table (see `parse_rows`) by a file's suffix, or ""."""
    suffix = SUFFIX.search(path)
    return suffix[1].lower().removesuffix("l") if suffix else ""


def has_objects(text: str) -> bool:
    """Return whether a text begins like JSON lines or a list of objects."""
    return OBJECTS.match(text) is not None


def is_json(path: str) -> bool:
    """Return whether a file's suffix is that of JSON lines or JSON."""
    return kind_of(path) == "json"


def read_text(path: str) -> str:
    """Read and decompress a file. Raises UserError if it is damaged or not UTF-8."""
    return decode(b"".join(files.unpacked(path)), path)


def read_lines(path: str, flag: str) -> list[str]:
    """Return the lines of a file, or of standard input (-), without line ends.

    The file may be compressed (.gz, .zst), or a pipe, which is read to its end. Raises
    UserError, naming the flag and a bad line.
    """
    where, file = f"{flag}={path}", expand(path, flag)
    if file.is_socket() or file.is_char_device() or file.is_block_device():
        raise UserError(f"{where}: neither a file nor a pipe")
    try:
        if path == "-":
            content = sys.stdin.buffer.read()
        elif file.is_file() and files.part_name(path)[1]:
            content = b"".join(files.unpacked(str(file)))
        else:
            content = file.read_bytes()
    except OSError as e:
        raise UserError(f"{where} cannot be read: {e.strerror}") from e
    lines = decode(content, where).split("\n")
    if not lines[-1]:
        lines.pop()  # after a final newline there is no further line
    if not lines:
        raise UserError(f"{where} is empty")
    return [line.removesuffix("\r") for line in lines]


def decode(content: bytes, name: str, before: int = 0) -> str:
    """Decode UTF-8. Raises UserError, naming the first bad line.

    before: the number of lines in the file before this content.
    """
    try:
        return content.decode("utf-8" if before else "utf-8-sig")
    except UnicodeDecodeError as e:
        line = before + content[: e.start].count(b"\n") + 1
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        why = "is UTF-16, and text has to be UTF-8" if wide else "is not UTF-8"
        raise UserError(f"{name}:{line}: {why}") from None


def parse_rows(
    text: str, kind: str, name: str, columns: Columns, say: Say = silent
) -> Iterator[Row]:
    """Yield the rows of a text of kind "tsv", "csv", "json" or "txt".

    Reports skipped lines (see the module's docstring). Raises UserError.
    """
    if kind in ("json", "txt"):
        parse = _json_rows if kind == "json" else _bare_rows
        yield from parse(text, name, columns, say)
        return
    lines = [(number, line.split("\t")) for number, line in numbered_lines(text)]
    if kind == "csv":
        found = csv_rows(io.StringIO(text, newline=""), name)
        lines = [(number, cells or [""]) for number, cells in found]
    at_end = []
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        at_end.append(f"{name}:{lines.pop()[0]}")
    note = " without any content at the end of the table, left out"
    report(say, at_end[::-1], "row", note)
    widths = (len(cells) for _, cells in lines if not _is_blank(cells))
    several = next(widths, 1) > 1
    by_number = bool(columns) and all(map(str.isdecimal, columns.values()))
    blank, rows = [], []
    for number, cells in lines:
        if _is_blank(cells) and (several or not (by_number or rows)):
            blank.append(f"{name}:{number}")
        else:
            rows.append((number, cells))
    report(say, blank, "empty line", ", skipped")
    if not rows:
        return
    number, first = rows[0]
    if by_number:
        header = [str(i + 1) for i in range(len(first))]
        if is_header([cells for _, cells in rows[:LOOK]], columns):
            _report_header(f"{name}:{number}", first, columns, say)
    else:
        header = [cell.strip() for cell in rows.pop(0)[1]]
        if twice := {c for c in columns.values() if header.count(c) > 1}:
            raise UserError(f"{name}:{number}: two columns are {min(twice)!r}")
    _check_columns(header, name, columns, _as_numbers(header, columns))
    for number, cells in rows:
        if len(cells) != len(header):
            raise UserError(
                f"{name}:{number}: the row has {counted(len(cells), 'cell')}, "
                f"the first one {len(header)}"
            )
        yield Row(dict(zip(header, cells, strict=True)), f"{name}:{number}")


def is_header(lines: Sequence[Sequence[str]], columns: Columns) -> bool:
    """Guess whether the first line names the columns, although columns have numbers.

    It does if it has a word above a column of numbers; or if its texts look like names
    and its label occurs only once, while other labels repeat, or one of its texts is a
    usual column name (NAMES) or in snake_case.

    >>> is_header([["sentence", "label"], ["good fun", "1"]], {"task.text": "1"})
    True
    """
    first, *others = [[cell.strip() for cell in cells] for cells in lines] or [[]]
    if not others or any(len(cells) != len(first) for cells in others):
        return False
    at = {key: int(column) - 1 for key, column in columns.items()}
    if not {*at.values()} <= {*range(len(first))}:
        return False  # the caller refuses such columns
    rest = list(zip(*others, strict=True))
    if len(others) > 2 and any(
        _is_word(cell) and all(map(NUMBER.fullmatch, below))
        for cell, below in zip(first, rest, strict=True)
    ):
        return True
    texts = [i for key, i in at.items() if "label" not in key]
    names = {i for i in at.values() if _is_word(first[i]) and first[i] not in rest[i]}
    if not names.issuperset(texts):
        return False
    if any(2 * len({*rest[i]}) <= len(others) for i in names - {*texts}):
        return True
    return any(first[i].lower() in NAMES or SNAKE.fullmatch(first[i]) for i in texts)


def _is_word(cell: str) -> bool:
    """Return whether a cell may be a column's name: up to three words, short."""
    return len(cell) <= 30 and len(cell.split()) <= 3 and cell[:1].isalpha()


def _report_header(
    place: str, first: Sequence[str], columns: Columns, say: Say
) -> None:
    named = _as_flags({k: first[int(column) - 1] for k, column in columns.items()})
    shown = visible(" | ".join(cell.strip()[:30] for cell in first))
    say(
        f"{place}: columns are given by number, so the first line is read as a row, "
        f"but it looks like their names: {shown}; if so, name them: {named}"
    )


def _as_flags(columns: Columns) -> str:
    """Format columns as command-line arguments."""
    by_key: dict[str, list[str]] = {}
    for key, column in columns.items():
        by_key.setdefault(re.split(r"[\[:]", key)[0], []).append(column.strip())
    return " ".join(
        f"{'' if key[0] == '-' else '--config.'}{key}={shlex.quote(','.join(names))}"
        for key, names in by_key.items()
    )


def _as_numbers(header: Sequence[str], columns: Columns) -> str:
    """Return advice to give columns by number, if the first line looks like a row."""
    if len(header) < len(columns) or all(map(_is_word, header)):
        return ""
    numbers = _as_flags({key: str(i) for i, key in enumerate(columns, 1)})
    return f"; where no line names columns, give their numbers, for instance {numbers}"


def _is_blank(cells: Sequence[str]) -> bool:
    return len(cells) == 1 and not cells[0].strip()


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a text, from 1."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, 1):
        yield number, line.removesuffix("\r")


def _json_rows(text: str, name: str, columns: Columns, say: Say) -> Iterator[Row]:
    for place, found in _json_values(text, name, say):
        if not isinstance(found, dict):
            raise UserError(f"{place}: is not a JSON object")
        _check_columns(list(found), place, columns, "")
        yield Row(found, place)


def _json_values(text: str, name: str, say: Say) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each line, or for each object of a list."""
    if text.lstrip()[:1] == "[" and has_objects(text):
        for i, found in enumerate(load_json(text, name)):
            yield f"{name}:[{i}]", found
        return
    lines = {f"{name}:{i}": x for i, x in enumerate(text.rstrip().split("\n"), 1)}
    blank = [place for place, line in lines.items() if not line.strip()]
    report(say, blank, "empty line", ", skipped")
    for place, line in lines.items():
        if line.strip():
            yield place, load_json(line, place)


def _bare_rows(text: str, name: str, columns: Columns, say: Say) -> Iterator[Row]:
    column, *more = columns.values()
    if more:
        raise UserError(
            f"{name}: lines of text have one column; {', '.join(columns.values())} are "
            "asked for: give a table, .tsv, .csv or .jsonl"
        )
    for number, line in numbered_lines(text):
        yield Row({column: line}, f"{name}:{number}")


def decoded(value: Any, feature: Any = None) -> Any:
    """Decode bytes, and replace class numbers by names ("" for -1), also in lists.

    >>> decoded([b"a", [b"b", 3]])
    ['a', ['b', 3]]
    """
    if isinstance(value, list):
        return [decoded(part, getattr(feature, "feature", None)) for part in value]
    if hasattr(feature, "int2str"):
        return feature.int2str(value) if value >= 0 else ""
    return value.decode() if isinstance(value, bytes) else value


def _check_columns(header: list[str], name: str, columns: Columns, advice: str) -> None:
    for key, column in columns.items():
        if column not in header:
            if header and all(map(str.isdigit, (*header, column))):
                flag = "; --columns=1 reads the first" * key.startswith("--")
                width = f"{counted(len(header), 'column')} (between tabs; .csv: commas)"
                raise UserError(f"{name}: {key}={column}: the table has {width}{flag}")
            why = str(registry.unknown(key, column, header))
            for mark in ";,\t|" if len(header) == 1 else "":
                if column in map(str.strip, header[0].split(mark)):
                    why += f"; {mark!r} does not separate columns: "
                    why += ".csv has commas, .tsv tabs"
            raise UserError(f"{name}: {why}{advice}")

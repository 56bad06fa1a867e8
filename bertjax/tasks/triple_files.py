# SPDX-License-Identifier: Apache-2.0
"""Read files of triples, and of the names and texts of entities and relations.

- triples: a TSV without a header, one triple per line: head, relation, tail; or JSON
  lines with these three; both may be compressed (.gz, .zst)
- descriptions: a TSV of id, name and, optionally, text; or JSON lines with id, label
  (or name), description (or text)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bertjax import UserError, counted, registry
from bertjax.data.corpus.line_repair import load_json
from bertjax.data.corpus.sources import expand_paths
from bertjax.tasks import tables
from bertjax.tasks.tables import Columns, Say, silent

WANTED = "FILE.tsv"
BLANK = "?"  # in a query, the part that is asked for
FIELDS = "head", "relation", "tail"
HEADERS = {
    FIELDS,
    ("subject", "predicate", "object"),
    ("subject", "relation", "object"),
}
LABELS, TEXTS = ("label", "name"), ("description", "text")


class Triple(NamedTuple):
    """An edge of a graph, with its place in a file; in a query one part is BLANK."""

    head: str
    relation: str
    tail: str
    source: str
    line: int

    @property
    def place(self) -> str:
        """The file and the line, for messages."""
        return f"{self.source}:{self.line}"


class Described(NamedTuple):
    """The name of an entity or relation, and a text about it, or ""."""

    name: str
    text: str = ""


def read_triples(
    value: str, key: str, columns: Columns, say: Say = silent
) -> list[Triple]:
    """Read the triples of all files that a config value names, in order.

    key: the config key or flag, for messages. columns: not used, since their order is
    fixed. Raises UserError, naming file and line, for an invalid triple.

    >>> read_triples("train.tsv", "data.train", {})[0]
    Triple(head='a', relation='knows', tail='b', source='train.tsv', line=1)
    """

    def refuse(entry: str) -> list[Triple]:
        raise UserError(f"{key}={entry}: triples are read from files, {WANTED}")

    def read_path(path: str) -> list[Triple]:
        if found := parse_triples(tables.read_text(path), path, columns, say):
            return found
        raise UserError(f"{key}={path}: there are no triples")

    return tables.read_entries(value, key, WANTED, "triples", refuse, read_path)


def parse_triples(
    text: str, name: str, columns: Columns = (), say: Say = silent
) -> list[Triple]:
    """Parse the triples of a text, as `read_triples` does."""
    found = []
    is_json = text.lstrip()[:1] == "{"
    for number, line in _lines(text, name, say):
        cells = _json_cells(line, f"{name}:{number}") if is_json else line.split("\t")
        cells = [cell.strip() for cell in cells]
        if not found and tuple(map(str.lower, cells)) in HEADERS:
            say(f"{name}:{number}: the first line names the columns, and is skipped")
            continue
        if len(cells) != len(FIELDS) or not all(cells):
            has = counted(len(cells), "cell")
            if empty := cells.count(""):
                has += f", {empty} of them empty"
            raise UserError(
                f"{name}:{number}: a triple is head, relation and tail, with tabs "
                f"between them, {BLANK} for what is asked; this line has {has}"
            )
        found.append(Triple(*cells, name, number))
    return found


def _lines(text: str, name: str, say: Say) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a text, from 1; report and skip empty ones."""
    blank = []
    for number, line in tables.numbered_lines(text):
        if line.strip():
            yield number, line
        else:
            blank.append(f"{name}:{number}")
    tables.report(say, blank, "empty line", ", skipped")


def _json_cells(line: str, place: str) -> list[str]:
    found = load_json(line, place)
    if not isinstance(found, dict):
        raise UserError(f"{place}: is not a JSON object")
    if lacking := [name for name in FIELDS[:2] if name not in found]:
        raise UserError(f"{place}: there is no {lacking[0]}: give {', '.join(FIELDS)}")
    cells = [found.get(name) for name in FIELDS]
    cells = [BLANK if cell is None else cell for cell in cells]
    if not all(isinstance(cell, str) for cell in cells):
        raise UserError(f"{place}: {', '.join(FIELDS)} have to be texts, or null")
    return cells


def read_descriptions(value: str, key: str, say: Say = silent) -> dict[str, Described]:
    """Return the descriptions in the files that a config value names, by id.

    An entity or relation with an empty name is named by its id, and reported. Raises
    UserError, naming file and line, for a repeated id, and for lines without an id and
    a name.
    """
    found: dict[str, Described] = {}
    nameless: list[str] = []
    for entry in registry.split_list(value):
        for path in expand_paths(entry, key, pattern=WANTED):
            text = tables.read_text(path)
            read = _described_object if text.lstrip()[:1] == "{" else _described_cells
            for number, line in _lines(text, path, say):
                place = f"{path}:{number}"
                name, described = read(line, place)
                if name in found:
                    raise UserError(f"{place}: the id {name!r} occurs twice")
                if not described.name:
                    nameless.append(place)
                found[name] = described
    tables.report(say, nameless, "id", " without a name, which keep their ids")
    return {k: Described(d.name or k, d.text) for k, d in found.items()}


def _described_cells(line: str, place: str) -> tuple[str, Described]:
    name, *cells = (cell.strip() for cell in line.split("\t"))
    if not name or not 1 <= len(cells) <= 2:
        raise UserError(
            f"{place}: what an entity is called is id, name and, if there is one, a "
            "text, with tabs between them; this line has "
            f"{counted(len(cells) + 1, 'cell')}"
        )
    return name, Described(*cells)


def _described_object(line: str, place: str) -> tuple[str, Described]:
    found = load_json(line, place)
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise UserError(f"{place}: is not a JSON object with an id, a text")

    def first(names: Sequence[str]) -> str:
        value = next((found[name] for name in names if found.get(name)), "")
        if not isinstance(value, str):
            raise UserError(f"{place}: {' or '.join(names)} has to be a text")
        return " ".join(value.split())

    return found["id"], Described(first(LABELS), first(TEXTS))

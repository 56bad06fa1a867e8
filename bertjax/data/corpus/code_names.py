# SPDX-License-Identifier: Apache-2.0
"""Code as lines, and the declared types of its names, by tree-sitter (extra: code).

What is known of a name is what the same file declares: of locals, parameters, fields
and methods' results by scope, of this.x and of x.y where x is of a class in the file. A
type has no type arguments, annotations or blanks: of Map<String, int[]> it is Map. That
is no type checker and not the static analysis of the article (Liu et al. 2020,
CugLM): nothing is inherited, imported or inferred, but for a variable that begins as a
new object or, in TypeScript, as a literal.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bertjax import registry
from bertjax.data.corpus.code_grammars import GRAMMARS, Grammar

UNKNOWN = "<name>"  # the value of a name of which the file declares no type
CLASS = "<class>"  # of a name of a type
MARK = "<annotation>"
LONGEST = 64  # characters of a type that is kept

_ARGUMENTS = re.compile(rb"<[^<>]*>")
_BLANK = re.compile(rb"\s+")
_RUN = re.compile(" {2,}")

Span = tuple[int, int, str]


class Code:
    """Clean text (line_repair.clean) in a language of code_grammars.GRAMMARS.

    lines: comments are left out, and so are blank lines and what is indented; several
    blanks are one. broken: whether the parser met with something that is not of the
    language.

    >>> code = Code("// Most.\\nint max(int a) {\\n  return a; }", "java")
    >>> code.lines, code.names[0]
    (['int max(int a) {', 'return a; }'], ((4, 7, 'int'), (12, 13, 'int')))

    Raises UserError without tree-sitter, which names the extra.
    """

    def __init__(self, text: str, language: str) -> None:
        self._parser = _open(language)
        self._data = text.encode()
        self._root = self._parser.parser.parse(self._data).root_node
        self.broken = self._root.has_error
        found = self._parser.run(self._parser.comments).captures(self._root)
        comments = sorted(_edges(found.get("comment", ())))
        self._place = None
        if len(self._data) != len(text):  # bytes -> characters
            is_first = (np.frombuffer(self._data, np.uint8) & 0xC0) != 0x80
            place = self._place = np.append(0, np.cumsum(is_first)).tolist()
            comments = [(place[a], place[b]) for a, b in comments]
        self._raw = _cut_lines(_without(text, comments))
        self.lines = [
            _RUN.sub(" ", line) if "  " in line else line for _, line in self._raw
        ]

    @functools.cached_property
    def names(self) -> list[tuple[Span, ...]]:
        """The ranges of names with their types, of each line."""
        parser = self._parser
        parts = parser.run(parser.parts).captures(self._root)
        matches = parser.run(parser.declarations).matches(self._root)
        names = _name_types(self._data, parts, matches, parser.grammar.bare)
        if place := self._place:
            names = [(place[a], place[b], value) for a, b, value in names]
        return _into_lines(self._raw, names)


class _Parser(NamedTuple):
    grammar: Grammar
    parser: Any
    comments: Any
    parts: Any
    declarations: Any
    run: Any


@functools.cache
def _open(language: str) -> _Parser:
    grammar = GRAMMARS[language]
    what = f"code in {language}"
    tree_sitter: Any = registry.import_extra("tree_sitter", "code", what)
    module: Any = registry.import_extra(grammar.package, "code", what)
    known = tree_sitter.Language(getattr(module, grammar.function)())
    queries = (tree_sitter.Query(known, q) for q in grammar[2:5])
    parser = tree_sitter.Parser(known)
    return _Parser(grammar, parser, *queries, tree_sitter.QueryCursor)


def _edges(nodes: Iterable[Any]) -> Iterator[tuple[int, int]]:
    return ((node.start_byte, node.end_byte) for node in nodes)


class _Scope(NamedTuple):
    """names: what is known in it; members: of the class whose body it is, or None."""

    end: int
    names: dict[bytes, str]
    members: dict[bytes, str] | None


class _Declared(NamedTuple):
    """What a file declares.

    local: types of names by where they begin, known from there on; early: kind and type
    of those that are known before. owners: where a class's body begins -> its name;
    objects: where a property begins -> where its object does.
    """

    local: dict[int, str]
    early: dict[int, tuple[str, str]]
    owners: dict[int, bytes]
    objects: dict[int, int]


def _name_types(
    data: bytes, parts: dict[str, list[Any]], matches: list[Any], bare: bool
) -> list[Span]:
    """Return every name with its type, in order, in bytes."""
    roles = {node.start_byte: kind for kind in _ROLES for node in parts.get(kind, ())}
    calls = {node.start_byte for node in parts.get("call", ())}
    edges = _edges(parts.get("name", ()))
    names = dict(sorted((a, b) for a, b in edges if a < b))  # none that is made up
    declared = _declarations(data, matches)
    opens = [(a, -b, True) for a, b in _edges(parts.get("body", ()))]
    opens += [(a, -b, False) for a, b in _edges(parts.get("scope", ()))]
    walk = _Walk(sorted(opens), len(data))
    keys = {
        start: data[start:end] + b"()" if start in calls else data[start:end]
        for start, end in names.items()
    }
    for start, (kind, known) in sorted(declared.early.items()):
        if start not in keys:
            continue
        if kind == "function":
            # Around the scope that the function itself is.
            walk.to(start)[-2].names.setdefault(keys[start], known)
        else:
            inside = [s for s in walk.to(start) if s.members is not None]
            if inside:
                inside[-1].members.setdefault(keys[start], known)  # type: ignore[union-attr]
                if bare:
                    inside[-1].names.setdefault(keys[start], known)
    classes: dict[bytes, dict[bytes, str] | None] = {
        name: walk.scopes[at].members
        for at, name in declared.owners.items()
        if at in walk.scopes
    }
    for start, role in roles.items():
        if role == "imported" and start in keys:
            classes.setdefault(keys[start], None)
    walk.again()
    found: dict[int, str] = {}
    for start, own in keys.items():
        role = roles.get(start)
        if role in _VALUES:
            value = _VALUES[role]
        elif start in declared.local:
            value = walk.to(start)[-1].names[own] = declared.local[start]
        elif start in declared.early:
            value = declared.early[start][1]
        elif role == "own":
            value = _innermost(walk.to(start)).get(own, UNKNOWN)
        elif start in declared.objects:
            at = declared.objects[start]
            of = classes.get(found.get(at, UNKNOWN).encode())
            of = of or classes.get(keys.get(at, b"")) or {}
            value = of.get(own, UNKNOWN)
        elif role == "property":
            value = UNKNOWN
        else:
            value = CLASS if own in classes else UNKNOWN
            for scope in reversed(walk.to(start)):
                if own in scope.names:
                    value = scope.names[own]
                    break
        found[start] = value
    return [(start, end, found[start]) for start, end in names.items()]


# Of several that a name has the last.
_ROLES = ("property", "own", "class", "imported", "mark")
_VALUES = {"class": CLASS, "imported": CLASS, "mark": MARK}


def _innermost(stack: list[_Scope]) -> dict[bytes, str]:
    """Return the members of the class that this is."""
    return next((s.members for s in stack[::-1] if s.members is not None), {})


class _Walk:
    """Goes through a file, and knows which scopes are open; they keep what is put into
    them when it goes through again."""

    def __init__(self, opens: list[tuple[int, int, bool]], size: int) -> None:
        whole = _Scope(size + 1, {}, None)
        self.opens, self.at, self.stack = opens, 0, [whole]
        self.scopes = {
            start: _Scope(-end, {}, {} if body else None) for start, end, body in opens
        }

    def again(self) -> None:
        self.at, self.stack = 0, self.stack[:1]

    def to(self, place: int) -> list[_Scope]:
        """Return the scopes that are open at a byte, the innermost last."""
        stack = self.stack
        while self.at < len(self.opens) and self.opens[self.at][0] <= place:
            start = self.opens[self.at][0]
            while stack[-1].end <= start:
                stack.pop()
            stack.append(self.scopes[start])
            self.at += 1
        while stack[-1].end <= place:
            stack.pop()
        return stack


def _declarations(data: bytes, matches: list[Any]) -> _Declared:
    """Read what the query of declarations found."""
    declared = _Declared({}, {}, {}, {})
    for _, found in matches:
        if "of" in found:
            at = found["object"][0].start_byte
            declared.objects[found["of"][0].start_byte] = at
        elif "owner" in found:
            owner = found["owner"][0]
            name = data[owner.start_byte : owner.end_byte]
            declared.owners[found["body"][0].start_byte] = name
        elif "local" in found:
            start, value = found["local"][0].start_byte, _type_of(data, found)
            if declared.local.get(start, UNKNOWN) == UNKNOWN:
                declared.local[start] = value
        else:
            [kind] = found.keys() & _EARLY
            start = found[kind][0].start_byte
            declared.early[start] = kind, _type_of(data, found)
    return declared


_EARLY = {"function", "member", "method"}
_LITERALS = {"string", "number", "boolean"}


def _type_of(data: bytes, found: dict[str, list[Any]]) -> str:
    if literal := found.keys() & _LITERALS:
        return literal.pop()
    node = (found.get("new") or found.get("type") or [None])[0]
    if node is None:
        return UNKNOWN
    behind = b"".join(data[x.start_byte : x.end_byte] for x in found.get("dims", ()))
    dims = b"[]" * (behind.count(b"[") or bool(behind))  # or "..."
    return _plain_type(data[node.start_byte : node.end_byte] + dims)


@functools.lru_cache(1 << 16)
def _plain_type(written: bytes) -> str:
    """Write a type without arguments and blanks; UNKNOWN where it is very long.

    >>> _plain_type(b"Map<String, List<int[]>> "), _plain_type(b"int []")
    ('Map', 'int[]')
    """
    text = written.replace(b"=>", b"\0")
    while (shorter := _ARGUMENTS.sub(b"", text)) != text:
        text = shorter
    plain = _BLANK.sub(b"", text).replace(b"\0", b"=>").decode()
    is_known = 0 < len(plain) <= LONGEST and plain != "var"  # of Java: inferred
    return plain if is_known else UNKNOWN


def _without(text: str, comments: list[tuple[int, int]]) -> str:
    """Put blanks in the place of comments; line ends stay."""
    parts, at = [], 0
    for start, end in comments:
        if start >= at:
            blank = (" " * len(line) for line in text[start:end].split("\n"))
            parts += [text[at:start], "\n".join(blank)]
            at = end
    return "".join([*parts, text[at:]])


def _cut_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines that are not blank, stripped, and where each begins."""
    found, start = [], 0
    for raw in text.split("\n"):
        if line := raw.strip():
            found.append((start + raw.index(line[0]), line))
        start += len(raw) + 1
    return found


def _into_lines(
    lines: list[tuple[int, str]], names: list[Span]
) -> list[tuple[Span, ...]]:
    """Say where in its line each name is."""
    values, at = [], 0
    for begin, line in lines:
        end, own = begin + len(line), []
        while at < len(names) and names[at][0] < end:
            first, last, value = names[at]
            own.append((first - begin, last - begin, value))
            at += 1
        if "  " in line:
            own = _without_runs(line, own)
        values.append(tuple(own))
    return values


def _without_runs(line: str, spans: list[Span]) -> list[Span]:
    """Move ranges to where their names are when runs of blanks are one."""
    runs = [(m.end(), m.end() - m.start() - 1) for m in _RUN.finditer(line)]

    def moved(place: int) -> int:
        return place - sum(cut for end, cut in runs if end <= place)

    return [(moved(a), moved(b), value) for a, b, value in spans]

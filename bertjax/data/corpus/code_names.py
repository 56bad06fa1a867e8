# SPDX-License-Identifier: Apache-2.0
"""Code as lines, and the declared types of its names, by tree-sitter (extra: code).

The type of a name is known only if the same file declares it: by scope for locals,
parameters, fields and results of methods; for this.x; and for x.y if x has a class of
this file. Types are stored without type arguments, annotations and blanks:
Map<String, int[]> becomes Map. This is no type checker and not the static analysis of
the article (Liu et al. 2020, CugLM): nothing is inherited, imported or inferred, except
that a variable may get its type from a new object or, in TypeScript, from a literal.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bertjax import registry
from bertjax.data.corpus.code_grammars import GRAMMARS, Grammar

UNKNOWN = "<name>"  # the value of a name whose type the file does not declare
CLASS = "<class>"  # the value of the name of a type
MARK = "<annotation>"
LONGEST = 64  # characters; a longer type becomes UNKNOWN

_ARGUMENTS = re.compile(rb"<[^<>]*>")
_BLANK = re.compile(rb"\s+")
_RUN = re.compile(" {2,}")

Span = tuple[int, int, str]


class Code:
    """Clean text (line_repair.clean) in a language of code_grammars.GRAMMARS.

    lines: the code without comments, blank lines and indentation; runs of blanks become
    one blank. broken: whether the parser found anything that is not in the language.

    >>> code = Code("// Most.\\nint max(int a) {\\n  return a; }", "java")
    >>> code.lines, code.names[0]
    (['int max(int a) {', 'return a; }'], ((4, 7, 'int'), (12, 13, 'int')))

    Raises UserError, which names the extra, if tree-sitter is missing.
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
        """The ranges of names and their types in each line."""
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
    """names: those known in it; members: those of its class if it is a class body."""

    end: int
    names: dict[bytes, str]
    members: dict[bytes, str] | None


class _Declared(NamedTuple):
    """The declarations of a file.

    local: start of a name -> its type, for names known from their declaration on;
    early: start of a name -> its kind and type, for names known before it. owners:
    start of a class body -> name of the class; objects: start of a property -> start of
    its object.
    """

    local: dict[int, str]
    early: dict[int, tuple[str, str]]
    owners: dict[int, bytes]
    objects: dict[int, int]


def _name_types(
    data: bytes, parts: dict[str, list[Any]], matches: list[Any], bare: bool
) -> list[Span]:
    """Return every name with its type, in order; places are counted in bytes."""
    roles = {node.start_byte: kind for kind in _ROLES for node in parts.get(kind, ())}
    calls = {node.start_byte for node in parts.get("call", ())}
    edges = _edges(parts.get("name", ()))
    names = dict(sorted((a, b) for a, b in edges if a < b))  # without empty names
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
            # In the scope around the one that the function itself opens.
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


# If a name has several of these roles, the last one counts.
_ROLES = ("property", "own", "class", "imported", "mark")
_VALUES = {"class": CLASS, "imported": CLASS, "mark": MARK}


def _innermost(stack: list[_Scope]) -> dict[bytes, str]:
    """Return the members of the innermost class."""
    return next((s.members for s in stack[::-1] if s.members is not None), {})


class _Walk:
    """Goes through a file and tracks the open scopes, which keep their contents when it
    goes through the file again."""

    def __init__(self, opens: list[tuple[int, int, bool]], size: int) -> None:
        whole = _Scope(size + 1, {}, None)
        self.opens, self.at, self.stack = opens, 0, [whole]
        self.scopes = {
            start: _Scope(-end, {}, {} if body else None) for start, end, body in opens
        }

    def again(self) -> None:
        self.at, self.stack = 0, self.stack[:1]

    def to(self, place: int) -> list[_Scope]:
        """Return the scopes that are open at a byte, innermost last."""
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
    """Read the matches of the query for declarations."""
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
    """Return a type without arguments and blanks; UNKNOWN if it is very long.

    >>> _plain_type(b"Map<String, List<int[]>> "), _plain_type(b"int []")
    ('Map', 'int[]')
    """
    text = written.replace(b"=>", b"\0")
    while (shorter := _ARGUMENTS.sub(b"", text)) != text:
        text = shorter
    plain = _BLANK.sub(b"", text).replace(b"\0", b"=>").decode()
    is_known = 0 < len(plain) <= LONGEST and plain != "var"  # Java's var is inferred
    return plain if is_known else UNKNOWN


def _without(text: str, comments: list[tuple[int, int]]) -> str:
    """Replace comments by blanks; line ends stay."""
    parts, at = [], 0
    for start, end in comments:
        if start >= at:
            blank = (" " * len(line) for line in text[start:end].split("\n"))
            parts += [text[at:start], "\n".join(blank)]
            at = end
    return "".join([*parts, text[at:]])


def _cut_lines(text: str) -> list[tuple[int, str]]:
    """Return the non-blank lines, stripped, and the place where each begins."""
    found, start = [], 0
    for raw in text.split("\n"):
        if line := raw.strip():
            found.append((start + raw.index(line[0]), line))
        start += len(raw) + 1
    return found


def _into_lines(
    lines: list[tuple[int, str]], names: list[Span]
) -> list[tuple[Span, ...]]:
    """Return the names in each line, with their places in the line."""
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
    """Move ranges to the places of their names after runs of blanks became one."""
    runs = [(m.end(), m.end() - m.start() - 1) for m in _RUN.finditer(line)]

    def moved(place: int) -> int:
        return place - sum(cut for end, cut in runs if end <= place)

    return [(moved(a), moved(b), value) for a, b, value in spans]

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


class Code(NamedTuple):
    """A file's lines, and of each line the ranges of its names with their types.

    broken: whether the parser met with something that is not of the language.
    """

    lines: list[str]
    names: list[tuple[Span, ...]]
    broken: bool


def read_code(text: str, language: str) -> Code:
    """Read clean text (line_repair.clean) in a language of code_grammars.GRAMMARS.

    Comments are left out, and so are blank lines and what is indented; several blanks
    are one.

    >>> read_code("// Most.\\nint max(int a) {\\n  return a; }", "java")[:2]
    (['int max(int a) {', 'return a; }'], [((4, 7, 'int'), (12, 13, 'int')), \
((7, 8, 'int'),)])

    Raises UserError without tree-sitter, which names the extra.
    """
    parser = _open(language)
    data = text.encode()
    tree = parser.parser.parse(data)
    parts = parser.run(parser.parts).captures(tree.root_node)
    matches = parser.run(parser.declarations).matches(tree.root_node)
    names = _name_types(data, parts, matches, parser.grammar.bare)
    comments = sorted(_edges(parts.get("comment", ())))
    if len(data) != len(text):  # bytes -> characters
        place = np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)
        place = np.append(0, place).tolist()
        names = [(place[a], place[b], value) for a, b, value in names]
        comments = [(place[a], place[b]) for a, b in comments]
    lines, values = _cut_lines(_without(text, comments), names)
    return Code(lines, values, tree.root_node.has_error)


class _Parser(NamedTuple):
    grammar: Grammar
    parser: Any
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
    queries = (tree_sitter.Query(known, q) for q in grammar[2:4])
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
    """What a file declares: of the name at each byte its kind and type."""

    types: dict[int, tuple[str, str]]
    owners: dict[int, bytes]  # where a class's body begins -> its name
    objects: dict[int, int]  # where a property begins -> where its object does


def _name_types(
    data: bytes, parts: dict[str, list[Any]], matches: list[Any], bare: bool
) -> list[Span]:
    """Return every name with its type, in order, in bytes."""
    starts = {kind: {a for a, _ in _edges(parts.get(kind, ()))} for kind in _KINDS}
    names = sorted(set(_edges(parts.get("name", ()))))
    declared = _declarations(data, matches)
    opens = [(a, -b, True) for a, b in _edges(parts.get("body", ()))]
    opens += [(a, -b, False) for a, b in _edges(parts.get("scope", ()))]
    walk = _Walk(sorted(opens), len(data))
    ends = dict(names)

    def key(start: int) -> bytes:
        called = b"()" if start in starts["call"] else b""
        return data[start : ends.get(start, start)] + called

    for start in sorted(declared.types):
        kind, known = declared.types[start]
        if kind == "function":
            walk.to(start)[-1].names.setdefault(key(start), known)
        elif kind in ("member", "method"):
            inside = [s for s in walk.to(start) if s.members is not None]
            if inside:
                inside[-1].members.setdefault(key(start), known)  # type: ignore[union-attr]
                if bare:
                    inside[-1].names.setdefault(key(start), known)
    classes = {
        name: walk.scopes[at].members
        for at, name in declared.owners.items()
        if at in walk.scopes
    }
    for start in starts["imported"]:
        classes.setdefault(key(start), None)
    walk.again()
    found: dict[int, str] = {}
    for start, end in names:
        stack, own = walk.to(start), key(start)
        if start in starts["mark"]:
            value = MARK
        elif start in starts["class"] or start in starts["imported"]:
            value = CLASS
        elif start in declared.types:
            kind, value = declared.types[start]
            if kind == "local":
                stack[-1].names[own] = value
        elif start in starts["own"]:
            value = _innermost(stack).get(own, UNKNOWN)
        elif start in declared.objects:
            at = declared.objects[start]
            of = classes.get(found.get(at, UNKNOWN).encode())
            of = of or classes.get(data[at : ends.get(at, at)]) or {}
            value = of.get(own, UNKNOWN)
        elif start in starts["property"]:
            value = UNKNOWN
        else:
            usual = CLASS if own in classes else UNKNOWN
            value = next((s.names[own] for s in stack[::-1] if own in s.names), usual)
        found[start] = value
    return [(start, end, found[start]) for start, end in names]


_KINDS = ("class", "mark", "call", "property", "own", "imported")


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
    types: dict[int, tuple[str, str]] = {}
    owners, objects = {}, {}
    for _, found in matches:
        if "of" in found:
            objects[found["of"][0].start_byte] = found["object"][0].start_byte
            continue
        if "owner" in found:
            owner = found["owner"][0]
            name = data[owner.start_byte : owner.end_byte]
            owners[found["body"][0].start_byte] = name
            continue
        [kind] = found.keys() & _DECLARES
        start = found[kind][0].start_byte
        value = _type_of(data, found)
        if types.get(start, ("", UNKNOWN))[1] in (UNKNOWN, "var"):
            types[start] = kind, value
    for start, (kind, value) in types.items():
        if value == "var":  # of Java: no type of that name can be declared
            types[start] = kind, UNKNOWN
    return _Declared(types, owners, objects)


_DECLARES = {"local", "function", "member", "method"}
_LITERALS = {"string", "number", "boolean"}


def _type_of(data: bytes, found: dict[str, list[Any]]) -> str:
    if literal := found.keys() & _LITERALS:
        return literal.pop()
    node = (found.get("new") or found.get("type") or [None])[0]
    if node is None:
        return UNKNOWN
    dims = b"[]" * len(found.get("dims", ()))
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
    return plain if 0 < len(plain) <= LONGEST else UNKNOWN


def _without(text: str, comments: list[tuple[int, int]]) -> str:
    """Put blanks in the place of comments; line ends stay."""
    parts, at = [], 0
    for start, end in comments:
        if start >= at:
            blank = (" " * len(line) for line in text[start:end].split("\n"))
            parts += [text[at:start], "\n".join(blank)]
            at = end
    return "".join([*parts, text[at:]])


def _cut_lines(
    text: str, names: list[Span]
) -> tuple[list[str], list[tuple[Span, ...]]]:
    """Cut text at its line ends, and say where in its line each name is."""
    lines, values, start, at = [], [], 0, 0
    for raw in text.split("\n"):
        end = start + len(raw)
        line = raw.strip()
        begin = start + raw.find(line) if line else end
        own = []
        while at < len(names) and names[at][0] < end:
            first, last, value = names[at]
            own.append((first - begin, last - begin, value))
            at += 1
        if line:
            if "  " in line:
                line, own = _with_single_blanks(line, own)
            lines.append(line)
            values.append(tuple(own))
        start = end + 1
    return lines, values


def _with_single_blanks(line: str, spans: list[Span]) -> tuple[str, list[Span]]:
    """Make runs of blanks one, and move the ranges with what they stand for."""
    runs = [(m.end(), m.end() - m.start() - 1) for m in _RUN.finditer(line)]

    def moved(place: int) -> int:
        return place - sum(cut for end, cut in runs if end <= place)

    return _RUN.sub(" ", line), [(moved(a), moved(b), value) for a, b, value in spans]

# SPDX-License-Identifier: Apache-2.0
"""Documents, which sources yield, and how a record with fields becomes one."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bertjax import UserError, counted, join_names
from bertjax.data.corpus import files
from bertjax.data.corpus.code_grammars import code_rules
from bertjax.data.corpus.line_repair import REPAIRS, Counts, clean, decode


class Document(NamedTuple):
    """One document: cleaned lines, none of them empty.

    group: the value of data.group_field (a language, a site), or "";
    entities: the strings of data.entity_field.
    values: None, or if there are streams, the values of each paragraph by stream name:
    a value of the sentence (None for no value), or ranges of its characters,
    ((start, end, value), ...). Then paragraphs are sentences and are not split.
    is_counted: the reason why it has no paragraphs is already counted.
    """

    paragraphs: list[str]
    group: str = ""
    entities: tuple[str, ...] = ()
    values: Sequence[dict[str, Any]] | None = None
    is_counted: bool = False


class Fields(NamedTuple):
    """The fields (columns) of a record that are read, by config key; "" reads none.

    streams: the fields that are aligned with the text (aligned_records.py), separated
    by commas. layout: "", or "turns" if records are conversations. code_field: for
    records of code, the field with a path or a language.
    """

    text_field: str = "text"
    group_field: str = ""
    entity_field: str = ""
    streams: str = ""
    layout: str = ""
    code_field: str = ""

    @property
    def is_aligned(self) -> bool:
        """Whether records have values for their sentences besides the text."""
        return bool(self.streams or self.layout)

    def keys(self) -> dict[str, str]:
        """Return {field: its config key}, for the fields read from records of text."""
        named = ("text_field", "group_field", "entity_field", "code_field")
        keys = {getattr(self, name): f"data.{name}" for name in named}
        return {field: key for field, key in keys.items() if field}

    def suffix(self) -> str:
        """Return the suffix of a fingerprint; "" for the defaults."""
        if self.code_field:
            return f":{'|'.join(self)}:{code_rules()}"
        fields = self[:5] if self.is_aligned else self[:3]  # as in older versions
        return "" if self == TEXT else f":{'|'.join(fields)}"


TEXT = Fields()
LEFT_OUT = "long_records", "long_code", "other_languages"  # repairs that drop documents


@dataclass
class Source:
    """Something that documents are read from.

    `name` is for people; `seen` is the state of the file that `fingerprint` saw. Call
    `fingerprint` before `documents` and `split`, because it also creates generated
    sources (`builtin:docs`). `start` and `end` limit this source to a part of the
    whole, in the units of `split`. `parses` is the file in which parses of its code are
    kept (parsed_code.py), "" for none.
    """

    name: str
    fields: Fields = TEXT
    seen: files.Seen | None = None
    start: int = 0
    end: int | None = None
    parses: str = ""

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return a string that changes whenever the documents may change."""
        raise NotImplementedError

    def documents(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents in order; count them and every repair in `counts`.

        Raises UserError, which names the file (and line), if the source cannot be read
        or is damaged. A source may hold no document; callers that have read all sources
        call `refuse_empty`.
        """
        counter = counts[self.name]
        for document in self.read(counts, max_line_bytes):
            if not document.paragraphs:
                counter["empty_documents"] += not document.is_counted
                continue
            counter["documents"] += 1
            counter["paragraphs"] += len(document.paragraphs)
            yield document

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        """Yield the documents in order, empty ones included; count every repair."""
        raise NotImplementedError

    def make(
        self, record: Mapping[str, Any], where: Callable[[], str], counts: Counts
    ) -> Document:
        """Convert a record to a document (`make_document`), and report its text."""
        document = make_document(record, self.fields, where, counts[self.name])
        counts.read(sum(map(len, document.paragraphs)) / 1e6)
        return document

    def split(self, piece_bytes: int) -> list["Source"]:
        """Cut into independent pieces of about `piece_bytes`, which can be pickled.

        Read one after another, they yield the documents and counts of the whole, except
        that a document over DOCUMENT_LIMIT may be split at other places. The cuts
        depend on the file and on `piece_bytes` alone.
        """
        return [self]

    def text_bytes(self) -> int | None:
        """Estimate the bytes of its text without reading it; None if unknown."""
        return None

    @property
    def is_code(self) -> bool:
        """Whether its text is code, which has to be parsed."""
        return bool(self.fields.code_field)

    def cut_rule(self) -> str:
        """Return the rule by which `split` may cut a document; "" if it cuts none."""
        return ""

    def refuse_changed(self) -> None:
        """Raise UserError if the file is no longer what `fingerprint` saw."""
        files.refuse_changed(self.name, self.seen)

    def locate(self, paragraph: str, max_line_bytes: int) -> str:
        """Return where a paragraph first occurs: the file, and the line if known."""
        return self.name


def refuse_empty(sources: Sequence[Source], counts: Counts) -> None:
    """Raise UserError if none of the sources has a document in `counts`."""
    counters = [counts[source.name] for source in sources]
    if not any(counter["documents"] for counter in counters):
        left = {kind: sum(c[kind] for c in counters) for kind in LEFT_OUT}
        parts = [
            f"{counted(number, REPAIRS[kind][0])} {REPAIRS[kind][1]}"
            for kind, number in left.items()
            if number
        ]
        more = "".join(f" and {part.removesuffix(', skipped')}" for part in parts)
        names = join_names([source.name for source in sources])
        raise UserError(f"{names}: holds no document, only blanks{more}")


def make_document(
    record: Mapping[str, Any],
    fields: Fields,
    where: Callable[[], str],
    counter: Counter[str],
) -> Document:
    """Convert a record to a document; `where()` is the beginning of messages.

    The text is a string or a list: of paragraphs, of integers (one paragraph of ids,
    for data.vocab="ids:..."), or of lists of integers. Null is a document without text.

    >>> record = {"text": "One.\\n\\nTwo.", "lang": "en", "names": ["One"]}
    >>> make_document(record, Fields("text", "lang", "names"), str, Counter())[:3]
    (['One.', 'Two.'], 'en', ('One',))
    >>> make_document({"text": [[3, 1], [4]]}, Fields(), str, Counter()).paragraphs
    ['3 1', '4']
    """
    if not fields.keys().keys() <= record.keys():
        refuse_missing(fields.keys(), record, where())

    def text(value: Any, field: str) -> str:
        if isinstance(value, bytes):
            value = decode(value, counter)
        return clean(check_text(value, field, where), counter)

    def as_list(value: Any, field: str) -> list[Any]:
        if value is not None and not isinstance(value, list):
            kind = type(value).__name__
            raise UserError(
                f"{where()}: `{field}` is not a string nor a list of them but {kind}"
            )
        return value or []

    group = ""
    if fields.group_field:
        value = record[fields.group_field]
        value = str(value) if type(value) is int else value
        group = text(value, fields.group_field).strip()
        if not 0 < len(group) <= LONGEST or not group.isprintable():
            raise UserError(
                f"{where()}: `{fields.group_field}` is {group[: LONGEST + 1]!r}, but "
                f"names of groups are 1 to {LONGEST} printable characters"
            )
    entities: list[str] = []
    if fields.entity_field:
        for value in as_list(record[fields.entity_field], fields.entity_field):
            entities += [" ".join(text(value, fields.entity_field).split())]
    parts = record[fields.text_field]
    if isinstance(parts, str | bytes):
        parts = [parts]
    parts = as_list(parts, fields.text_field)
    if parts and all(type(part) is int for part in parts):
        parts = [parts]
    lines = []
    for part in parts:
        if isinstance(part, str | bytes):
            lines += filter(
                None, map(str.strip, text(part, fields.text_field).split("\n"))
            )
        elif part := as_list(part, fields.text_field):
            if not all(type(number) is int for number in part):
                raise UserError(
                    f"{where()}: `{fields.text_field}` holds neither text nor integers"
                )
            lines.append(" ".join(map(str, part)))
    return Document(lines, group, tuple(e for e in dict.fromkeys(entities) if e))


def check_text(value: Any, field: str, where: Callable[[], str]) -> str:
    """Return the text in a field; raise UserError if it is not text.

    `where()` is the beginning of the message.
    """
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"{where()}: `{field}` is not a string but {kind}")
    return value


def refuse_missing(
    keys: Mapping[str, str], present: Iterable[str], place: str, noun: str = "field"
) -> None:
    """Raise UserError, which begins with the place, for a field that is not present.

    keys: {field: the config key that names it}; noun: the name for fields in messages.
    """
    names = ", ".join(f"`{name}`" for name in present) or "none"
    for field, key in keys.items():
        if field not in present:
            raise UserError(
                f"{place}: there is no {noun} `{field}` ({key}); there are: {names}"
            )


NAME = re.compile(r"\w[\w.-]*")  # the name of a component
LONGEST = 100  # characters of a group's name, which is part of the names of metrics

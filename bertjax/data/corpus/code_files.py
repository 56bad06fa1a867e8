# SPDX-License-Identifier: Apache-2.0
"""Java and TypeScript files, and JSON lines of code: lines, and types of names."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from bertjax.data.corpus import documents, files, parsed_code
from bertjax.data.corpus.code_grammars import GRAMMARS, SUFFIXES, code_rules
from bertjax.data.corpus.code_names import Code
from bertjax.data.corpus.documents import Document, Fields, Source
from bertjax.data.corpus.line_repair import Counts, clean, decode

STREAM = "type"  # the stream that code has besides its text


def language_of(path: str) -> str:
    """Return the language of a file from its name; "" if it is not in GRAMMARS.

    >>> language_of("src/Main.java.gz"), language_of("a.tsx"), language_of("a.py")
    ('java', 'tsx', '')
    """
    return SUFFIXES.get(PurePath(files.part_name(path)[0]).suffix, "")


def make_document(
    record: Mapping[str, Any],
    fields: Fields,
    where: Callable[[], str],
    counter: Counter[str],
    parses: str = "",
) -> Document:
    """Convert a record of code to a document; `where()` begins the messages.

    The record's data.code_field is a path or the name of a language; if it is null or
    of an unknown language, the document has no text and is counted. Raises UserError
    for a field that is missing or of another kind.
    """
    plain = fields._replace(streams="", code_field="")
    documents.refuse_missing(fields.keys(), record, where())
    written, text = (
        "" if record[field] is None else record[field]
        for field in (fields.code_field, fields.text_field)
    )
    for field, value in ((fields.code_field, written), (fields.text_field, text)):
        documents.check_text(value, field, where)
    whole = {**record, fields.text_field: None}
    document = documents.make_document(whole, plain, where, counter)
    language = written.lower() if written.lower() in GRAMMARS else language_of(written)
    if not language:
        counter["other_languages"] += 1
        return document._replace(is_counted=True)
    kept = {"group": document.group, "entities": document.entities}
    return parse(text, language, fields, counter, parses)._replace(**kept)


def parse(
    text: str, language: str, fields: Fields, counter: Counter[str], parses: str = ""
) -> Document:
    """Read code as a document in which each line of code is a sentence.

    Each line has the values of the stream `type` if data.streams requests it. parses:
    the file in which earlier parses are kept (parsed_code.py); "": none.
    """
    text, asked = clean(text, counter), STREAM in fields.streams.split(",")
    how = parses, text, language, asked
    found = parsed_code.find_parse(*how) if parses else None
    if found is None:
        code = Code(text, language)
        names = code.names if asked else None
        found = parsed_code.Parsed(code.lines, names, code.broken)
        if parses:
            parsed_code.keep_parse(*how, found)
    counter["broken_code"] += found.broken
    own = found.names
    values = (
        [{STREAM: line} for line in own] if own is not None else [{}] * len(found.lines)
    )
    return Document(found.lines, values=values)


@dataclass
class CodeSource(Source):
    """A file of code, local or behind a URL: one document, read as a whole."""

    is_code = True

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return the language, the version of the reading rules, and the SHA-256."""
        digest, self.seen = files.file_hash(self.name, cache_dir)
        types = ":type" * (STREAM in self.fields.streams.split(","))
        language = language_of(self.name)
        return f"{code_rules(language)}-{language}{types}:{digest}"

    def text_bytes(self) -> int | None:
        """Return the bytes of the file. Raises UserError if it cannot be read."""
        with files.reading(self.name):
            return files.stat(self.name)[0]

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        counter = counts[self.name]
        data = b"".join(counts.reading(files.unpacked(self.name)))
        if len(data) > max_line_bytes:
            counter["long_code"] += 1
            return
        language = language_of(self.name)
        text = decode(data, counter)
        yield parse(text, language, self.fields, counter, self.parses)

    def locate(self, paragraph: str, max_line_bytes: int) -> str:
        """Return the file and the first line with this text."""
        text = clean(decode(b"".join(files.unpacked(self.name)), Counter()), Counter())
        for number, line in enumerate(text.split("\n"), 1):
            if " ".join(line.split()) == paragraph:
                return f"{self.name}, line {number}"
        return self.name

# SPDX-License-Identifier: Apache-2.0
"""Turn the strings that name text sources into sources that documents are read from.

- `a.txt`, `b/*.txt.gz`, `c.zst`: one paragraph or sentence per line, documents
  separated by a blank line; in files that begin like WikiText's, by titles
- `d.jsonl`, `e.json.gz`: one JSON object per line, whose `text` is one document
- `src/**/*.java`, `*.ts`, `*.tsx`: a file is one document, a line of code a sentence
- `f.parquet`, `g.csv`, `h.tsv.gz`: a row is one document, its column `text`
- `tfds:name[/config][:version]:split`: TensorFlow Datasets on this machine, `text`
- `builtin:docs`, `builtin:docs:train`, `builtin:docs:valid`: the documentation that
  came with Python and the installed packages (bertjax/data/corpus/builtin.py)

Commas separate several sources. Files are read in chunks; no line, document or file
beyond a fixed size is ever in memory as a whole. Invalid bytes are repaired and
counted; damaged files are refused.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from bertjax import UserError, registry
from bertjax.data.corpus import files, tfds_source
from bertjax.data.corpus.code_files import STREAM, CodeSource, language_of
from bertjax.data.corpus.documents import NAME, Fields, Source
from bertjax.data.corpus.line_files import BuiltinSource, FileSource
from bertjax.data.corpus.line_repair import is_titled
from bertjax.data.corpus.parquet import ParquetSource
from bertjax.data.corpus.table_files import TableSource, is_table


def parse_sources(value: str, key: str, role: str, **given: str) -> list[Source]:
    """Turn a config value into sources, with patterns expanded in sorted order.

    `key` is the config key for messages; `role` ("train" or "valid") is the side of
    `builtin:docs` if the string names none. `given` are the `Fields` of records in JSON
    lines, tables and TensorFlow Datasets.

    Raises UserError for an empty value, a missing or empty file, a directory or a pipe,
    a pattern that matches nothing, and a field requested from plain text.
    """
    fields = Fields(**given)
    if not fields.text_field:
        raise UserError("data.text_field= names no field")
    sources: list[Source] = []
    for entry in registry.split_list(value):
        if entry.startswith("builtin:"):
            sides = {"": role, ":train": "train", ":valid": "valid"}
            known = {f"builtin:docs{end}": side for end, side in sides.items()}
            side = registry.pick(key, entry, known)
            sources.append(BuiltinSource(entry, side=side))
        elif entry.startswith("tfds:"):
            if not tfds_source.WRITTEN.fullmatch(entry):
                raise UserError(
                    f"{key}={entry}: write tfds:name[/config][:version]:split"
                )
            sources.append(tfds_source.TfdsSource(entry, fields))
        else:
            pattern = "*.jsonl" if fields.is_aligned else "*.txt"
            pattern = "**/*.java" if fields.code_field else pattern
            for path in expand_paths(entry, key, True, pattern):
                if path.lower().endswith(".parquet"):
                    sources.append(ParquetSource(path, fields))
                elif is_table(path):
                    files.read_head(path, key)
                    sources.append(TableSource(path, fields))
                elif language_of(path):
                    files.read_head(path, key)
                    sources.append(CodeSource(path, fields))
                else:
                    titled = is_titled(files.read_head(path, key))
                    sources.append(FileSource(path, fields=fields, titled=titled))
    if not sources:
        raise UserError(f"{key} names no text; give files, patterns or tfds:NAME:SPLIT")
    for source in sources:
        _check_fields(source, fields, key, role)
    return sources


def _check_fields(source: Source, fields: Fields, key: str, role: str) -> None:
    """Raise UserError if fields are requested that a source does not have."""
    is_json = isinstance(source, FileSource) and source.is_json
    is_code = isinstance(source, CodeSource) or (is_json and bool(fields.code_field))
    if is_code:
        if (asked := fields.streams) not in ("", STREAM) or fields.layout:
            raise UserError(
                f"{key}={source.name}: code has the stream {STREAM} alone, not "
                f"{f'data.streams={asked}' if asked else 'conversations'}"
            )
    elif fields.code_field:
        raise UserError(
            f"{key}={source.name}: code is read from .java, .ts or .tsx files, or from "
            f"JSON lines with data.code_field={fields.code_field}"
        )
    elif fields.is_aligned and not is_json:
        asks = f"data.streams={fields.streams} is read from JSON lines or code"
        kinds = ".jsonl, .java, .ts or .tsx"
        if not fields.streams:
            asks, kinds = "conversations are read from JSON lines", ".jsonl"
        raise UserError(f"{key}={source.name}: {asks}, and this is no {kinds} file")
    if isinstance(source, FileSource | CodeSource) and not is_json:
        for field, name in zip(fields[1:3], ("group", "entity"), strict=True):
            # Held-out text without groups is a validation set of its own.
            if field and (name, role) != ("group", "valid"):
                raise UserError(
                    f"data.{name}_field={field}: {source.name} is plain text, which "
                    "has no fields"
                )


def expand_paths(
    entry: str, key: str, some_empty: bool = False, pattern: str = "*.txt"
) -> list[str]:
    """Return the checked files that a path or pattern names; ~ is the home directory.

    some_empty: whether some files of a pattern, but not all, may be empty. pattern:
    what a message suggests in place of a directory.
    """
    path = entry = os.path.expanduser(entry)
    try:
        magic = glob.has_magic(entry) and ("://" in entry or not os.path.exists(entry))
        paths = files.find(entry) if magic else [entry]
        if not paths:
            raise UserError(f"{key}={entry}: no file matches")
        empty = []
        for path in paths:
            what = files.irregular(path)
            if what == "a directory":
                raise UserError(f"{key}={path}: a directory; write {path}/{pattern}")
            if what:
                more = "; write what it gives to a file" * (what == files.PIPE)
                raise UserError(f"{key}={path}: {what}, not a regular file{more}")
            if files.stat(path)[0] == 0:
                empty.append(path)
            if "://" not in path and not os.access(path, os.R_OK):
                raise UserError(f"{key}={path}: no permission to read the file")
        if empty and not (some_empty and len(empty) < len(paths)):
            raise UserError(f"{key}={empty[0]}: the file is empty")
    except FileNotFoundError:
        reason = "there is no such file"
        if "://" not in path and os.path.islink(path):
            reason = "a link to a file that is not there"
        raise UserError(f"{key}={path}: {reason}") from None
    except OSError as err:
        reason = err.strerror or err
        raise UserError(f"{key}={path}: cannot be read ({reason})") from None
    return paths


def report_repeats(names: Iterable[str], key: str, say: Callable[[str], None]) -> None:
    """Report sources that are read more than once, which may be meant as a weight."""
    for name, times in Counter(names).items():
        if times > 1:
            say(f"{key} reads {name} {times} times, so its text counts {times} times")


def named_sources(value: str, key: str = "data.valid") -> dict[str, str]:
    """Split a value whose parts may have names; unnamed parts get the key's own name.

    `*=pattern` names each file by its name up to the first dot.

    >>> named_sources("wiki=a.txt,b.txt,novels=c.txt")
    {'wiki': 'a.txt,b.txt', 'novels': 'c.txt'}
    >>> named_sources("a.txt,b.txt")
    {'valid': 'a.txt,b.txt'}
    >>> named_sources("*=multilingual/*.txt.gz", "data.train")
    {'en': 'multilingual/en.txt.gz', 'zh': 'multilingual/zh.txt.gz'}

    Raises UserError for a name that is given twice, or to some of the parts only.
    """
    parts: dict[str, list[str]] = {}
    name = ""

    for entry in registry.split_list(value):
        match = re.match(r"([A-Za-z][\w.-]*|\*)=", entry)
        if match:
            if parts and not name:
                raise UserError(
                    f"{key}: {entry!r} has a name, but the entries before it have "
                    "none; name all of them or none"
                )
            name = match[1]
            entry = entry[match.end() :].strip()
            if not entry:
                raise UserError(f"{key}: {name!r} names no text; write {name}=FILE")
        named = [(name or key.rpartition(".")[2].lstrip("-"), entry)]
        if name == "*":
            paths = expand_paths(entry, key)
            named = [(Path(path).name.partition(".")[0], path) for path in paths]
        for part, path in named:
            if name and not NAME.fullmatch(part):  # the key itself is not a name
                raise UserError(f"{key}={entry}: {part!r}, of {path}, is not a name")
            if part in parts and (match or name == "*"):
                raise UserError(f"{key}: the name {part!r} is given twice")
            parts.setdefault(part, []).append(path)
    return {name: ",".join(entries) for name, entries in parts.items()}

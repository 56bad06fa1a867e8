# SPDX-License-Identifier: Apache-2.0
"""An index of passages: a directory with their texts, their vectors, and metadata.

    passages.jsonl   {"id": ..., "title": ..., "text": ...}, one line per passage
    vectors.npy      f32 [n, D], one row per passage
    index.json       format, the model and how it makes vectors, the sha256 of both
                     files; written last

bertjax.embed --index=DIR makes an index from a collection. A model answers from the
index that it is given; with another directory it gives other answers.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data.corpus.sources import expand_paths
from bertjax.data.tokenizers.tokenizer import SPACELESS
from bertjax.storage import atomic
from bertjax.storage.paths import expand
from bertjax.tasks import search, tables
from bertjax.tasks.passages import TEXTS, find_packed
from bertjax.tasks.tables import Say

FORMAT = 1
WORDS = 100  # per passage
# A character of a script without spaces and the punctuation after it; or, in other
# scripts, characters between spaces.
WORD = re.compile(rf"{SPACELESS.pattern}[^\w\s]*|(?:(?!{SPACELESS.pattern})\S)+")
PASSAGES, VECTORS, FACTS = "passages.jsonl", "vectors.npy", "index.json"


class Passage(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def whole(self) -> str:
        """The title and the text on one line, as models read them."""
        return " ".join(f"{self.title} {self.text}".split())


def read_facts(path: str, key: str) -> dict[str, Any]:
    """Read a directory's index.json; key: for messages. Raises UserError."""
    try:
        text = (expand(path, key) / FACTS).read_text("utf-8")
        facts: dict[str, Any] = json.loads(text)
        sums = {name: str(facts["sha256"][name]) for name in (PASSAGES, VECTORS)}
        version, how = int(facts["format"]), {**facts.get("how", {})}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{key}={path} is not an index: bertjax.embed --model=DIR --text=FILES "
            f"--index={path} makes one"
        ) from None
    if version > FORMAT:
        raise UserError(f"{key}={path}: format {version} is of a later bertjax")
    return {**facts, "sha256": sums, "how": how}


def digest_of(path: str, key: str) -> str:
    """Return the digest of an index, from its index.json. Raises UserError."""
    return _digest(read_facts(path, key))


def _digest(facts: Mapping[str, Any]) -> str:
    return "".join(facts["sha256"][name] for name in (PASSAGES, VECTORS))


def check_model(
    facts: Mapping[str, Any], index: str, digests: Sequence[str], where: str, say: Say
) -> None:
    """Raise UserError if the vectors of an index were made by another model.

    facts: of index.json; index, where: the names of index and model for messages.
    digests: of the models that may have made the index: the model itself, and the one
    that it was trained from if passages have that one's vectors; "" for none. An index
    that does not name its model is accepted with a warning.
    """
    known = facts.get("model")
    if not known:
        say(
            f"{index} does not say which model made its vectors (it is of an older "
            f"bertjax): that it was {where} is not checked"
        )
    elif known not in digests:
        made_by = facts.get("path", "a model")
        ours = " or ".join(digest[:16] for digest in filter(None, digests))
        raise UserError(
            f"{index} holds vectors of another model than {where}: it was made by "
            f"{made_by} ({known[:16]}), and this one is {ours}: make it by this one "
            "(bertjax.embed --index), or name that one"
        )


class PassageIndex:
    """An opened index.

    passages: all of them; vectors: f32 [n, D], memory-mapped; facts: of index.json.
    """

    def __init__(self, path: str, key: str) -> None:
        """Open a directory. Raises UserError if it is not an index, or was changed."""
        self.where = f"{key}={path}"
        folder = expand(path, key)
        self.facts = read_facts(path, key)
        for name, known in self.facts["sha256"].items():
            if sha256_of(folder / name) != known:
                raise UserError(f"{self.where}: {name} is not what was written there")
        lines = (folder / PASSAGES).read_text("utf-8").split("\n")
        self.passages = [Passage(**json.loads(line)) for line in lines if line]
        self.vectors = np.load(folder / VECTORS, mmap_mode="r")

    @property
    def digest(self) -> str:
        """The digest that identifies this index."""
        return _digest(self.facts)

    def check_model(self, digests: Sequence[str], where: str, say: Say) -> None:
        """Raise UserError if another model made the vectors; see `check_model`."""
        check_model(self.facts, self.where, digests, where, say)

    @cached_property
    def places(self) -> dict[str, int]:
        """The row of each passage, by its id."""
        return {passage.id: i for i, passage in enumerate(self.passages)}

    def row_of(self, cells: Mapping[str, Any], place: str) -> int:
        """Return the row of a passage, given its id and text.

        Raises UserError, naming the place, if it is not in the index.
        """
        row = self.places.get(str(cells.get("id")))
        if row is None or self.passages[row].text != cells["text"]:
            raise UserError(
                f"{place}: the passage {cells.get('id')!r} is not one of {self.where}: "
                "find passages again in this index"
            )
        return row

    def search(self, queries: np.ndarray, k: int) -> search.Found:
        """Return the k best passages for queries f32 [q, D] (tasks/search.py)."""
        if queries.shape[1] != self.vectors.shape[1]:
            raise UserError(
                f"{self.where} has vectors of {self.vectors.shape[1]} numbers, the "
                f"model of {queries.shape[1]}: embed the passages by this model's "
                "retriever"
            )
        return search.Dense(self.vectors).search(search.Dense(queries), k=k)

    def found(self, queries: np.ndarray, k: int) -> list[list[dict[str, Any]]]:
        """Return the k best passages for queries, with their scores, best first."""
        pairs = zip(*self.search(queries, k), strict=True)
        return [
            [
                {**self.passages[number]._asdict(), "score": round(float(score), 6)}
                for number, score in zip(numbers, scores, strict=True)
                if number >= 0
            ]
            for numbers, scores in pairs
        ]


def read_passages(value: str, key: str, words: int | None, say: Say) -> list[Passage]:
    """Read passages from files or folders.

    JSON lines and tables have a text per row, and optionally a title and an _id or id;
    so has BEIR's corpus.jsonl, or a folder with one. Rows without an id get a number
    that is no other passage's id. Other text files are cut into passages of `words`
    words; an empty line ends a document, and the title is the file's name. Their ids
    are PATH:NUMBER, where PATH is relative to the folder, or, for several entries or
    patterns, to the common folder of all files.

    words: None for WORDS. Raises UserError for files that cannot be read, for an id
    that occurs twice, and for `words` if there are no texts to cut.
    """
    found: list[Passage] = []
    paths: list[str] = []
    entries = registry.split_list(value)
    for entry in entries:
        folder = expand(entry, key)
        if folder.is_dir():
            entry = find_packed(f"{folder}/{TEXTS[0]}") or f"{folder}/**/*.txt"
        paths += expand_paths(entry, key, True, "*.txt")
    texts = [path for path in paths if tables.kind_of(path) in ("", "txt")]
    if words is not None and not texts:
        raise UserError(
            f"--words={words} has no effect: {key}={value} has rows, each a passage"
        )
    alone = len(entries) == 1 and folder.is_dir()
    names = _names_of(texts, folder if alone else None)
    for path in paths:
        if path in names:
            found += _of_text(path, names[path], words or WORDS)
        else:
            found += _of_rows(path, say)
    if not found:
        raise UserError(f"{key}={value}: there are no passages")
    given = {passage.id for passage in found}
    free = (name for name in map(str, count()) if name not in given)
    found = [p if p.id else p._replace(id=next(free)) for p in found]
    seen: set[str] = set()
    for passage in found:
        if passage.id in seen:
            raise UserError(f"{key}={value}: the id {passage.id!r} occurs twice")
        seen.add(passage.id)
    return found


def _of_rows(path: str, say: Say) -> Iterator[Passage]:
    """Read JSON lines or a table; the id is "" for a row without one."""
    for row in tables.read_file(path, {"text": "text"}, say):
        cells = row.cells
        name = cells.get("_id", cells.get("id"))
        title = cells.get("title") or ""
        if not isinstance(cells["text"], str) or not isinstance(title, str):
            raise UserError(f"{row.place}: title and text have to be texts")
        yield Passage("" if name is None else str(name), title, cells["text"])


def _names_of(paths: Sequence[str], folder: Path | None) -> dict[str, str]:
    """Return the names of files: their paths relative to a folder, or to the common
    folder of all, without suffixes unless two files would have the same name."""
    whole = {path: Path(path).absolute() for path in paths}
    parents = [str(own.parent) for own in whole.values()] or ["/"]
    above = folder.absolute() if folder else os.path.commonpath(parents)
    short = Counter(own.with_suffix("") for own in whole.values())
    kept = {
        path: own if short[own.with_suffix("")] > 1 else own.with_suffix("")
        for path, own in whole.items()
    }
    return {path: own.relative_to(above).as_posix() for path, own in kept.items()}


def _of_text(path: str, name: str, words: int) -> Iterator[Passage]:
    """Cut a text file into passages with the ids NAME:NUMBER."""
    title, number = Path(path).stem, count()
    document: list[str] = []
    for line in [*tables.read_text(path).split("\n"), ""]:
        if line.strip():
            document += line.split()
            continue
        for text in cut_text(" ".join(document), words):
            yield Passage(f"{name}:{next(number)}", title, text)
        document = []


def cut_text(text: str, words: int) -> Iterator[str]:
    """Yield parts of `words` words; in scripts without spaces a character is a word.

    >>> [*cut_text("one two three", 2)], [*cut_text("巴黎。 2 km", 2)]
    (['one two', 'three'], ['巴黎。', '2 km'])
    """
    places = [word.span() for word in WORD.finditer(text)]
    for at in range(0, len(places), words):
        part = places[at : at + words]
        yield text[part[0][0] : part[-1][1]]


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def write_passages(folder: Path, passages: Sequence[Passage]) -> None:
    """Write the passages.jsonl of an index."""
    lines = (json.dumps(p._asdict(), ensure_ascii=False) + "\n" for p in passages)
    atomic.write_file(folder / PASSAGES, "".join(lines))


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write index.json, which makes a directory a complete index."""
    sums = {name: sha256_of(folder / name) for name in (PASSAGES, VECTORS)}
    whole = {"format": FORMAT, **facts, "sha256": sums}
    atomic.write_file(folder / FACTS, json.dumps(whole, indent=1) + "\n")

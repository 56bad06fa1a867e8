# SPDX-License-Identifier: Apache-2.0
"""Read passages, queries, and which passage answers which query.

- From a folder in BEIR's layout (Thakur et al. 2021): `corpus.jsonl` with _id, title,
  text; `queries.jsonl` with _id, text; and grades in `qrels/train.tsv`, `qrels/dev.tsv`
  and the like, or in `qrels.tsv`: query-id, corpus-id, score. To name the folder means
  the grades of the key's role (ROLES); a file of grades can also be named itself. All
  files may be compressed (.gz, .zst).
- From tables of pairs (tables.py): a query, a passage that answers it, and optionally
  a passage that does not, or, in JSON lines, a list of such passages.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bertjax import UserError, counted, registry
from bertjax.data.corpus import files
from bertjax.tasks import tables
from bertjax.tasks.tables import Columns, Say
from bertjax.tasks.text_rows import WHOLE

NEGATIVES = "task.label"
SCORES = "scores"  # column: the score of the positive, then of each negative
COLUMNS = {"task.text": "query", "task.text_pair": "positive", NEGATIVES: "negatives"}
FLAGS = "--columns: QUERY", "--columns: POSITIVE", NEGATIVES  # the same in evaluate
HEADER = {name: name for name in ("query-id", "corpus-id", "score")}
ROLES = {"data.train": "train", "data.valid": "dev"}  # otherwise "test"
TEXTS = "corpus.jsonl", "queries.jsonl"  # files of a folder in BEIR's layout


@dataclass
class Collection:
    """Passages, and queries to search them for.

    grades: {passage: grade} per query; passages with a grade above 0 answer it, the
    others are hard negatives. own: per query, the passage that is the query itself
    (queries may also be passages), or -1; that is the passage with the same id (for
    pairs, the same text) if it does not answer the query. It is left out of search
    results and is not a negative. scores: per query, {passage: a teacher's score}, if a
    table has them. files: the files that were read.
    """

    passages: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    grades: list[dict[int, int]] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    scores: list[dict[int, float]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def read_collections(
    value: str, key: str, columns: Columns, say: Say
) -> list[Collection]:
    """Read all folders and tables that a config value names, into a single collection.

    key: the config key, which messages name and which decides a folder's role; columns:
    for pairs, {config key or flag: column}, in the order of COLUMNS. Reports rows that
    are left out. Raises UserError, naming file and line.
    """
    whole = Collection()
    # Per folder {id: number}; for pairs, which have no ids, {text: number}. A passage
    # that several files of grades or several tables share is stored once.
    known: dict[str, dict[str, int]] = defaultdict(dict)
    for entry in registry.split_list(value):
        path = locate(entry, key)
        if folder := _folder(path):
            names, one = _read_folder(path, folder, say)
            whole.files += [find_packed(f"{folder}/{name}") for name in TEXTS]
        else:
            one = _read_pairs(path, key, columns, say)
            names = one.passages
        grades = [g for of in one.grades for g in of.values()]
        answers = sum(g > 0 for g in grades)
        say(
            f"{path}: {counted(len(one.queries), 'query', 'queries')}, "
            f"{counted(len(one.passages), 'passage')}, {counted(answers, 'answer')}, "
            f"{counted(len(grades) - answers, 'given negative')}"
        )
        if empty := sum(not text.strip() for text in one.queries):
            say(f"{path}: {counted(empty, 'empty query', 'empty queries')}, kept")
        if empty := sum(not text.strip() for text in one.passages):
            say(f"{path}: {counted(empty, 'empty passage')}, kept")
        number = known[folder and os.path.abspath(folder)]
        for name, text in zip(names, one.passages, strict=True):
            if number.setdefault(name, len(whole.passages)) == len(whole.passages):
                whole.passages.append(text)
        at = [number[name] for name in names]
        whole.files.append(path)
        whole.queries += one.queries
        whole.grades += [{at[p]: g for p, g in of.items()} for of in one.grades]
        whole.own += [at[p] if p >= 0 else p for p in one.own]
        scores = one.scores or [{}] * len(one.queries)
        whole.scores += [{at[p]: s for p, s in of.items()} for of in scores]
    texts = known[""]
    for query, text in enumerate(whole.queries):
        own = texts.get(text, -1)
        if whole.own[query] < 0 and whole.grades[query].get(own, 0) <= 0:
            whole.own[query] = own
    if not whole.queries:
        raise UserError(f"{key} is empty: give a folder in BEIR's layout, or pairs")
    return [whole]


def locate(entry: str, key: str) -> str:
    """Return the file that an entry names: for a folder, the grades of the key's role.

    Raises UserError for a folder without the files of BEIR's layout.
    """
    folder = os.path.expanduser(entry).rstrip("/")
    if entry.startswith("tfds:") or not files.is_dir(folder):
        return entry
    role = ROLES.get(key, "test")
    for name in TEXTS:
        if not find_packed(f"{folder}/{name}"):
            raise UserError(f"{key}={entry}: the folder has no {name}, as BEIR's have")
    grades = find_packed(f"{folder}/qrels/{role}.tsv") or find_packed(
        f"{folder}/qrels.tsv"
    )
    if not grades:
        raise UserError(
            f"{key}={entry}: the folder has neither qrels/{role}.tsv nor qrels.tsv; "
            f"other grades are named by their file, {folder}/qrels/NAME.tsv"
        )
    return grades


def find_packed(path: str) -> str:
    """Return the file with this path, compressed or not; "" if there is none."""
    for ending in ("", *files.PACKS):
        with contextlib.suppress(OSError):
            files.stat(path + ending)
            return path + ending
    return ""


def _folder(path: str) -> str:
    """Return the folder in BEIR's layout that a file of grades belongs to, or ""."""
    if ".tsv" not in path:
        return ""
    above = os.path.dirname(os.path.expanduser(path)) or "."
    for folder in (above, os.path.dirname(above) or "."):
        if find_packed(f"{folder}/{TEXTS[0]}"):
            return folder
    if os.path.basename(above) == "qrels":  # not a folder for tables of pairs
        raise UserError(f"{path}: {folder} has no {TEXTS[0]}")
    return ""


def _read_folder(path: str, folder: str, say: Say) -> tuple[list[str], Collection]:
    """Read the passages and queries of a folder, and a file of grades.

    Returns the ids of the passages, and the collection.
    """
    passages, queries = (_read_texts(path, f"{folder}/{name}", say) for name in TEXTS)
    place = {name: i for i, name in enumerate(passages)}
    grades = _read_grades(path, queries, place, say)
    answered = [q for q in queries if any(g > 0 for g in grades.get(q, {}).values())]
    if not answered:
        raise UserError(f"{path}: no query has a passage that answers it")
    for count, why in (
        (len(queries) - len(grades), "not in these grades"),
        (len(grades) - len(answered), "without an answer"),
    ):
        if count:
            say(f"{path}: {counted(count, 'query', 'queries')} {why}, left out")
    found = Collection([*passages.values()])
    for query in answered:
        own = place.get(query, -1)
        found.queries.append(queries[query])
        found.grades.append(grades[query])
        found.own.append(-1 if grades[query].get(own, 0) > 0 else own)
    return [*passages], found


def _read_texts(grades: str, name: str, say: Say) -> dict[str, str]:
    """Return the texts of corpus.jsonl or queries.jsonl, by their ids."""
    path = find_packed(name)
    if not path:
        raise UserError(f"{grades}: there is no {name}, to which its ids belong")
    found: dict[str, str] = {}
    for row in tables.read_file(path, {"_id": "_id", "text": "text"}, say):
        parts = row.cells.get("title") or "", row.cells["text"]
        if not _are_texts(*parts):
            raise UserError(f"{row.place}: title and text have to be texts")
        name = str(row.cells["_id"])
        if name in found:
            raise UserError(f"{row.place}: the _id {name!r} occurs twice")
        found[name] = " ".join(parts).strip()  # title and text, as in BEIR's models
    return found


def _read_grades(
    path: str, queries: Mapping[str, str], place: Mapping[str, int], say: Say
) -> dict[str, dict[int, int]]:
    """Return {query: {number of a passage: grade}}; report rows that are left out."""
    found: dict[str, dict[int, int]] = {}
    unknown: dict[str, list[str]] = {"query": [], "passage": []}
    repeated: list[str] = []
    name = os.path.expanduser(path)
    text = tables.read_text(name)
    first = text.lstrip("\r\n").partition("\n")[0].strip("\r")
    if not HEADER.keys() <= {cell.strip() for cell in first.split("\t")}:
        raise UserError(
            f"{name}: the first line has to name the columns {', '.join(HEADER)}, with "
            f"tabs between them; it is {first[:80]!r}"
        )
    for row in tables.parse_rows(text, "tsv", name, HEADER, say):
        query, passage, cell = (row.cells[column].strip() for column in HEADER)
        if not WHOLE.fullmatch(cell):
            raise UserError(f"{row.place}: the score {cell!r} is not a whole number")
        if query not in queries or passage not in place:
            unknown["passage" if query in queries else "query"].append(row.place)
            continue
        of, at, grade = found.setdefault(query, {}), place[passage], int(cell)
        if of.get(at, grade) != grade:
            raise UserError(
                f"{row.place}: query {query!r} gives passage {passage!r} the score "
                f"{grade}, and {of[at]} in a line before"
            )
        if at in of:
            repeated.append(row.place)
        of[at] = grade
    for what, places in unknown.items():
        note = f" with a {what} that the folder does not have, left out"
        tables.report(say, places, "row", note, path)
    tables.report(say, repeated, "repeated grade", "", path)
    return found


def _read_pairs(entry: str, key: str, columns: Columns, say: Say) -> Collection:
    *first, (asking, negatives) = columns.items()
    needed = dict(first)
    passages: dict[str, int] = {}
    queries: dict[str, dict[int, int]] = {}  # the grades of each query
    repeated: list[str] = []
    blank: list[str] = []
    given: list[tuple[dict[int, int], int, str]] = []  # grades, negative, place
    taught: dict[str, dict[int, float]] = {}  # a teacher's scores for each query
    rows = tables.read_rows(entry, key, needed, say, (negatives, SCORES))
    is_named = key == "data.train" and negatives != COLUMNS[NEGATIVES]
    if is_named and not any(negatives in row.cells for row in rows):
        why = registry.unknown(asking, negatives, [*rows[0].cells])
        raise UserError(f"{entry}: {why}")
    for row in rows:
        texts = [row.cells[column] for column in needed.values()]
        others = row.cells.get(negatives) or []
        others = [others] if isinstance(others, str) else others
        if not isinstance(others, list) or not _are_texts(*texts, *others):
            what = ", ".join(columns.values())
            raise UserError(
                f"{row.place}: {what} have to be texts, the last a text or a list"
            )
        grades = queries.setdefault(texts[0], {})
        positive = passages.setdefault(texts[1], len(passages))
        if grades.get(positive):
            repeated.append(row.place)
        grades[positive] = 1
        known = taught.setdefault(texts[0], {})
        scores = _scores_of(row, 1 + len(others))
        if scores:
            known[positive] = scores[0]
        blank += [row.place for other in others if not other.strip()]
        for i, other in enumerate(others, 1):
            if not other.strip():
                continue
            negative = passages.setdefault(other, len(passages))
            if scores:
                known[negative] = scores[i]
            grades.setdefault(negative, 0)
            given.append((grades, negative, row.place))
    note = " with a query and its positive that came before, counted once"
    tables.report(say, repeated, "row", note, entry)
    tables.report(say, blank, "empty given negative", ", left out", entry)
    both = [place for grades, p, place in given if grades[p]]
    note = " among the positives of the same query, left out"
    tables.report(say, both, "given negative", note, entry)
    lists = [*passages], [*queries], [*queries.values()], [-1] * len(queries)
    return Collection(*lists, [*taught.values()])


def _scores_of(row: tables.Row, count: int) -> list[float]:
    """Return a teacher's scores of a row's passages, [] if it has none.

    Raises UserError if they are not a list of `count` numbers.
    """
    scores = row.cells.get(SCORES)
    if scores is None:
        return []
    numbers = isinstance(scores, list) and all(
        type(x) in (int, float) and abs(x) < 1e9 for x in scores
    )
    if not numbers or len(scores) != count:
        raise UserError(
            f"{row.place}: {SCORES} has to be a list of {count} numbers, of the "
            "positive and then of each negative"
        )
    return [*map(float, scores)]


def _are_texts(*found: Any) -> bool:
    return all(isinstance(text, str) for text in found)

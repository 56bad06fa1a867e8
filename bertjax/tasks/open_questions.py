# SPDX-License-Identifier: Apache-2.0
"""Read questions, and the answers and retrieved passages of their rows."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax import UserError, registry
from bertjax.data.corpus.line_repair import load_json
from bertjax.data.tokenizers.word_starts import whole_word
from bertjax.tasks import squad_files, tables
from bertjax.tasks.tables import Columns, Row, Say, silent
from bertjax.tasks.task_rows import ASKING

TEXTS = {key for text, pair, *_ in ASKING for key in (text, pair)}


def parse_questions(text: str, name: str, say: Say = silent) -> list[dict[str, Any]]:
    """Read questions from SQuAD's JSON, without the contexts; from JSON lines or a list
    of objects with a `question`; from a table (.tsv, .csv); or from one question per
    line.

    Returns objects with a `question`; for SQuAD also `id` and `answers`, for objects
    and tables also all other cells. Raises UserError, naming the place.
    """
    is_json = tables.is_json(name) or tables.has_objects(text)
    if is_json and '"paragraphs"' in text and '"qas"' in text:
        asked = squad_files.questions_of(load_json(text, name), name)
        return [
            {"id": q.id, "question": q.text, "answers": [*dict.fromkeys(q.answers)]}
            for q in asked.questions
        ]
    kind = "json" if is_json else tables.kind_of(name)
    if kind in ("json", "tsv", "csv"):
        rows = tables.parse_rows(text, kind, name, {"question": "question"}, say)
        found = [(dict(row.cells), row.place) for row in rows]
        for cells, place in found:
            if not isinstance(cells["question"], str):
                raise UserError(f"{place}: question has to be a text")
        return [cells for cells, _ in found]
    lines = [line.strip() for line in text.split("\n")]
    return [{"question": line} for line in lines if line]


def read_found(value: str, key: str, columns: Columns, say: Say = silent) -> list[Row]:
    """Read rows of questions with their retrieved passages, as tables.read_rows does.

    If columns include the answers, questions with an empty list of answers (SQuAD 2.0
    has some) are left out and reported. Raises UserError, naming the place, if there
    are no passages, or no question is left.
    """
    others, listed = _parted(columns)
    rows = tables.read_rows(value, key, others, say, [*listed.values()])
    return _with(listed, _answered(columns, rows, say))


def parse_found(text: str, name: str, columns: Columns, say: Say = silent) -> list[Row]:
    """Parse the rows of a text, as `read_found` reads them.

    Only JSON objects can hold passages. Raises UserError.
    """
    others, listed = _parted(columns)
    if not tables.has_objects(text) and listed:
        rows = [*tables.parse_lines(text, name, others, say)]
    else:
        rows = tables.parse_text(text, name, others, say)
    return _with(listed, _answered(columns, rows, say))


def _parted(columns: Columns) -> tuple[dict[str, str], dict[str, str]]:
    """Split columns into those without and with the column of passages, if any."""
    listed = {key: columns[key] for _, key, *_ in ASKING if key in columns}
    return {k: v for k, v in columns.items() if k not in listed}, listed


def _answered(columns: Columns, rows: list[Row], say: Say) -> list[Row]:
    """Leave out questions without an answer, if columns include the answers."""
    label = next((x for key, x in columns.items() if key not in TEXTS), None)
    bare = [row.place for row in rows if row.cells.get(label) == []]
    tables.report(say, bare, "question", " without an answer, left out")
    kept = [row for row in rows if row.cells.get(label) != []]
    if bare and not kept:
        raise UserError(f"{bare[0]}: no question has an answer ({label})")
    return kept


def _with(listed: Columns, rows: list[Row]) -> list[Row]:
    for key, column in listed.items():
        for row in rows:
            if column not in row.cells:
                raise UserError(
                    f"{row.place}: {key}={column!r}: the question has no passages"
                    f"{registry.hint(column, row.cells)}; bertjax.predict --index=DIR "
                    "finds some"
                )
    return rows


def id_of(cells: Mapping[str, Any], number: int) -> str:
    """Return the id of a question, or its number if it has none."""
    own = cells.get("id")
    return str(number if own is None else own)


def answers_of(row: Row, column: str) -> list[str]:
    """Return the answers of a row. Raises UserError if they are not texts."""
    answers = row.cells[column]
    answers = [answers] if isinstance(answers, str) else answers
    texts = isinstance(answers, list) and all(isinstance(x, str) for x in answers)
    if not texts or not any(x.strip() for x in answers):
        raise UserError(f"{row.place}: {column} has to be a list of texts, one or more")
    return [answer for answer in answers if answer.strip()]


def passages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the passages of a row, with title and score. Raises UserError."""
    found = row.cells[column]
    if not isinstance(found, list):
        raise UserError(f"{row.place}: {column} has to be a list of passages")
    out = []
    for number, cells in enumerate(found):
        if not isinstance(cells, dict) or not isinstance(cells.get("text"), str):
            raise UserError(f"{row.place}: {column}[{number}] has no text")
        title, score = cells.get("title") or "", cells.get("score", 0.0)
        try:
            score = float(score)  # DPR writes numbers as strings
        except (TypeError, ValueError):
            score = math.nan
        if not isinstance(title, str) or not abs(score) < 1e9:
            raise UserError(f"{row.place}: {column}[{number}]: title or score is wrong")
        known = {"id": cells["id"]} if "id" in cells else {}
        out.append(known | {"title": title, "text": cells["text"], "score": score})
    return out


def find_answers(
    text: str, answers: Sequence[str], chars: np.ndarray
) -> list[tuple[int, int]]:
    """Return the first and last token of each occurrence of an answer.

    chars: i32 [tokens, 2], the characters of each token. Case is ignored. Only whole
    words count; in scripts without spaces words may end anywhere.

    >>> find_answers("1945, 45", ["45"], np.array([[0, 4], [4, 5], [6, 8]]))
    [(2, 2)]
    """
    found = set()
    for answer in answers:
        pattern = whole_word(" ".join(answer.split())).replace(re.escape(" "), r"\s+")
        for hit in re.finditer(pattern, text, re.IGNORECASE):
            inside = (chars[:, 1] > hit.start()) & (chars[:, 0] < hit.end())
            places = np.flatnonzero(inside & (chars[:, 0] < chars[:, 1]))
            if len(places):
                found.add((int(places[0]), int(places[-1])))
    return sorted(found)


def fill_lists(lists: Sequence[Sequence[float]], width: int, fill: float) -> np.ndarray:
    """Return lists of up to `width` numbers as an array [n, width], padded with `fill`.

    >>> fill_lists([[3, 1], [2]], 2, -1).tolist()
    [[3, 1], [2, -1]]
    """
    return np.array([[*own, *[fill] * (width - len(own))] for own in lists])


def widen(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    """Cut an array [n, k] to [n, width], or pad it with `fill`."""
    more = max(0, width - array.shape[1])
    return np.pad(array[:, :width], ((0, 0), (0, more)), constant_values=fill)

# SPDX-License-Identifier: Apache-2.0
"""Questions without a context, whose passages are to be found in an index."""

from typing import Any

from bertjax import UserError
from bertjax.data.corpus.line_repair import load_json
from bertjax.tasks import squad_files, tables
from bertjax.tasks.tables import Say, silent


def parse_questions(
    text: str, name: str, column: str = "question", say: Say = silent
) -> list[dict[str, Any]]:
    """Read SQuAD's JSON, of which contexts are left out; or JSON lines with a question,
    whose other cells stay as they are; else a question a line.

    Returns objects with that column, and of SQuAD `id` and `answers`. Raises UserError,
    naming the place.
    """
    is_json = text.lstrip()[:1] == "{"
    if is_json and '"paragraphs"' in text and '"qas"' in text:
        asked = squad_files.questions_of(load_json(text, name), name)
        return [
            {"id": q.id, column: q.text, "answers": [*dict.fromkeys(q.answers)]}
            for q in asked.questions
        ]
    if is_json:
        rows = tables.parse_rows(text, "json", name, {"question": column}, say)
        found = [(dict(row.cells), row.place) for row in rows]
        for cells, place in found:
            if not isinstance(cells[column], str):
                raise UserError(f"{place}: {column} has to be a text")
        return [cells for cells, _ in found]
    lines = [line.strip() for line in text.split("\n")]
    return [{column: line} for line in lines if line]

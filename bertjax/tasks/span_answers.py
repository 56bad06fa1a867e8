# SPDX-License-Identifier: Apache-2.0
"""Choose answers that are spans of a text, from start and end logits.

As in google-research/bert's run_squad.py, an answer is a span of at most `longest`
pieces between the `top` best starts and the `top` best ends of a row. A start counts
only in the row in which its piece has the most context; an end may lie beyond these
pieces, because otherwise no row could answer across that border. In contrast to that
script, `top` counts only pieces of the context, and the text is cut out by character
offsets, so that no tokenization has to be undone.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bertjax.tasks.squad_files import Questions, Windows
from bertjax.tasks.task_rows import Limits

TOP = 20
ROWS = 1024  # at once, to bound memory


class Answer(NamedTuple):
    """The answer to a question.

    text: of the best span; score: its start logit plus its end logit; null_score: the
    sum of the two logits of [CLS], the smallest of all rows of the question. Without a
    possible span the text is "" and the score is null_score.
    """

    text: str
    score: float
    null_score: float

    @property
    def doubt(self) -> float:
        """How much higher "no answer" scores; thresholds are compared with it."""
        return self.null_score - self.score


def pick_answers(
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    windows: Windows,
    asked: Questions,
    top: int = TOP,
    longest: int = Limits().answer_length,
) -> dict[str, Answer]:
    """Return the best answer of each question: {id: Answer}.

    start_logits, end_logits: f32 [rows, L], in the order of `windows`. Among equal
    scores the earlier row wins, then the earlier start, then the shorter span.

    Raises ValueError for logits of another number of rows, or too few columns.
    """
    rows, length = len(windows.question), start_logits.shape[-1]
    if start_logits.shape != end_logits.shape or len(start_logits) != rows:
        shapes = f"{start_logits.shape}, {end_logits.shape}"
        raise ValueError(f"logits {shapes} for {rows} rows")
    if rows and windows.lengths.max() > length:
        raise ValueError(f"logits {start_logits.shape} for rows of {windows.lengths}")
    place = np.arange(length) - windows.lead[:, None]
    in_context = (place >= 0) & (place < windows.size[:, None])
    max_context = in_context.copy()
    max_context[in_context] = windows.max_context
    parts = [
        best_spans(
            np.where(max_context[some], start_logits[some], -np.inf),
            np.where(in_context[some], end_logits[some], -np.inf),
            top,
            longest,
        )
        for some in (slice(a, a + ROWS) for a in range(0, rows, ROWS))
    ]
    score, first, last = (np.concatenate(p) for p in zip(*parts, strict=True))
    null = np.float64(start_logits[:, 0]) + end_logits[:, 0]

    # Rows are in the order of the questions, and each question has at least one.
    begins = np.searchsorted(windows.question, np.arange(len(asked.questions)))
    null = np.minimum.reduceat(null, begins)
    best = np.maximum.reduceat(score, begins)
    hits = np.flatnonzero(score == best[windows.question])
    winners = hits[np.searchsorted(windows.question[hits], np.arange(len(begins)))]
    answers = {}
    for q, row, s, n in zip(asked.questions, winners, best, null, strict=True):
        answers[q.id] = Answer("", float(n), float(n))
        if s > -np.inf:
            shift = windows.begin[row] - windows.lead[row]
            a, b = windows.chars[[shift + first[row], shift + last[row]], [0, 1]]
            text = asked.contexts[q.context][a:b].strip()
            answers[q.id] = Answer(text, float(s), float(n))
    return answers


def best_spans(
    starts: np.ndarray, ends: np.ndarray, top: int, longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return score f64, first and last piece i64 of the best span of each row.

    Logits are -inf where no span may begin or end; the score is -inf if a row has no
    possible span.
    """

    def best(logits: np.ndarray) -> np.ndarray:
        if top >= logits.shape[1]:
            return logits.astype(np.float64)
        least = np.partition(logits, -top, axis=1)[:, -top, None]
        # Keeps all pieces that are equal to the last of the `top`.
        return np.where(logits >= least, logits, -np.inf).astype(np.float64)

    starts, ends = best(starts), best(ends)
    score, size = starts + ends, np.zeros(starts.shape, np.int64)
    for more in range(1, min(longest, starts.shape[1])):
        found = starts[:, :-more] + ends[:, more:]
        better = found > score[:, :-more]
        score[:, :-more][better] = found[better]
        size[:, :-more][better] = more
    first = np.argmax(score, axis=1)
    row = np.arange(len(first))
    return score[row, first], first, first + size[row, first]


def texts(
    answers: Mapping[str, Answer], threshold: float | None = None
) -> dict[str, str]:
    """Return the text for each question, "" if its doubt is above the threshold.

    threshold: None if every question has an answer, as in SQuAD 1.1.
    """
    most = np.inf if threshold is None else threshold
    return {name: "" if a.doubt > most else a.text for name, a in answers.items()}

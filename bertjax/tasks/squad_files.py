# SPDX-License-Identifier: Apache-2.0
"""Read SQuAD's files, whose answers are spans of a context, and make their rows.

A row is [CLS] question [SEP] context [SEP] (Devlin et al. 2019, section 4.2). A context
that is too long is split into several rows, whose windows of the context begin `stride`
pieces apart, as in google-research/bert's run_squad.py. Here each context is encoded
once, and windows are computed by arithmetic on flat arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.ragged import ramps
from bertjax.tasks.task_rows import Batch, Form, Ragged
from bertjax.tasks.text_rows import encode_with_chars, lay_out


# ------------------------------------------------------------------ files
class Question(NamedTuple):
    """A question about a context.

    context: index into `Questions.contexts`. answers: the gold answers; () if the
    question has no answer. span: characters [begin, end) of the first answer that the
    context contains, or None.
    """

    id: str
    text: str
    context: int
    answers: tuple[str, ...]
    span: tuple[int, int] | None

    @property
    def identity(self) -> str:
        """Return the text that content hashes cover.

        Its words must not change (see task_rows.Form.identity).
        """
        return (
            f"Question(id={self.id!r}, text={self.text!r}, context={self.context!r}, "
            f"answers={self.answers!r}, span={self.span!r})"
        )


@dataclass
class Questions:
    """The questions of a file.

    moved: one line per answer that is not where the file says (the nearest occurrence
    is used). lost: one line per answer that is nowhere in the context (it still counts
    for scoring). unlabelled: places of questions for which the file does not say
    whether there is an answer. source: the file's name in messages.
    """

    contexts: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unlabelled: list[str] = field(default_factory=list)
    source: str = ""

    @property
    def golds(self) -> dict[str, tuple[str, ...]]:
        """Return {id: gold answers}, for squad_metrics.py."""
        return {q.id: q.answers for q in self.questions}


def questions_of(data: Any, path: str) -> Questions:
    """Read the JSON of SQuAD 1.1 or 2.0, or of data sets in the same format (CMRC).

    path: the file's name in messages. A question without `answers`, as in a test set,
    gets () and is `unlabelled`. Raises UserError, naming the place, for another format.
    """
    found = Questions(source=path)
    seen: set[str] = set()
    if not isinstance(data, dict):
        raise UserError(f"{path}: not of SQuAD's form, an object with 'data'")
    articles = _each(data, "data", path)
    paragraphs = chain(*(_each(item, "paragraphs", at) for item, at in articles))
    for paragraph, at in paragraphs:
        context = _get(paragraph, "context", str, at)
        found.contexts.append(context)
        for qa, place in _each(paragraph, "qas", at):
            name = _get(qa, "id", str, place)
            if name in seen:
                raise UserError(f"{place}: the id {name!r} occurs twice")
            seen.add(name)
            golds, first = [], None
            if "answers" not in qa and not qa.get("is_impossible"):
                found.unlabelled.append(place)
            for answer, where in _each(qa, "answers", place, ()):
                golds.append(_get(answer, "text", str, where))
                start = _get(answer, "answer_start", int, where)
                line = f"{where} (question {name}): {golds[-1]!r}"
                if not (span := _find(context, golds[-1], start)):
                    found.lost.append(f"{line} is not in the context")
                elif span[0] != start:
                    found.moved.append(f"{line} is at {span[0]}, not at {start}")
                first = first or span
            question, n = _get(qa, "question", str, place), len(found.contexts) - 1
            found.questions.append(Question(name, question, n, tuple(golds), first))
    if not found.questions:
        raise UserError(f"{path}: there are no questions")
    return found


def _each(
    item: dict[str, Any], key: str, place: str, default: Any = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a list with their places: "f.json: data[0].qas[2]"."""
    for n, inner in enumerate(_get(item, key, list, place, default)):
        at = f"{place}{'.' if place.endswith(']') else ': '}{key}[{n}]"
        if not isinstance(inner, dict):
            raise UserError(f"{at} has to be an object")
        yield inner, at


def _get(
    item: dict[str, Any], key: str, kind: type, place: str, default: Any = None
) -> Any:
    value = item.get(key, default)
    if value is None:
        raise UserError(f"{place} has no {key!r}")
    if not isinstance(value, (kind, type(default))):
        what = f"a {_KINDS[kind]}, and is {value!r:.40}"
        raise UserError(f"{place}: {key!r} has to be {what}")
    return value


_KINDS = {str: "text", int: "whole number", list: "list"}


def _find(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """Return the characters of an answer: at `start`, or the nearest occurrence.

    Of two equally near ones it is the one before `start`.

    >>> _find("a cat, a cat", "cat", 4), _find("a cat", "dog", 0)
    ((2, 5), None)
    """
    if not answer.strip():
        return None
    start = min(max(start, 0), len(context))
    before = context.rfind(answer, 0, start + len(answer))
    places = [p for p in (before, context.find(answer, start)) if p >= 0]
    begin = min(places, key=lambda p: abs(p - start), default=None)
    return None if begin is None else (begin, begin + len(answer))


# ------------------------------------------------------------------ rows
@dataclass(frozen=True, eq=False)
class Windows:
    """Rows of questions, in the order of the questions; each has at least one row.

    texts: the pieces of the questions. pieces i32 [tokens]: the pieces of all contexts,
    concatenated; chars i32 [tokens, 2]: the characters [begin, end) of each piece in
    its context, which may begin with a space.

    Per row, [rows] each: question i32, the question's index; begin, size i64, the
    window [begin, begin + size) of `pieces`; lead i64, the position where the window,
    and so the second segment, begins; start_positions, end_positions i32, the first and
    last piece of the answer, (0, 0) if it is not wholly in the row; has_answer bool;
    known bool, False if the question has answers but the context contains none of them,
    so that the row cannot be trained on.

    max_context bool [sum of size]: for the pieces of all windows, concatenated, whether
    the piece has its most context in this row (`_max_context`). cut: ids of the
    questions that were cut to the allowed length.
    """

    texts: Ragged
    pieces: np.ndarray
    chars: np.ndarray
    separators: int
    question: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    lead: np.ndarray
    start_positions: np.ndarray
    end_positions: np.ndarray
    has_answer: np.ndarray
    known: np.ndarray
    max_context: np.ndarray
    cut: list[str]

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens per row: i64 [rows]."""
        return self.lead + self.size + 1

    def gather(self, rows: np.ndarray, length: int, specials: Any) -> Batch:
        """Make a batch: input_ids, attention_mask, token_type_ids i32 [b, L], and
        start_positions, end_positions i32 [b], example_weights f32 [b].

        Question 7, context 8 9, length 7 ([CLS] 1, [SEP] 2, padding 0):

            input_ids       1  7  2  8  9  2  0
            token_type_ids  0  0  0  1  1  1  0
        """
        places = zip(
            self.question[rows], self.begin[rows], self.size[rows], strict=True
        )
        texts = [(self.texts[q], self.pieces[at : at + n]) for q, at, n in places]
        return {
            **lay_out(texts, length, self.separators, specials),
            "start_positions": self.start_positions[rows],
            "end_positions": self.end_positions[rows],
            "example_weights": self.known[rows].astype(np.float32),
        }


def featurize(asked: Questions, tokenizer: Any, length: int, form: Form) -> Windows:
    """Make the rows of questions, of at most `length` tokens, special ones included.

    A window begins `form.limits.stride` pieces after the window before it, but no later
    than that window's end. Questions are cut to form.limits.question_length. Raises
    UserError if a row has no room for a context.
    """
    (stride, question_length, _), separators = form.limits, form.separators
    spare = length - question_length - 2 - separators
    if spare < 1 or stride < 1 or question_length < 1:
        raise UserError(
            f"data.length={length} leaves no room for a context beside a question of "
            f"up to {question_length} tokens (task.question_length) and "
            f"{2 + separators} special ones"
        )
    questions = asked.questions
    contexts, chars = encode_with_chars(tokenizer, asked.contexts)
    whole = tokenizer.encode_batch([q.text for q in questions])
    texts = Ragged.of([ids[:question_length] for ids in whole])
    context = np.array([q.context for q in questions], np.int64)
    room = length - texts.lengths - 2 - separators
    step = np.minimum(stride, room)
    of, begin, size = _slide(contexts.lengths[context], room, step)
    lead = 1 + texts.lengths[of] + separators
    start, end = (x[of] for x in _answers(asked, contexts, chars))
    inside = (begin <= start) & (start <= end) & (end < begin + size)
    shift = lead - begin  # from a piece's index in the context to its position
    return Windows(
        texts=texts,
        pieces=contexts.tokens,
        chars=chars,
        separators=separators,
        question=of.astype(np.int32),
        begin=contexts.offsets[context][of] + begin,
        size=size,
        lead=lead,
        start_positions=np.where(inside, start + shift, 0).astype(np.int32),
        end_positions=np.where(inside, end + shift, 0).astype(np.int32),
        has_answer=inside,
        known=np.array([not q.answers or q.span is not None for q in questions])[of],
        max_context=_max_context(of, begin, size),
        cut=[
            q.id
            for q, ids in zip(questions, whole, strict=True)
            if len(ids) > question_length
        ],
    )


def _slide(
    sizes: np.ndarray, room: np.ndarray, step: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the windows of contexts: context, first piece, number of pieces.

    sizes, room, step i64 [n]: the pieces of a context, the most pieces of a window, and
    the pieces from one window's begin to the next's.

    >>> [x.tolist() for x in _slide(*np.array([[5, 2], [3, 3], [2, 2]]))]
    [[0, 0, 1], [0, 2, 0], [3, 3, 2]]
    """
    count = 1 + np.maximum(0, -(-(sizes - room) // step))
    of = np.repeat(np.arange(len(sizes)), count)
    begin = ramps(count) * step[of]
    return of, begin, np.minimum(room[of], sizes[of] - begin)


def _answers(
    asked: Questions, contexts: Ragged, chars: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last piece of the context that cover each question's answer.

    Both are i64 [questions]; last < first if there is no such piece, or no answer.
    """
    # Number the characters of all contexts in one sequence, with a gap after each.
    base = np.cumsum([0, *(len(c) + 1 for c in asked.contexts)])
    shift = np.repeat(base[:-1], contexts.lengths)
    begins, ends = np.maximum.accumulate(chars + shift[:, None], axis=0).T
    spans = np.array([q.span or (0, -1) for q in asked.questions], np.int64)
    context = np.array([q.context for q in asked.questions], np.int64)
    spans += base[context][:, None]
    first = np.searchsorted(ends, spans[:, 0], "right")
    last = np.searchsorted(begins, spans[:, 1], "left") - 1
    return first - contexts.offsets[context], last - contexts.offsets[context]


def _max_context(of: np.ndarray, begin: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return, for each piece of each window, whether its row has its most context.

    of, begin, size i64 [rows]: question, first piece and number of pieces. The row with
    the most pieces on the shorter side of the piece wins, then the longer window, then
    the earlier row.

    >>> _max_context(np.array([0, 0]), np.array([0, 2]), np.array([4, 3])).tolist()
    [True, True, True, False, False, True, True]
    """
    row = np.repeat(np.arange(len(of)), size)
    place = ramps(size)
    # As in run_squad.py, a piece of the window's length counts 0.01.
    score = np.minimum(place, size[row] - 1 - place) * 100 + size[row]
    ends = np.zeros(of.max(initial=-1) + 1, np.int64)  # the end of the last window
    np.maximum.at(ends, of, begin + size)
    piece = (np.cumsum(ends) - ends)[of[row]] + begin[row] + place
    best = np.zeros(ends.sum(), np.int64)
    np.maximum.at(best, piece, score)
    winners = np.flatnonzero(score == best[piece])[::-1]
    best[piece[winners]] = row[winners]  # the last value written is the first row's
    return best[piece] == row

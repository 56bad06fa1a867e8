# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering: rows of questions about a context.

Files are SQuAD's JSON (squad_files.py), or JSON lines with `question` and `context`,
without answers; or SQuAD from TensorFlow Datasets.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, Self

import numpy as np

from bertjax import UserError, counted, join_names
from bertjax.data.corpus import tfds_source
from bertjax.data.corpus.line_repair import load_json
from bertjax.data.rendering import decode
from bertjax.tasks import squad_files, tables
from bertjax.tasks.span_answers import Answer, pick_answers, texts
from bertjax.tasks.squad_files import Question, Questions, Windows, featurize
from bertjax.tasks.squad_metrics import cmrc_scores, squad_scores
from bertjax.tasks.tables import Columns, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Limits, Lines, Outputs, Ragged, Rows
from bertjax.tasks.task_type import TaskType

WANTED = "FILE.json"
METRICS = ("exact", "f1", "cmrc_exact", "cmrc_f1")
ANSWER = "text", "answer_start"  # features in TensorFlow Datasets
NEG_INF = -1e9  # the logit of rows that are not among the examples


def read_questions(value: str, key: str, columns: Columns, say: Say) -> list[Questions]:
    """Read all files that a config value names: one Questions per file.

    Reports answers that are not where the file says, or not in the context at all.
    Raises UserError, naming the file and the place in it.
    """

    def read_path(path: str) -> list[Questions]:
        return parse_text(tables.read_text(path), path, columns, say)

    read_entry, what = partial(read_tfds, key=key), "questions in SQuAD's form"
    found = tables.read_entries(value, key, WANTED, what, read_entry, read_path)
    for one in found:
        note = " elsewhere in the context than the file says"
        tables.report(say, one.moved, "answer", note, one.source)
        tables.report(say, one.lost, "answer", " not in the context", one.source)
    return found


def read_tfds(name: str, key: str) -> list[Questions]:
    """Read "tfds:squad/v1.1:train", or a data set with the same features.

    Raises UserError.
    """
    needed = dict.fromkeys(("id", "question", "context", "answers"), key)
    builder, split = tfds_source.open_split(name, needed)
    paragraphs: list[dict[str, Any]] = []
    for row in tfds_source.read_split(builder, split, needed):
        cells = {k: tables.decoded(row[k]) for k in ("id", "question", "context")}
        if not isinstance(row["answers"], dict) or not {*ANSWER} <= {*row["answers"]}:
            raise UserError(f"{name}: `answers` ({key}) has no {' and '.join(ANSWER)}")
        parts = (tfds_source.as_plain(row["answers"][k]) for k in ANSWER)
        answers = zip(*map(tables.decoded, parts), strict=True)
        golds = [dict(zip(ANSWER, gold, strict=True)) for gold in answers]
        if not paragraphs or paragraphs[-1]["context"] != cells["context"]:
            paragraphs.append({"context": cells["context"], "qas": []})
        paragraphs[-1]["qas"].append({**cells, "answers": golds})
    return [squad_files.questions_of({"data": [{"paragraphs": paragraphs}]}, name)]


def parse_text(
    text: str, name: str, columns: Columns | None = None, say: Say = silent
) -> list[Questions]:
    """Parse one file, or standard input: SQuAD's JSON, or questions with their contexts
    as JSON lines or a list."""
    first = text.lstrip().partition("\n")[0]
    asks = any(f'"{key}"' in first for key in ("question", "context"))
    is_whole = '"data"' in first or '"paragraphs"' in first or not asks
    if is_whole and not re.match(r"\s*\[\s*\{", text):
        return [squad_files.questions_of(load_json(text, name), name)]
    read = Questions(source=name)
    rows = [*tables.parse_rows(text, "json", name, {}, say)]
    ids = [row.cells.get("id") for row in rows]
    given = {str(own) for own in ids if own is not None}
    free = (own for own in map(str, count()) if own not in given)
    for i, (row, own) in enumerate(zip(rows, ids, strict=True)):
        question, context = map(row.cells.get, ("question", "context"))
        if not isinstance(question, str) or not isinstance(context, str):
            if part := {"paragraphs", "qas"} & row.cells.keys():
                raise UserError(
                    f"{row.place} has {min(part)!r} of SQuAD's form, whose file is an "
                    "object with 'data', a list of articles"
                )
            why = "question and context have to be texts"
            if isinstance(question, str) and context is None:
                why = (
                    "the question has no context that could hold its answer; models "
                    "of objective=read answer from an index (--index=DIR)"
                )
            raise UserError(f"{row.place}: {why}")
        read.contexts.append(context)
        own = next(free) if own is None else str(own)
        read.questions.append(Question(own, question, i, (), None))
        read.unlabelled.append(row.place)
    return [read]


@dataclass(frozen=True, eq=False)
class QuestionRows(Rows):
    """Questions; after `plan`, with their windows (squad_files.Windows).

    threshold: `answers` gives "" to questions of greater doubt; None: every question
    has an answer. layouts: the windows by length, shared by all copies of this object.
    """

    asked: Questions
    tokenizer: Any
    windows: Windows | None = None
    threshold: float | None = None
    layouts: dict[int, Windows] = field(default_factory=dict, repr=False)

    @property
    def some_lack(self) -> bool:
        """Whether some questions have no answer."""
        return not all(self.asked.golds.values())

    def arrays(self) -> list[np.ndarray | None]:
        questions = ", ".join(q.identity for q in self.asked.questions)
        text = f"({self.asked.contexts!r}, [{questions}])"
        return [np.frombuffer(text.encode(), np.uint8)]

    def plan(self, length: int) -> Self:
        if length not in self.layouts:
            windows = featurize(self.asked, self.tokenizer, length, self.form)
            self.layouts[length] = windows
        return replace(self, windows=self.layouts[length], length=length)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.windows.lengths
        return lengths, np.zeros_like(lengths)

    @property
    def findings(self) -> Sequence[str]:
        """Answers that are not where the file says, and answers that are nowhere."""
        return [*self.asked.moved, *self.asked.lost]

    def notes(self) -> Iterator[str]:
        asked, cut = len(self.asked.questions), self.windows.cut
        rows = counted(self.n, "row")
        yield f"{counted(asked, 'question')} in {rows} of {self.length}"
        if cut:
            yield f"{counted(len(cut), 'question')} too long, cut: {join_names(cut)}"
        rows, most = self.windows, self.form.limits.answer_length
        size = rows.end_positions - rows.start_positions + 1
        long = np.unique(rows.question[rows.has_answer & (size > most)])
        if len(long):
            yield (
                f"{counted(len(long), 'answer')} of more than {most} pieces "
                "(task.answer_length): no answer is given that long"
            )

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows, as `Windows.gather` does."""
        return self.windows.gather(example, self.length, specials)

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the question, the context, and the pieces of the answer."""
        rows, asked = self.windows, self.asked
        real, second = row["attention_mask"] > 0, int(rows.lead[example])
        parts = np.arange(len(real)) < second
        yield "question", decode(tokenizer, row["input_ids"][real & parts])
        yield "context", decode(tokenizer, row["input_ids"][real & ~parts])
        if asked.unlabelled:
            return
        question = asked.questions[rows.question[example]]
        if rows.has_answer[example]:
            begin, end = int(row["start_positions"]), int(row["end_positions"])
            pieces = decode(tokenizer, row["input_ids"][begin : end + 1])
            yield "answer", f"{pieces} (tokens {begin} to {end})"
        elif question.span:
            yield "answer", "none in this row, but in another one of the question"
        else:
            yield "answer", "not in the context" if question.answers else "none"

    def label_counts(self) -> dict[str, dict[str, float]]:
        if self.asked.unlabelled:
            return {}
        questions = self.asked.questions
        answered = sum(q.span is not None for q in questions)
        none = sum(not q.answers for q in questions)
        counts = {"answered": answered, "without an answer": none}
        counts["answer not in the context"] = len(questions) - answered - none
        return {"questions": {name: n for name, n in counts.items() if n}}

    def best_answers(self, outputs: Outputs, example: np.ndarray) -> dict[str, Answer]:
        """Return the answers {id: Answer} of questions with all rows in `example`.

        outputs: "start_logits", "end_logits" f32, one row per example, of any length.
        """
        logits = np.full((2, self.n, self.length), NEG_INF, np.float32)
        for of_all, name in zip(logits, ("start_logits", "end_logits"), strict=True):
            for row, of_row in zip(example, outputs[name], strict=True):
                of_all[row, : len(of_row)] = of_row[: self.length]
        longest = self.form.limits.answer_length
        answers = pick_answers(*logits, self.windows, self.asked, longest=longest)
        lacking = np.delete(self.windows.question, example)
        for i in {*lacking.tolist()}:
            del answers[self.asked.questions[i].id]
        return answers

    @property
    def scores(self) -> tuple[str, ...]:
        return self.form.metrics + BEST * self.some_lack

    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | ({"threshold": 0.0} if self.some_lack else {})

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Score answers from 0 to 1; NaN if no question has all its rows here.

        If some questions of the set (in these rows or not) have no answer, questions
        with a doubt above 0, google-research/bert's threshold, count as unanswered.
        `best_exact` and `best_f1` are then the scores at the best thresholds, and
        `threshold` is the best one for f1.
        """
        answers = self.best_answers(outputs, example)
        golds = {k: v for k, v in self.asked.golds.items() if k in answers}
        if not golds:
            return dict.fromkeys(self.scores, math.nan)
        some_lack = self.some_lack
        doubts = {name: a.doubt for name, a in answers.items()}
        answer_texts = texts(answers, 0.0 if some_lack else None)
        out = squad_scores(answer_texts, golds)
        if {"cmrc_exact", "cmrc_f1"} & {*self.form.metrics}:
            out |= {f"cmrc_{k}": v for k, v in cmrc_scores(answer_texts, golds).items()}
        scores = {name: out[name] / 100 for name in self.form.metrics}
        if some_lack:
            best = squad_scores(texts(answers), golds, doubts)
            scores |= {k: best[k] / 100 for k in BEST}
            scores["threshold"] = float(best["best_f1_thresh"])
        return scores

    def answers(self, outputs: Outputs, read: Sequence[Questions]) -> Iterator[Any]:
        """Yield {"id", "answer", "score", "null_score"} for each question."""
        found = self.best_answers(outputs, np.arange(self.n))
        answer_texts = texts(found, self.threshold)
        for name, one in found.items():
            answer = {"answer": answer_texts[name], "score": one.score}
            yield {"id": name, **answer, "null_score": one.null_score}


def make_question_rows(
    read: list[Questions], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> QuestionRows:
    """Join the questions of several files, and report empty ones.

    Raises UserError, naming the file, for an id that occurs twice and, if labeled, for
    questions without `answers`, and if no answer is in its context.
    """
    whole = Questions(source=join_names([one.source for one in read]))
    for one in read:
        n = len(whole.contexts)
        whole.questions += [q._replace(context=n + q.context) for q in one.questions]
        for key in ("contexts", "unlabelled", "moved", "lost"):
            getattr(whole, key).extend(getattr(one, key))
    ids = Counter(q.id for q in whole.questions)
    if twice := [name for name, times in ids.items() if times > 1]:
        raise UserError(f"{whole.source}: the id {twice[0]!r} occurs twice")
    if labelled and whole.unlabelled:
        raise UserError(
            f"{join_names(whole.unlabelled)}: {len(whole.unlabelled):,} of "
            f"{len(whole.questions):,} questions have no 'answers'; write [] where "
            "there is none"
        )
    if labelled and not any(q.span for q in whole.questions):
        raise UserError(f"{whole.source}: no question's answer is in its context")
    empty = [q.id for q in whole.questions if not q.text.strip()]
    tables.report(say, empty, "empty question", ", kept", whole.source)
    every = [*whole.contexts, *(question.text for question in whole.questions)]
    counts = Ragged.encode(tokenizer, every).counts(tokenizer)
    return QuestionRows(form, counts, whole, tokenizer)


BEST = ("best_exact", "best_f1")  # where some questions have no answer
COLUMNS = {"text": "question", "text_pair": "context", "label": "answers"}
TASK_TYPE = TaskType(
    read=read_questions,
    parse=parse_text,
    make_rows=make_question_rows,
    file_names=WANTED,
    metrics=METRICS,
    default_metrics=("exact", "f1"),
    extra_scores=lambda form: BEST,
    outputs=("start_logits", "end_logits"),
    columns=COLUMNS,
    unused={**COLUMNS, "labels": "", "choices": ""},
    settings=Limits._fields,
    max_length=384,  # google-research/bert's
    text_columns=0,
    has_threshold=True,
    hf_class="ForQuestionAnswering",
)

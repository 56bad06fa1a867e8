# SPDX-License-Identifier: Apache-2.0
"""Open-domain reading: rows of questions with the passages retrieved for them.

The input is JSON lines as for DPR's and FiD's readers: `question`, `answers` (texts,
each of which is right), and `ctxs`, the passages, best first: {"id", "title", "text",
"score"}; bertjax.predict --model=RETRIEVER --index=DIR writes such lines. A row is the
question alone, and [CLS] question [SEP] title text [SEP] for each passage. Every
occurrence of an answer in a passage is right, as whole words and in any case. A row
without one is not trained on; in evaluations it counts as a wrong answer.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.data.rendering import decode
from bertjax.tasks import text_rows
from bertjax.tasks.open_questions import (
    answers_of,
    fill_lists,
    find_answers,
    id_of,
    parse_found,
    passages_of,
    read_found,
    widen,
)
from bertjax.tasks.passage_index import Passage, PassageIndex
from bertjax.tasks.retrieval_options import (
    check_pooling,
    check_vectors,
    index_facts,
    pooling_options,
)
from bertjax.tasks.span_answers import best_spans
from bertjax.tasks.squad_metrics import open_scores
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged, Rows
from bertjax.tasks.task_type import TaskType

WANTED = "FILE.jsonl"
DEPTHS = 1, 5, 20  # the numbers K of passages for the metrics @K
METRICS = "exact", "f1", *(f"{x}@{k}" for k in DEPTHS for x in ("exact", "f1"))
SPANS = 8  # the first occurrences of answers in a passage that count
NEG_INF = -1e9  # ln p of the answer of a passage without tokens


@dataclass(frozen=True, eq=False)
class ReadingRows(Rows):
    """Questions with passages.

    questions: their token ids; passages: those of all distinct passages; chars i32
    [tokens, 2]: the characters [begin, end) of each token in texts, the passages'.
    members i64 [n, k]: each question's passages, -1 for none; passage_scores f32
    [n, k]. spans: {(row, slot): [(first, last token)]}, the answers in passages. golds:
    the answers, () without labels. taken: the most passages of a row. vectors: of the
    index, f32 [rows, D]; rows_of_index: the row of each passage, i64 [passages].
    """

    names: Sequence[str]
    questions: Ragged
    passages: Ragged
    chars: np.ndarray
    texts: Sequence[str]
    members: np.ndarray
    passage_scores: np.ndarray
    spans: Mapping[tuple[int, int], Sequence[tuple[int, int]]]
    golds: Sequence[Sequence[str]] = ()
    taken: int = 5
    vectors: Any = None
    rows_of_index: np.ndarray | None = None
    index_digest: str = ""
    answered: Sequence[Sequence[Mapping[str, Any]]] = field(default=(), repr=False)

    @property
    def choices(self) -> int:  # type: ignore[override]
        """Sequences of a row."""
        return 1 + self.taken

    @cached_property
    def listed(self) -> np.ndarray:
        """The first `taken` passages of each question: i64 [n, k]."""
        return widen(self.members, self.taken, -1)

    def arrays(self) -> list[np.ndarray | None]:
        spans = [(*at, *span) for at, own in self.spans.items() for span in own]
        known = f"{self.taken} {self.index_digest} {[*map(list, self.golds)]!r}"
        text = np.frombuffer(hashlib.sha256(known.encode()).digest(), np.uint8)
        texts = self.questions, self.passages
        return [
            *(x for own in texts for x in (own.tokens, own.offsets)),
            self.members,
            self.passage_scores,
            np.array(spans, np.int64),
            text,
        ]

    @cached_property
    def question_sizes(self) -> np.ndarray:
        """The number of kept tokens per question: i64 [n]."""
        return np.minimum(self.questions.lengths, self.form.limits.question_length)

    @property
    def specials(self) -> int:
        return 2 + self.form.separators

    @property
    def shortest(self) -> int:
        return self.specials + 2

    def plan(self, length: int) -> Self:
        room = length - self.form.limits.question_length - self.specials
        if room < 1:
            raise UserError(
                f"data.length={length} leaves no room for a passage beside a question "
                f"of up to {self.form.limits.question_length} tokens "
                "(task.question_length)"
            )
        laid = super().plan(length)
        return replace(laid, length=min(length, int(laid.sizes[0].max())))

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        own = self.listed
        sizes = np.where(own >= 0, self.passages.lengths[np.maximum(own, 0)], 0)
        full = sizes + (self.question_sizes + self.specials)[:, None]
        kept = np.minimum(full, self.length)
        return kept.max(axis=1), (full - kept).sum(axis=1)

    def lead(self, example: Any) -> np.ndarray:
        """Return the position at which passages begin in the rows of a question."""
        return 1 + self.question_sizes[example] + self.form.separators

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids i32 [b, 1 + k, L];
        passage_weights, passage_scores f32 and passage_begins, passage_ends i32 [b, k];
        with labels span_starts, span_ends i32 [b, k, S], with an index passage_vectors
        f32 [b, k, D].

        Question 7, passages 8 9 and none, length 6 ([CLS] 1, [SEP] 2, padding 0):

            input_ids  1  7  2  0  0  0    passage_begins  3    passage_ends  5
                       1  7  2  8  9  2                    0                  0
                       0  0  0  0  0  0
        """
        b, own = len(example), self.listed[example]
        pairs: list[list[np.ndarray]] = []
        for i, passages in zip(example, own, strict=True):
            asked = self.questions[i][: self.question_sizes[i]]
            room = self.length - len(asked) - self.specials
            pairs += [[asked]]
            pairs += [[asked, self.passages[p][:room]] for p in passages if p >= 0]
        real = np.concatenate([np.ones((b, 1), bool), own >= 0], axis=1)
        how = real, self.length, self.form.separators, specials
        batch = text_rows.lay_out_real(pairs, *how)
        begins = np.where(own >= 0, self.lead(example)[:, None], 0)
        ends = batch["attention_mask"][:, 1:].sum(axis=2) - (own >= 0)
        batch |= {
            "passage_begins": begins.astype(np.int32),
            "passage_ends": ends.astype(np.int32),
            "passage_weights": (own >= 0).astype(np.float32),
            "passage_scores": widen(self.passage_scores[example], self.taken, 0.0),
        }
        if self.vectors is not None:
            vectors = self.vectors[self.rows_of_index[np.maximum(own, 0)]]
            vectors = vectors.astype(np.float32)
            batch["passage_vectors"] = vectors * (own >= 0)[..., None]
        if self.golds:
            batch |= self._places(example, batch["passage_ends"])
        return batch

    def _places(self, example: np.ndarray, ends: np.ndarray) -> Batch:
        """Make the spans of answers; answers that are cut off do not count."""
        out = np.full((2, *ends.shape, SPANS), -1, np.int32)
        for row, i in enumerate(example.tolist()):
            lead = self.lead(i)
            for slot in range(self.taken):
                spans = self.spans.get((i, slot), ())
                inside = [s for s in spans if lead + s[1] < ends[row, slot]]
                for n, span in enumerate(inside[:SPANS]):
                    out[:, row, slot, n] = lead + np.array(span)
        return {"span_starts": out[0], "span_ends": out[1]}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the question, its first passage, its answers, and where they occur."""
        lead = int(self.lead(example))
        first, real = row["input_ids"][1], row["attention_mask"][1] > 0
        yield "question", decode(tokenizer, first[:lead])
        yield "first passage", decode(tokenizer, first[lead:][real[lead:]])
        if not self.golds:
            return
        yield "answers", "; ".join(self.golds[example])
        holds = np.flatnonzero((row["span_starts"] >= 0).any(axis=1))
        yield "in passages", ", ".join(str(k + 1) for k in holds) or "none"

    @cached_property
    def holding(self) -> np.ndarray:
        """Whether each passage of each question contains an answer: bool [n, k]."""
        out = np.zeros((len(self.members), self.taken), bool)
        for (row, slot), spans in self.spans.items():
            if slot < self.taken:
                out[row, slot] = bool(spans)
        return out

    def label_counts(self) -> dict[str, dict[str, float]]:
        if not self.golds:
            return {}
        with_answer = int(self.holding.any(axis=1).sum())
        first = int(self.holding[:, 0].sum())
        counts = {"answer in a passage": with_answer, "in the first": first}
        counts["in none"] = len(self.members) - with_answer
        return {"questions": {name: n for name, n in counts.items() if n}}

    def notes(self) -> Iterator[str]:
        k = counted(self.taken, "passage")
        yield f"{counted(self.n, 'question')}, each with {k}, rows of {self.length}"
        if cut := int((self.sizes[1] > 0).sum()):
            yield f"of {cut:,} questions a passage is cut at {self.length} tokens"

    def for_scores(self) -> "ReadingRows":
        """Return the rows with as many passages as an evaluation uses."""
        return replace(self, taken=min(self.form.candidates, self.members.shape[1]))

    def best(self, outputs: Outputs, row: int, i: int) -> Iterator[tuple[float, str]]:
        """Yield, for each passage of question i, ln p of its best span (times p of the
        passage), and the span's text; row: the question's row in outputs. A passage
        without tokens yields NEG_INF and ""."""
        scores = np.float64(outputs["passage_scores"][row])
        longest = self.form.limits.answer_length
        starts, ends = (np.asarray(outputs[f"{x}_logits"][row]) for x in STARTS_ENDS)
        likely, first, last = best_spans(starts, ends, starts.shape[-1], longest)
        lead = int(self.lead(i))
        for slot, passage in enumerate(self.members[i, : len(scores)].tolist()):
            if passage < 0:
                return
            if not self.passages.lengths[passage]:
                yield NEG_INF, ""
                continue
            at = self.passages.offsets[passage] - lead
            a, b = self.chars[[at + first[slot], at + last[slot]], [0, 1]]
            yield float(scores[slot] + likely[slot]), self.texts[passage][a:b].strip()

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Score the best span of all passages by SQuAD's rules, from 0 to 1.

        @K: of the K passages with the highest scores. outputs: per row,
        "passage_scores" f32 [k], "start_logits", "end_logits" f32 [k, L].
        """
        chosen: dict[int, dict[str, str]] = {k: {} for k in (*DEPTHS, 0)}
        golds = {str(i): self.golds[i] for i in example.tolist()}
        for row, i in enumerate(example.tolist()):
            found = [*self.best(outputs, row, i)]
            prior = np.asarray(outputs["passage_scores"][row])[: len(found)]
            order = np.argsort(-prior, kind="stable").tolist()
            for k, answers in chosen.items():
                some = [found[slot] for slot in order[: k or None]]
                answers[str(i)] = max(some, key=lambda x: x[0])[1] if some else ""
        scores: dict[str, float] = {}
        for k, answers in chosen.items():
            own = open_scores(answers, golds) if golds else {}
            for name in ("exact", "f1"):
                scores[f"{name}@{k}" if k else name] = own.get(name, math.nan)
        return {name: scores[name] for name in self.form.metrics}

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"id", "answer", "score", "passages"}: score is ln p of the answer and
        its passage, None without one; passages, best answer first, have id, title,
        text, the retriever's score, ln p of the passage as "log_prob", and an answer
        with its score."""
        for i in range(self.n):
            found = [*self.best(outputs, i, i)]
            prior = np.asarray(outputs["passage_scores"][i], np.float64)
            order = sorted(range(len(found)), key=lambda slot: -found[slot][0])
            shown = [
                {
                    **self.answered[i][slot],
                    "log_prob": float(prior[slot]),
                    "answer": found[slot][1],
                    "answer_score": found[slot][0],
                }
                for slot in order
            ]
            score, answer = found[order[0]] if order else (NEG_INF, "")
            best = {"answer": answer, "score": None if score == NEG_INF else score}
            yield {"id": self.names[i], **best, "passages": shown}


STARTS_ENDS = "start", "end"


def make_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> ReadingRows:
    """Encode questions and passages, and find the answers in the passages.

    Raises UserError, naming the place, for invalid cells, for passages that are not in
    the index (task.index), and if no passage contains an answer.
    """
    asking, listed = form.columns[:2]
    index = PassageIndex(form.index, "task.index") if form.index else None
    texts: dict[str, int] = {}
    names, scores, golds, shown = [], [], [], []
    members: list[list[int]] = []
    of_index: dict[int, int] = {}
    for i, row in enumerate(read):
        names.append(id_of(row.cells, i))
        golds.append(answers_of(row, form.label) if labelled else [])
        own = passages_of(row, listed)
        shown.append(own)
        members.append([])
        for cells in own:
            text = Passage("", cells["title"], cells["text"]).whole
            number = texts.setdefault(text, len(texts))
            members[-1].append(number)
            if index is not None:
                of_index[number] = index.row_of(cells, row.place)
        scores.append([cells["score"] for cells in own])
    asked = tokenizer.encode_batch([text_rows.text_of(row, asking) for row in read])
    passages, chars = text_rows.encode_with_chars(tokenizer, [*texts])
    width = max(map(len, members), default=0)
    if not width:
        raise UserError(f"{read[0].place}: no question has a passage ({listed})")
    whole, spans = [*texts], {}
    for i, (numbers, answers) in enumerate(zip(members, golds, strict=True)):
        for slot, p in enumerate(numbers):
            of_text = chars[passages.offsets[p] : passages.offsets[p + 1]]
            if answers and (places := find_answers(whole[p], answers, of_text)):
                spans[i, slot] = places
    if labelled and not spans:
        raise UserError(
            f"{read[0].place}: no passage of any question holds one of its {form.label}"
        )
    questions = Ragged.of(asked)
    more: dict[str, Any] = {}
    if index is not None:
        rows = [of_index[p] for p in range(len(whole))]
        more = {"vectors": index.vectors, "index_digest": index.digest}
        more["rows_of_index"] = np.array(rows, np.int64)
    return ReadingRows(
        form,
        questions.counts(tokenizer) + passages.counts(tokenizer),
        names,
        questions,
        passages,
        chars,
        whole,
        fill_lists(members, width, -1).astype(np.int64),
        fill_lists(scores, width, 0.0).astype(np.float32),
        spans,
        golds if labelled else (),
        form.passages if labelled else min(form.candidates, width),
        answered=shown if not labelled else (),
        **more,
    )


def _check(config: ConfigDict) -> None:
    check_pooling(config)
    if not config.task.text_pair:
        raise UserError("task.text_pair is empty: name the column of the passages")
    if config.task.index:
        check_vectors(config)


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    out = {"choices": 1 + task.passages, "temperature": task.temperature}
    if task.index:
        out |= {"trained": 1, **pooling_options(task)}
    return out


COLUMNS = {"text": "question", "text_pair": "ctxs", "label": "answers"}
TASK_TYPE = TaskType(
    read=read_found,
    parse=parse_found,
    make_rows=make_rows,
    file_names=WANTED,
    metrics=METRICS,
    default_metrics=("exact", "f1", "exact@1", "exact@5"),
    outputs=("passage_scores", "start_logits", "end_logits"),
    columns=COLUMNS,
    unused={"labels": "", "choices": ""},
    settings=(
        *("index", "passages", "candidates", "question_length", "answer_length"),
        *("temperature", "pooling", "normalize"),
    ),
    needs=dict.fromkeys(("pooling", "normalize"), "index"),
    check=_check,
    head_options=_head_options,
    several_sequences=True,
    facts=index_facts,
)

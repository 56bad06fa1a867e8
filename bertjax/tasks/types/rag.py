# SPDX-License-Identifier: Apache-2.0
"""Rows of questions with passages and a text to write (RAG).

JSON lines as objective=read has them (types/read.py): `question`, `answers`, of which
an epoch learns one, and `ctxs`. A question makes with each passage a row as
objective=seq2seq has it (types/seq2seq.py) of two texts and a target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.tasks import tables
from bertjax.tasks.open_questions import answers_of, passages_of
from bertjax.tasks.passage_index import Passage
from bertjax.tasks.squad_metrics import squad_scores
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Rows
from bertjax.tasks.task_type import TaskType
from bertjax.tasks.types import read as reading
from bertjax.tasks.types import seq2seq
from bertjax.tasks.types.seq2seq import Sequences

METRICS = "perplexity", "exact", "f1"
OF_ALL = ("lm_ids", "lm_weights")  # the same for all passages of a question
COLUMN = "passage"  # of the rows that are made up of a question's passages


@dataclass(frozen=True, eq=False)
class AugmentedRows(Rows):
    """Questions with k passages each.

    inner: of each question k rows, one after the other; passage_scores f32 [n, k];
    is_passage bool [n, k]. answered: the passages, where rows are to be answered.
    """

    inner: Sequences
    passage_scores: np.ndarray
    is_passage: np.ndarray
    answered: Sequence[Sequence[Mapping[str, Any]]] = field(default=(), repr=False)

    @property
    def writes(self) -> bool:
        return self.inner.targets is None or {*self.form.metrics} != {"perplexity"}

    @property
    def k(self) -> int:
        return self.is_passage.shape[1]

    @property
    def shortest(self) -> int:
        return self.inner.shortest

    def arrays(self) -> list[np.ndarray | None]:
        return [*self.inner.arrays(), self.passage_scores, self.is_passage]

    def plan(self, length: int) -> Self:
        return replace(super().plan(length), inner=self.inner.plan(length))

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        kept, cut = (x.reshape(-1, self.k) for x in self.inner.sizes)
        return kept.max(axis=1), cut.sum(axis=1)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: [b, k, ...] of what `Sequences.gather` makes, but lm_ids i32 and
        lm_weights f32 [b, T]; passage_scores, passage_weights f32 [b, k]."""
        k = self.k
        inner = replace(self.inner, length=self.length)
        each = (example[:, None] * k + np.arange(k)).ravel()
        own = None if keys is None else np.repeat(keys, k)
        laid = inner.gather(each, own, specials)
        batch = {
            name: values[::k] if name in OF_ALL else _parted(values, k)
            for name, values in laid.items()
            if name != "text_tokens"
        }
        batch["passage_scores"] = self.passage_scores[example]
        return batch | {"passage_weights": self.is_passage[example].astype(np.float32)}

    def tell(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the first passage's row, and the target."""
        one = {x: v if x in OF_ALL else v[0] for x, v in row.items()}
        return self.inner.tell(one, example * self.k, tokenizer)

    def label_counts(self) -> dict[str, dict[str, float]]:
        return self.inner.label_counts()

    def notes(self) -> Iterator[str]:
        yield f"{counted(self.n, 'question')}, each with {counted(self.k, 'passage')}"
        yield from self.inner.notes()

    def for_scores(self) -> "AugmentedRows":
        return replace(self, inner=self.inner.for_scores())

    def texts_of(self, outputs: Outputs) -> list[str]:
        """Return what was written for each row."""
        decode = self.inner.tokenizer.decode
        return [decode(ids) for ids in self.inner.written(outputs)]

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Score targets, by "nats" f32 [n], and what was written by SQuAD's rules."""
        inner, more = self.inner, self.form.targets.width - self.form.targets.length
        first = inner.first[example * self.k]
        tokens = float((inner.target_sizes[first] + more).sum())
        nats = float(np.asarray(outputs["nats"], np.float64).sum())
        found = {"perplexity": seq2seq.exp(nats / tokens)}
        if self.writes:
            golds = {str(i): inner.references[i * self.k] for i in example.tolist()}
            texts = dict(zip(golds, self.texts_of(outputs), strict=True))
            found |= {k: v / 100 for k, v in squad_scores(texts, golds).items()}
        return {name: found[name] for name in self.form.metrics}

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"text", "score", "passages"}: what was written, the sum of ln p of its
        tokens, and the passages as they were found."""
        scores = np.asarray(outputs["generated_scores"], np.float64).tolist()
        each = zip(self.texts_of(outputs), scores, self.answered, strict=True)
        for text, score, passages in each:
            yield {"text": text, "score": score, "passages": [*passages]}


def _parted(values: np.ndarray, k: int) -> np.ndarray:
    """[b k, ...] -> [b, k, ...]."""
    return values.reshape(-1, k, *values.shape[1:])


def make_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> AugmentedRows:
    """Encode questions with passages and, where they are labelled, answers.

    Raises UserError, naming the place, for cells of another form.
    """
    asking, listed = form.columns[:2]
    found = [passages_of(row, listed) for row in read]
    k = form.passages
    if not labelled:
        k = min(k, max(map(len, found), default=0))
    if not k or not any(found):
        raise UserError(f"{read[0].place}: no question has a passage ({listed})")
    rows, scores = [], np.zeros((len(read), k), np.float32)
    is_passage = np.zeros((len(read), k), bool)
    for i, (row, passages) in enumerate(zip(read, found, strict=True)):
        cells = {asking: row.cells[asking]}
        if labelled:
            cells[form.label] = answers_of(row, form.label)
        for slot in range(k):
            text = "-"  # of a passage that is not there, which has no weight
            if slot < len(passages):
                one = passages[slot]
                text = Passage("", one["title"], one["text"]).whole
                scores[i, slot], is_passage[i, slot] = one["score"], True
            rows.append(Row({**cells, COLUMN: text}, row.place))
    own = form._replace(columns=(asking, COLUMN), metrics=("perplexity",))
    inner = seq2seq.make_sequences(rows, own, tokenizer, labelled, say)
    answered = [passages[:k] for passages in found]
    more = () if labelled else answered
    return AugmentedRows(form, inner.counts, inner, scores, is_passage, more)


def _check(config: ConfigDict) -> None:
    marginals = dict.fromkeys(("sequence", "token"))
    registry.pick("task.marginal", config.task.marginal, marginals)
    if not config.task.text_pair:
        raise UserError("task.text_pair is empty: name the column of the passages")


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    names = "target_length", "passages", "marginal", "temperature"
    return {name: task[name] for name in names}


TASK_TYPE = TaskType(
    read=tables.read_rows,
    make_rows=make_rows,
    file_names=reading.WANTED,
    metrics=METRICS,
    default_metrics=METRICS,
    outputs=("nats",),
    label_key="target",
    columns={"text": "question", "text_pair": "ctxs", "target": "answers"},
    unused={"label": "", "labels": "", "choices": ""},
    settings=(
        *("target", "target_length", "num_beams", "length_penalty"),
        *("passages", "marginal", "temperature"),
    ),
    check=_check,
    head_options=_head_options,
    generates=True,
)

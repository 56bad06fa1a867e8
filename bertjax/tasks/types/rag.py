# SPDX-License-Identifier: Apache-2.0
"""Rows of questions with passages and a text to write (RAG).

JSON lines as objective=read has them (types/read.py): `question`, `answers`, of which
an epoch learns one, and `ctxs`. A question makes with each passage a row as
objective=seq2seq has it (types/seq2seq.py) of two texts and a target. With task.index
rows have no passages: a step finds them itself, in tables that are made of the index.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.tasks import tables, text_rows
from bertjax.tasks.open_questions import answers_of, passages_of
from bertjax.tasks.passage_index import Passage, PassageIndex, check_vectors
from bertjax.tasks.retrieval_options import hidden_size
from bertjax.tasks.squad_metrics import squad_scores
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged, Rows
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


class TableSizes(NamedTuple):
    """What a step has to know of the tables that it searches: how many passages there
    are, the numbers of their vectors, and the tokens of the longest."""

    passages: int
    width: int
    length: int


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchingRows(AugmentedRows):
    """Questions whose passages a step finds (objectives/find_passages.py).

    inner: of each question a row. found: the passages of the index, and texts, what
    they hold, as ids; vectors: f32 [N, D], in a file; digest: of the index.
    """

    found: Sequence[Passage]
    texts: Ragged
    vectors: np.ndarray
    digest: str

    has_tables = True

    @property
    def shortest(self) -> int:
        return self.before + 1 + self.after

    def arrays(self) -> list[np.ndarray | None]:
        digest = np.frombuffer(self.digest.encode(), np.uint8)
        return [*self.inner.arrays(), digest]

    def plan(self, length: int) -> Self:
        return Rows.plan(self, length)  # inner is laid out by `gather` alone

    @property
    def before(self) -> int:
        """Slots of a row before its passage: of the question, and what parts them."""
        bare = self.form.targets.bare
        return self.form.limits.question_length + 1 - bare + self.form.separators

    @property
    def after(self) -> int:
        """Slots behind a passage: [SEP], and where it stands in the row the target."""
        labelled = self.inner.targets is not None
        return 1 + self.inner.reserved * labelled

    @cached_property
    def candidates(self) -> TableSizes:
        room = self.length - self.before - self.after
        longest = int(self.texts.lengths.max(initial=1))
        return TableSizes(*self.vectors.shape, max(1, min(room, longest)))

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """The tables: of vectors, and of tokens i32 [N, P], -1 behind their ends."""
        tokens = np.full((len(self.found), self.candidates.length), -1, np.int32)
        for row, own in enumerate(tokens):
            text = self.texts[row][: len(own)]
            own[: len(text)] = text
        return {"index": self.vectors, "passages": tokens}

    @cached_property
    def questions(self) -> Ragged:
        return self.inner.texts[0]

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Every row is as long as it may become."""
        size = self.before + self.candidates.length + self.after
        lengths = self.questions.lengths
        cut = lengths - np.minimum(lengths, self.form.limits.question_length)
        return np.full(len(lengths), min(size, self.length)), cut

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make what `find_passages.find` takes of some questions.

        Question 7, target 5 ([CLS] 1, [SEP] 2), in rows that have targets:

            question_ids  1 7 2    input_ids  1 7 2    end_ids  2 5 2    lm_ids  5 2
        """
        inner, bare = self.inner, self.form.targets.bare
        most = self.form.limits.question_length
        asked = [self.questions[i][:most] for i in example]
        sep, size = specials.sep_id, most + 2
        laid = text_rows.lay_out([[ids] for ids in asked], size, 1, specials)
        start = () if bare else (specials.cls_id,)
        ends = (sep,) * self.form.separators
        begin = [(*start, *ids, *ends) for ids in asked]
        ids, real = seq2seq.filled(begin, self.before, specials)
        batch = {"input_ids": ids, "attention_mask": real}
        batch |= {f"question_{n}": laid[x] for n, x in QUESTION.items()}
        targets: list[Any] | None = None
        if inner.targets is not None:
            longest = self.form.targets.length
            targets = [inner.targets[i][:longest] for i in inner.chosen(example, keys)]
        after: list[tuple[int, ...]] = [(sep,) for _ in example]
        if not inner.in_row:
            batch |= inner.decoder_side(batch, targets, specials)
        elif targets is not None:
            after = [(sep, *target, sep) for target in targets]
            width = self.form.targets.width
            ids, real = seq2seq.filled([x[1:] for x in after], width, specials)
            batch |= {"lm_ids": ids * real, "lm_weights": real.astype(np.float32)}
        ids, real = seq2seq.filled(after, self.after, specials)
        tokens = batch["attention_mask"].sum(axis=1)
        if targets is not None:
            tokens = tokens + batch["lm_weights"].sum(axis=1)
        batch["text_tokens"] = tokens.astype(np.int32)
        return batch | {"end_ids": ids, "end_mask": real}

    def tell(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the question, and the target."""
        own = {x: row[f"question_{n}"] for n, x in QUESTION.items()}
        yield from Rows.tell(self, own, example, tokenizer)
        if self.inner.targets is not None:
            yield "target", self.inner.references[example][0]

    def notes(self) -> Iterator[str]:
        yield (
            f"{counted(self.n, 'question')}, each with {self.form.passages} of "
            f"{counted(len(self.found), 'passage')} of {self.candidates.length} tokens "
            "at most, found in each step"
        )
        if cut := int(np.sum(self.texts.lengths > self.candidates.length)):
            yield (
                f"{cut:,} of {counted(len(self.found), 'passage')} are cut: "
                f"data.length={self.length} less {self.before} for the question and "
                f"{self.after} for the target"
            )

    def for_scores(self) -> "SearchingRows":
        return replace(self, inner=self.inner.for_scores())

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"text", "score", "passages"}, as rows with passages have them."""
        scores = np.asarray(outputs["generated_scores"], np.float64).tolist()
        places = zip(outputs["passage_numbers"], outputs["passage_scores"], strict=True)
        for text, score, (numbers, own) in zip(
            self.texts_of(outputs), scores, places, strict=True
        ):
            known = [
                {**self.found[i]._asdict(), "score": round(float(x), 6)}
                for i, x in zip(numbers.tolist(), own, strict=True)
                if i < len(self.found)
            ]
            yield {"text": text, "score": score, "passages": known}


QUESTION = {"ids": "input_ids", "mask": "attention_mask"}


def _parted(values: np.ndarray, k: int) -> np.ndarray:
    """[b k, ...] -> [b, k, ...]."""
    return values.reshape(-1, k, *values.shape[1:])


def make_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> AugmentedRows:
    """Encode questions with passages and, where they are labelled, answers.

    Raises UserError, naming the place, for cells of another form.
    """
    if form.index:
        return make_searching_rows(read, form, tokenizer, labelled, say)
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


def make_searching_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say
) -> SearchingRows:
    """Encode questions, answers, and the passages of the index. Raises UserError."""
    asking = form.columns[0]
    index = PassageIndex(form.index, "task.index")
    if form.passages > len(index.passages):
        raise UserError(
            f"task.passages={form.passages} is more than task.index={form.index} has: "
            f"{len(index.passages)}"
        )
    rows = [
        Row({asking: r.cells[asking]} | _answers(r, form, labelled), r.place)
        for r in read
    ]
    own = form._replace(columns=(asking,), metrics=("perplexity",))
    inner = seq2seq.make_sequences(rows, own, tokenizer, labelled, say)
    texts = Ragged.of(tokenizer.encode_batch([p.whole for p in index.passages]))
    none = np.zeros((len(read), 1), np.float32)
    return SearchingRows(
        form,
        inner.counts + texts.counts(tokenizer),
        inner,
        none,
        none > 0,
        found=index.passages,
        texts=texts,
        vectors=index.vectors,
        digest=index.digest,
    )


def _answers(row: Row, form: Form, labelled: bool) -> dict[str, Any]:
    return {form.label: answers_of(row, form.label)} if labelled else {}


def _check(config: ConfigDict) -> None:
    task = config.task
    marginals = dict.fromkeys(("sequence", "token"))
    registry.pick("task.marginal", task.marginal, marginals)
    if task.index:
        reading.check_pooling(config)
        how = hidden_size(config), task.pooling, task.normalize
        check_vectors(task.index, "task.index", *how)
        if task.text_pair:
            raise UserError(
                f"task.text_pair={task.text_pair} names passages of rows, and "
                "task.index has those that are found: leave one of the two out"
            )
    elif not task.text_pair:
        raise UserError("task.text_pair is empty: name the column of the passages")


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    names = "target_length", "passages", "marginal", "temperature"
    own = {name: task[name] for name in names}
    if task.index:
        own |= {"cls": int(task.pooling == "cls"), "normalize": int(task.normalize)}
    return own


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
        *("index", "question_length", "pooling", "normalize"),
    ),
    instead={"text_pair": "index"},
    check=_check,
    head_options=_head_options,
    generates=True,
    facts=reading.index_facts,
)

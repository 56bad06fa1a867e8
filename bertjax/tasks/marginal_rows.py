# SPDX-License-Identifier: Apache-2.0
"""Rows of questions, for texts generated from passages (types/rag.py).

Either each question has its passages (AugmentedRows), or a step finds them in tables
made from an index (SearchingRows).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from bertjax import counted
from bertjax.tasks import text_rows
from bertjax.tasks.passage_index import Passage
from bertjax.tasks.squad_metrics import open_scores
from bertjax.tasks.tables import Row
from bertjax.tasks.task_rows import Batch, Lines, Outputs, Ragged, Rows
from bertjax.tasks.types import seq2seq
from bertjax.tasks.types.seq2seq import Sequences

OF_ALL = ("lm_ids", "lm_weights")  # the same for all passages of a question
QUESTION = {"ids": "input_ids", "mask": "attention_mask"}


@dataclass(frozen=True, eq=False)
class MarginalRows(Rows):
    """Questions with a target that is generated from several passages.

    inner: `k` consecutive rows per question.
    """

    inner: Sequences

    @property
    def k(self) -> int:
        return 1

    @property
    def writes(self) -> bool:
        return self.inner.targets is None or {*self.form.metrics} != {"perplexity"}

    def label_counts(self) -> dict[str, dict[str, float]]:
        return self.inner.label_counts()

    def for_scores(self) -> Self:
        return replace(self, inner=self.inner.for_scores())

    def texts_of(self, outputs: Outputs) -> list[str]:
        """Return the generated text of each row."""
        decode = self.inner.tokenizer.decode
        return [decode(ids) for ids in self.inner.written(outputs)]

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute perplexity from "nats" f32 [n], and SQuAD's scores of the texts."""
        inner, more = self.inner, self.form.targets.width - self.form.targets.length
        first = inner.first[example * self.k]
        tokens = float((inner.target_sizes[first] + more).sum())
        nats = float(np.asarray(outputs["nats"], np.float64).sum())
        found = {"perplexity": seq2seq.exp(nats / tokens)}
        if self.writes:
            golds = {str(i): inner.references[i * self.k] for i in example.tolist()}
            texts = dict(zip(golds, self.texts_of(outputs), strict=True))
            found |= open_scores(texts, golds)
        return {name: found[name] for name in self.form.metrics}

    def passages_of(self, outputs: Outputs) -> Iterable[Sequence[Mapping[str, Any]]]:
        """Return the retrieved passages of each row."""
        raise NotImplementedError

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"text", "score", "passages"}: the generated text, the sum of ln p of
        its tokens, and the retrieved passages."""
        scores = np.asarray(outputs["generated_scores"], np.float64).tolist()
        each = self.texts_of(outputs), scores, self.passages_of(outputs)
        for text, score, passages in zip(*each, strict=True):
            yield {"text": text, "score": score, "passages": [*passages]}


@dataclass(frozen=True, eq=False)
class AugmentedRows(MarginalRows):
    """Questions with k passages each.

    passage_scores f32 [n, k]; is_passage bool [n, k]. answered: the passages of rows to
    answer; otherwise ().
    """

    passage_scores: np.ndarray
    is_passage: np.ndarray
    answered: Sequence[Sequence[Mapping[str, Any]]] = field(default=(), repr=False)

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
        """Make rows: the arrays of `Sequences.gather` as [b, k, ...], except lm_ids i32
        and lm_weights f32 [b, T]; passage_scores, passage_weights f32 [b, k]."""
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

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the row of the first passage, and the target."""
        one = {x: v if x in OF_ALL else v[0] for x, v in row.items()}
        return self.inner.describe(one, example * self.k, tokenizer)

    def notes(self) -> Iterator[str]:
        yield f"{counted(self.n, 'question')}, each with {counted(self.k, 'passage')}"
        yield from self.inner.notes()

    def passages_of(self, outputs: Outputs) -> Sequence[Sequence[Mapping[str, Any]]]:
        return self.answered


class TableSizes(NamedTuple):
    """The sizes of the tables that a step searches: the number of passages, the width
    of their vectors, and the most tokens of a passage."""

    passages: int
    width: int
    length: int


@dataclass(frozen=True, eq=False)
class SearchingRows(MarginalRows):
    """Questions, without their passages, which a step finds
    (objectives/find_passages.py).

    found: the passages of the index; texts: their token ids; vectors: f32 [N, D], in a
    file; digest: the index's.
    """

    found: Sequence[Passage]
    texts: Ragged
    vectors: np.ndarray
    digest: str

    has_tables = True

    @property
    def shortest(self) -> int:
        return self.before + 1 + self.set_aside

    def arrays(self) -> list[np.ndarray | None]:
        digest = np.frombuffer(self.digest.encode(), np.uint8)
        return [*self.inner.arrays(), digest]

    @property
    def before(self) -> int:
        """Slots of a row before the passage: for the question and separators."""
        bare = self.form.targets.bare
        return self.form.limits.question_length + 1 - bare + self.form.separators

    @property
    def set_aside(self) -> int:
        """Slots that a passage leaves free: for [SEP], and for a target in the same
        row, whether given or yet to be generated."""
        return 1 + self.inner.reserved

    @property
    def after(self) -> int:
        """Slots of a row after the passage."""
        return self.set_aside if self.inner.targets is not None else 1

    @cached_property
    def candidates(self) -> TableSizes:
        room = self.length - self.before - self.set_aside
        longest = int(self.texts.lengths.max(initial=1))
        return TableSizes(*self.vectors.shape, max(1, min(room, longest)))

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """The tables of vectors, and of tokens i32 [N, P], padded with -1."""
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
        """All rows have the same length: the longest that they may become."""
        size = self.before + self.candidates.length + self.after
        lengths = self.questions.lengths
        cut = lengths - np.minimum(lengths, self.form.limits.question_length)
        return np.full(len(lengths), min(size, self.length)), cut

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make the batch of some questions for `find_passages.find`.

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

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the question and the target."""
        own = {x: row[f"question_{n}"] for n, x in QUESTION.items()}
        yield from super().describe(own, example, tokenizer)
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
                f"{self.set_aside} for the target"
            )

    def passages_of(self, outputs: Outputs) -> Iterator[Sequence[Mapping[str, Any]]]:
        places = zip(outputs["passage_numbers"], outputs["passage_scores"], strict=True)
        for numbers, scores in places:
            yield [
                {**self.found[i]._asdict(), "score": round(float(x), 6)}
                for i, x in zip(numbers.tolist(), scores, strict=True)
                if i < len(self.found)
            ]


def _parted(values: np.ndarray, k: int) -> np.ndarray:
    """Reshape [b k, ...] to [b, k, ...]."""
    return values.reshape(-1, k, *values.shape[1:])

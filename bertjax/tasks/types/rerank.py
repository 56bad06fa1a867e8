# SPDX-License-Identifier: Apache-2.0
"""Rows of a query with several passages, each read together with the query.

A training row has one sequence [CLS] query [SEP] passage [SEP] per passage: first a
passage that answers the query, then hard negatives, drawn anew in every epoch, then
random passages of the collection that do not answer it. Evaluations score single pairs:
for each query the passages that answer it, its hard negatives, and random others up to
task.candidates in all, which are always the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.rendering import decode
from bertjax.tasks import passages, search_measures, tables, text_rows
from bertjax.tasks import retrieval_options as options
from bertjax.tasks.collection_rows import CollectionRows
from bertjax.tasks.passages import Collection
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Rows
from bertjax.tasks.task_type import TaskType
from bertjax.tasks.types import retrieve
from bertjax.tasks.types.retrieve import Pairs, round_up


def read_together(
    rows: CollectionRows, query: np.ndarray, passage: np.ndarray, specials: Any
) -> Batch:
    """Make the sequences of pairs; query, passage: i64 [n], numbers of `rows.texts`.

    A passage is -1 for none.
    """
    pairs = []
    for q, p in zip(query.tolist(), np.maximum(passage, 0).tolist(), strict=True):
        first, second = rows.texts[q], rows.texts[p]
        full = np.array([[len(first), len(second)]])
        room = rows.length - 2 - rows.form.separators
        ((a, b),) = text_rows.kept_of(full, room)
        pairs.append((first[:a], second[:b]))
    return text_rows.lay_out(pairs, rows.length, rows.form.separators, specials)


class _Together(CollectionRows):
    """The base of rows of pairs; pairs i64 [n, 2]: query and passage in `texts`."""

    pairs: Any

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        specials = 2 + self.form.separators
        full = self.texts.lengths[self.pairs].sum(axis=1) + specials
        kept = np.minimum(full, self.length)
        return kept, full - kept

    def plan(self, length: int) -> Self:
        laid = Rows.plan(self, length)
        longest = self.texts.lengths[: self.queries].max() + 2 + self.form.separators
        longest += self.texts.lengths[self.queries :].max()
        return replace(laid, length=min(length, round_up(longest)))

    def notes(self) -> Iterator[str]:
        yield from Rows.notes(self)


@dataclass(frozen=True, eq=False)
class Listed(_Together, Pairs):
    """One row per query and passage that answers it, with negatives."""

    @property
    def choices(self) -> int:  # type: ignore[override]
        """Sequences of a row."""
        return 1 + self.form.drawn

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids i32 [b, C, L];
        choice_weights f32 [b, C], 1 where there is a passage; labels i32 [b], zeros."""
        members = self.members(example, keys)
        missing = 1 + self.choices - members.shape[1]
        fill = np.full((len(members), missing), -1)
        members = np.concatenate([members, fill], axis=1)
        query, most = members[:, 0], np.full(len(members), len(self.identity))
        for slot in range(2, members.shape[1]):
            draw = counter_rng.fold(keys, "passage", slot)
            other = self.queries + counter_rng.below(draw, 0, most)
            for found in (members[:, slot], other):  # a hard negative may be a copy
                number = np.maximum(found - self.queries, 0)
                found[self.is_relevant(query, number)] = -1
            empty = members[:, slot] < 0
            members[empty, slot] = other[empty]
        query, passage = np.repeat(query, self.choices), members[:, 1:].ravel()
        flat = read_together(self, query, passage, specials)
        shape = len(members), self.choices
        batch = {name: x.reshape(*shape, -1) for name, x in flat.items()}
        batch["choice_weights"] = (passage >= 0).astype(np.float32).reshape(shape)
        return batch | {"labels": np.zeros(len(members), np.int32)}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the sequence of each passage; the first one answers the query."""
        for k in np.flatnonzero(row["choice_weights"]).tolist():
            real = row["attention_mask"][k] > 0
            name = "negative" if k else "answer"
            yield name, decode(tokenizer, row["input_ids"][k][real])

    def for_scores(self) -> Rows:
        return Candidates(self.form, self.counts, self.texts, self.grades, self.own)


@dataclass(frozen=True, eq=False)
class Candidates(_Together, CollectionRows):
    """One row per query and candidate passage."""

    @cached_property
    def pairs(self) -> np.ndarray:
        """i64 [n, 2]: query and passage in `texts`, in the order of the queries.

        Copies of passages that answer the query are not drawn.
        """
        out, most = [], self.form.candidates
        count = len(self.texts.lengths) - self.queries
        for query, grades in enumerate(self.grades):
            found = dict.fromkeys(grades)
            start = counter_rng.fold(0, "candidates", query)
            for slot in range(4 * most):
                if len(found) >= most:
                    break
                other = int(counter_rng.below(start, slot, count))
                if not self.is_relevant(query, other):
                    found.setdefault(other)
            found.pop(int(self.own[query]), None)
            out += [(query, self.queries + passage) for passage in found]
        return np.array(out, np.int64)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows of one sequence each: input_ids and the like, i32 [b, L]."""
        query, passage = self.pairs[example].T
        return read_together(self, query, passage, specials)

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        real = row["attention_mask"] > 0
        yield "query and passage", decode(tokenizer, row["input_ids"][real])

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Rank the candidates of each query by "scores" f32 [n]; return the metrics."""
        if len(example) < self.n:
            raise ValueError(f"{len(example)} of {self.n} rows: all are scored")
        scores = np.asarray(outputs["scores"], np.float64).reshape(-1)
        query, passage = self.pairs.T
        order = np.lexsort((passage, -scores, query))
        ends = np.searchsorted(query[order], np.arange(1, self.queries))
        found = np.split(passage[order] - self.queries, ends)
        measured = search_measures.measure(found, self.grades, self.form.metrics)
        return {name: float(values.mean()) for name, values in measured.items()}


def read_examples(value: str, key: str, columns: tables.Columns, say: Any) -> Any:
    """Read collections, or, if columns lack the negatives, pairs of texts to score."""
    labelled = len(columns) == len(passages.COLUMNS)
    read = passages.read_collections if labelled else tables.read_rows
    return read(value, key, columns, say)


def make_rows(
    read: Sequence[Any], form: Form, tokenizer: Any, labelled: bool, *say: Any
) -> Rows:
    """Encode a collection, or, without labels, pairs of texts to score."""
    if not labelled and not (read and isinstance(read[0], Collection)):
        return text_rows.make_texts(read, form, tokenizer, False, *say)
    rows = retrieve.make_pairs(read, form, tokenizer, rows=Listed)
    if len(np.unique(rows.identity)) == 1:
        raise UserError(
            "objective=rerank: all passages are the same, and a query needs one that "
            "is wrong too"
        )
    return rows


def _check(config: ConfigDict) -> None:
    options.check_rows(config)
    if not config.task.negatives:
        raise UserError("task.negatives=0: a query needs a passage that is wrong too")


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    return {"choices": 1 + task.negatives}


TASK_TYPE = TaskType(
    read=read_examples,
    make_rows=make_rows,
    locate=passages.locate,
    metrics=(*search_measures.MEASURES,),
    default_metrics=("mrr@10", "ndcg@10", "recall@1"),
    outputs=("scores",),
    columns={k.removeprefix("task."): v for k, v in passages.COLUMNS.items()},
    unused={"labels": "", "choices": ""},
    settings=("negatives", "candidates"),
    check=_check,
    head_options=_head_options,
    several_sequences=True,
    hf_class="ForSequenceClassification",
    exported=("text", "text_pair"),
)

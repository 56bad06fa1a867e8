# SPDX-License-Identifier: Apache-2.0
"""Rows of queries with their passages, for training; rows of texts, for search.

A training row is packed (its sequences do not see each other): [CLS] query [SEP] [CLS]
passage that answers it [SEP], and hard negatives, if there are any, drawn anew in every
epoch (Karpukhin et al. 2020, section 3.2, with one). So one pass of the encoder makes
all vectors, and texts are not padded to the longest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import counted
from bertjax.data import counter_rng
from bertjax.tasks import passages, search, search_measures
from bertjax.tasks import retrieval_options as options
from bertjax.tasks.collection_rows import CollectionRows
from bertjax.tasks.passages import Collection
from bertjax.tasks.task_rows import Batch, Form, Outputs, Ragged, Rows
from bertjax.tasks.task_type import TaskType

TOGETHER = 4  # the most texts, and so vectors, of a row for search
STEP = 16  # the length of rows is a multiple of it
MOST = 1024  # the most answers to a query in a batch


@dataclass(frozen=True, eq=False)
class Pairs(CollectionRows):
    """One row per query and passage that answers it; `for_scores` are rows for search.

    searched: the class of rows for search. with_query_positions: whether batches have
    query_positions.
    """

    searched: "type[Searched] | None" = None
    with_query_positions: bool = False

    @cached_property
    def pairs(self) -> np.ndarray:
        """i64 [n, 2]: query, and passage that answers it, in `texts`."""
        return self.answers + np.array([0, self.queries])

    @cached_property
    def negatives(self) -> Ragged:
        """The hard negatives of each query."""
        return Ragged.of([[p for p in of if of[p] <= 0] for of in self.grades])

    def plan(self, length: int) -> Self:
        laid = replace(super().plan(length), longest=length)
        query, passage = self.pairs.T
        given, n = self.negatives, self.queries
        longest = np.zeros(n, np.int64)  # the longest hard negative of each query
        owner = np.repeat(np.arange(n), given.lengths)
        np.maximum.at(longest, owner, laid.kept[n + given.tokens])
        most = np.minimum(given.lengths, self.form.drawn) * longest
        rows = laid.kept[query] + laid.kept[passage] + most[query]
        return replace(laid, length=round_up(rows.max()))

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self.kept[self.pairs].sum(axis=1), self.cut[self.pairs].sum(axis=1)

    @cached_property
    def bounds(self) -> np.ndarray:
        """i64 [queries + 1]: where each query's `relevant_keys` begin, and the end."""
        first = np.arange(self.queries + 1) * len(self.identity)
        return np.searchsorted(self.relevant_keys, first)

    def relevant(self, query: np.ndarray) -> np.ndarray:
        """Return the identities of passages that are not negatives of queries.

        They are i32 [b, R], padded with -1; R: the most of any query, at most MOST.
        """
        sizes, asked = np.diff(self.bounds), self.asked[query]
        column = np.arange(min(MOST, sizes.max()))
        at = self.bounds[asked][:, None] + column
        known = self.relevant_keys
        found = known[np.minimum(at, len(known) - 1)] % len(self.identity)
        is_one = column < sizes[asked][:, None]
        return np.where(is_one, found, -1).astype(np.int32)

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        if many := int((np.diff(self.bounds) > MOST).sum()):
            yield (
                f"{counted(many, 'query', 'queries')} with more than {MOST:,} answers: "
                "a batch knows as many of each, the others may be its negatives"
            )

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows (`pack`), with passage_numbers i32 [b, S - 1], the identities of
        their passages, -1 for none, and relevant_numbers i32 [b, R] (`relevant`).

        If a teacher's scores are known, there are teacher_scores and teacher_weights
        f32 [b, S - 1]; with_query_positions, also query_positions i32 [b, Q].
        """
        members = self.members(example, keys)
        query, passages = members[:, 0], members[:, 1:]
        numbers = self.identity[np.maximum(passages - self.queries, 0)]
        batch = {
            **pack(self.texts, members, self.longest, self.length, specials),
            "passage_numbers": np.where(passages < 0, np.int32(-1), numbers),
            "relevant_numbers": self.relevant(query),
        }
        if any(self.taught):
            found = [
                [self.taught[q].get(p - self.queries, np.nan) for p in of]
                for q, *of in members.tolist()
            ]
            scores = np.array(found, np.float32)
            batch["teacher_weights"] = np.isfinite(scores).astype(np.float32)
            batch["teacher_scores"] = np.nan_to_num(scores)
        if self.with_query_positions:
            words = np.arange(self.kept[: self.queries].max(), dtype=np.int32)
            batch["query_positions"] = np.tile(words, (len(members), 1))
        return batch

    def members(self, example: np.ndarray, keys: Any) -> np.ndarray:
        """Return the texts of rows: i64 [b, S], -1 for none.

        They are a query, a passage that answers it, and consecutive hard negatives,
        from a random one on.
        """
        most = min(self.form.drawn, int(self.negatives.lengths.max(initial=0)))
        members = np.full((len(example), 2 + most), -1, np.int64)
        members[:, :2] = self.pairs[example]
        query = members[:, 0]
        count = self.negatives.lengths[query]
        some = np.flatnonzero(count) if most else []
        if not len(some):
            return members
        draw = counter_rng.fold(keys, "negative")
        drawn = counter_rng.below(draw, 0, np.maximum(count, 1))
        for k in range(most):
            at = self.negatives.offsets[query] + (drawn + k) % np.maximum(count, 1)
            which = some[count[some] > k]
            members[which, 2 + k] = self.queries + self.negatives.tokens[at[which]]
        return members

    def names_of(self, example: int) -> Sequence[str]:
        """Return the kinds of the texts of a row, for `describe`."""
        return "query", "passage", *["negative"] * self.form.drawn

    def for_scores(self) -> Rows:
        parts = self.form, self.counts, self.texts, self.grades, self.own
        return (self.searched or Searched)(*parts, taught=self.taught)


@dataclass(frozen=True, eq=False)
class Searched(CollectionRows):
    """Rows of up to TOGETHER consecutive texts, of all queries and passages.

    starts: i64 [n + 1], the first text of each row, and the end.
    """

    starts: np.ndarray | None = None

    def plan(self, length: int) -> Self:
        laid = replace(super().plan(length), longest=length)
        width = round_up(laid.kept.max())
        starts, used = [], width
        for text, size in enumerate(laid.kept.tolist()):
            if used + size > width or text - starts[-1] == TOGETHER:
                starts.append(text)
                used = 0
            used += size
        starts.append(len(laid.kept))
        return replace(laid, starts=np.array(starts, np.int64), length=width)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        begins = self.starts[:-1]
        return np.add.reduceat(self.kept, begins), np.add.reduceat(self.cut, begins)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows (`pack`)."""
        members = self.members(example)
        return pack(self.texts, members, self.longest, self.length, specials)

    def members(self, example: np.ndarray) -> np.ndarray:
        """Return the texts of rows: i64 [b, TOGETHER], -1 for none."""
        text = self.starts[example][:, None] + np.arange(TOGETHER)
        return np.where(text < self.starts[example + 1][:, None], text, -1)

    def names_of(self, example: int) -> Sequence[str]:
        members = self.members(np.array([example]))[0]
        return ["query" if text < self.queries else "passage" for text in members]

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Search with the vectors of all rows, and return the metrics."""
        if len(example) < self.n:
            raise ValueError(f"{len(example)} of {self.n} rows: all are searched")
        queries, passages = self.vectors(outputs, example).split(self.queries)
        found, _ = passages.search(queries, self.own)
        measured = search_measures.measure(found, self.grades, self.form.metrics)
        return {name: float(values.mean()) for name, values in measured.items()}

    def vectors(self, outputs: Outputs, example: np.ndarray) -> search.Index:
        """Return the vectors of the texts, from "vectors" f32 [n, TOGETHER, D]."""
        is_text = self.members(example) >= 0
        return search.Dense(np.asarray(outputs["vectors"])[is_text])


def round_up(tokens: Any) -> int:
    return -(-int(tokens) // STEP) * STEP


def pack(
    texts: Ragged, members: np.ndarray, longest: int, length: int, specials: Any
) -> Batch:
    """Make packed rows of texts: members i64 [b, S], -1 for none.

    Returns input_ids, attention_mask, token_type_ids, segment_ids (1 + the column in
    `members`; 0: padding), position_ids i32 [b, L], cls_positions i32 [b, S] and
    cls_weights f32 [b, S], 0 for no text. longest: the most tokens of a text.

    Texts 7 8 and 9, length 8 ([CLS] 1, [SEP] 2, padding 0):

        input_ids      1  7  8  2  1  9  2  0
        segment_ids    1  1  1  1  2  2  2  0
        position_ids   0  1  2  3  0  1  2  0
        cls_positions  0           4
    """
    shape = len(members), length
    ids = np.full(shape, specials.pad_id, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    begins = np.zeros(members.shape, np.int32)
    for row, texts_of_row in enumerate(members):
        at = 0
        for slot in np.flatnonzero(texts_of_row >= 0):
            text = texts[texts_of_row[slot]][: longest - 2]
            end = at + len(text) + 1
            ids[row, at], ids[row, end] = specials.cls_id, specials.sep_id
            ids[row, at + 1 : end] = text
            segments[row, at : end + 1] = slot + 1
            positions[row, at : end + 1] = np.arange(end + 1 - at)
            begins[row, slot] = at
            at = end + 1
    return {
        "input_ids": ids,
        "attention_mask": (segments > 0).astype(np.int32),
        "token_type_ids": np.zeros(shape, np.int32),
        "segment_ids": segments,
        "position_ids": positions,
        "cls_positions": begins,
        "cls_weights": (members >= 0).astype(np.float32),
    }


def make_pairs(
    read: Sequence[Collection],
    form: Form,
    tokenizer: Any,
    *_: Any,
    rows: type[Pairs] = Pairs,
    **more: Any,
) -> Pairs:
    """Encode the single collection; rows, more: the class of rows, and its fields."""
    (whole,) = read
    texts = Ragged.encode(tokenizer, [*whole.queries, *whole.passages])
    grades, own = tuple(whole.grades), np.array(whole.own, np.int64)
    taught = tuple(whole.scores)
    return rows(form, texts.counts(tokenizer), texts, grades, own, taught, **more)


def _check(config: ConfigDict) -> None:
    options.check_pooling(config)
    options.check_pairs(config)
    options.check_widths(config)


def _head_options(task: ConfigDict, labels: Sequence[str]) -> dict[str, Any]:
    out = options.head_options(task) | options.pooling_options(task)
    if widths := options.read_widths(task.widths):
        out["widths"] = "/".join(map(str, widths))
    return out


def _facts(config: ConfigDict) -> dict[str, Any]:
    return {"sentences": options.sentence_facts(config.task, config.data.length)}


TASK_TYPE = TaskType(
    read=passages.read_collections,
    make_rows=make_pairs,
    locate=passages.locate,
    metrics=(*search_measures.MEASURES,),
    outputs=("vectors",),
    columns={k.removeprefix("task."): v for k, v in passages.COLUMNS.items()},
    unused={"labels": "", "choices": ""},
    settings=("pooling", "normalize", "temperature", "widths", *options.SHARED),
    check=_check,
    head_options=_head_options,
    facts=_facts,
    makes_vectors=True,
)

# SPDX-License-Identifier: Apache-2.0
"""Rows of edges with a masked relation, in the subgraph around them.

A row is a set of tokens that attend only along edges: [CLS], which sees all tokens and
is seen by all; the two ends of the masked edge and the entities around them; and each
edge as two tokens of its relation, which see each other. The first token and the edge's
head see each other; so do the second token and the tail. Attention thus encodes
direction, and tokens have no positions. The context is drawn from the training edges at
both ends, anew in every epoch.

Other edges between the same two ends, in either direction, could reveal the answer (an
inverse, a synonym): they are hidden too, and counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.data import counter_rng
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.tasks import open_graph
from bertjax.tasks.graphs import HEAD, RELATION, TAIL, Queries
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs
from bertjax.tasks.triple_files import Triple
from bertjax.tasks.triple_rows import TripleRows, triple_type
from bertjax.tasks.types.complete import FIRST, Candidates, make_tokenizer

LONGEST = 256  # the most tokens of a row, whose mask is [L, L]
FRAME = 5  # [CLS], two ends, and the two tokens of the masked edge
NODE, OUT, IN = range(3)  # token_type_ids
FIXED = counter_rng.fold(0, "context")  # the key for rows to score or answer


@dataclass(frozen=True, eq=False)
class Subgraphs(TripleRows):
    """One row per query. learns: whether the context is drawn anew in every epoch."""

    learns: bool = True

    shortest = FRAME
    answered = "relations"

    @property
    def candidates(self) -> Candidates:
        """The tokens of the relations."""
        first = FIRST + len(self.graph.entities)
        return Candidates(first, len(self.graph.relations))

    def arrays(self) -> list[np.ndarray | None]:
        return [*self.queries, self.graph.edges, self.graph.vocabulary]

    def plan(self, length: int) -> Self:
        if length > LONGEST:
            raise UserError(
                f"data.length={length}: rows of subgraphs have {LONGEST} tokens at "
                "most, since who sees whom is a table of all pairs"
            )
        return super().plan(length)

    @cached_property
    def incident(self) -> tuple[np.ndarray, np.ndarray]:
        """The edges at each entity: where each entity's begin, and their numbers.

        They are i64 [entities + 1] and i64 [incidences].
        """
        edges = self.graph.edges
        loops = edges[:, HEAD] == edges[:, TAIL]
        number = np.arange(len(edges))
        ends = np.concatenate([edges[:, HEAD], edges[~loops, TAIL]])
        numbers = np.concatenate([number, number[~loops]])
        order = np.argsort(ends, kind="stable")
        sizes = np.bincount(ends, minlength=len(self.graph.entities))
        return np.concatenate([[0], np.cumsum(sizes)]), numbers[order]

    def around(self, entity: int, other: int) -> np.ndarray:
        """Return the edges at an entity, except those to or from `other`: i64 [n]."""
        starts, numbers = self.incident
        found = numbers[starts[entity] : starts[entity + 1]]
        ends = self.graph.edges[found][:, [HEAD, TAIL]]
        between = (ends == [entity, other]).all(1) | (ends == [other, entity]).all(1)
        return found[~between]

    @cached_property
    def between(self) -> np.ndarray:
        """The number of edges between the ends of each query, in either direction.

        It is i64 [n].
        """
        width = self.graph.width

        def pairs(triples: np.ndarray) -> np.ndarray:
            ends = np.sort(triples[:, [HEAD, TAIL]].astype(np.int64), axis=1)
            return ends[:, 0] * width + ends[:, 1]

        every = np.sort(pairs(self.graph.edges))
        own = pairs(self.queries.triples)
        return np.searchsorted(every, own, "right") - np.searchsorted(every, own)

    @cached_property
    def hidden(self) -> np.ndarray:
        """The number of edges hidden with each query, without its own: i64 [n]."""
        both = np.concatenate([self.graph.edges, self.queries.triples])
        numbers = np.unique(both, axis=0, return_inverse=True)[1].ravel()
        edges, own = np.split(numbers, [len(self.graph.edges)])
        return self.between - np.isin(own, edges)

    @property
    def room(self) -> int:
        """The most edges of a context; each needs two tokens and an entity."""
        return (self.planned - FRAME) // 3

    def context(self, head: int, tail: int, key: np.ndarray) -> np.ndarray:
        """Draw the edges around two ends: i64 [n].

        Each end gets half of the room; the other end may use what it leaves.
        """
        parts = [self.around(head, tail)]
        if head != tail:
            parts.append(self.around(tail, head))
        sizes = [len(part) for part in parts] + [0] * (2 - len(parts))
        first = min(sizes[0], self.room - min(sizes[1], self.room // 2))
        chosen = []
        for part, most in zip(parts, (first, self.room - first), strict=False):
            drawn = np.argsort(counter_rng.bits(key, part), kind="stable")
            chosen.append(part[drawn[:most]])
        return np.concatenate(chosen)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        head, tail = self.queries.triples[:, [HEAD, TAIL]].T
        around_head, around_tail = (
            np.diff(self.incident[0])[end] - self.between for end in (head, tail)
        )
        most = around_head + np.where(head == tail, 0, around_tail)
        kept = np.minimum(most, self.room)
        return FRAME + 3 * kept, np.zeros_like(kept)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids i32 [b, L], 0 for [CLS]
        and entities, 1 and 2 for an edge's two tokens; attention_edges i8 [b, L, L];
        edges_positions i32 [b, 1] of the masked edge's first token. Labeled rows have
        edges_ids i32, the right token, and edges_weights f32 [b, 1]; rows to score have
        known_entities i32 [b, 1, F], the numbers of other right relations, -1 for none.
        """
        # The same query then always has the same context.
        if not (self.learns and self.labelled):
            head, _, tail = self.queries.triples[example].T
            keys = counter_rng.fold(FIXED, head, tail)
        shape = len(example), self.length
        ids = np.full(shape, specials.pad_id, np.int32)
        types = np.zeros(shape, np.int32)
        sees = np.zeros((*shape, self.length), np.int8)
        sizes = np.zeros(len(example), np.int64)
        for row, (i, key) in enumerate(zip(example, keys, strict=True)):
            sizes[row] = self._fill(ids[row], types[row], sees[row], i, key, specials)
        own = np.arange(self.length)
        real = (own < sizes[:, None]).astype(np.int32)
        sees[:, own, own] = 1
        sees[:, :, 0] = 1  # also for padding: every query needs a key
        sees[:, 0] = real
        queries = self.queries.take(example)
        batch = {
            "input_ids": ids,
            "attention_mask": real,
            "token_type_ids": types,
            "attention_edges": sees,
            "edges_positions": np.ones((len(example), 1), np.int32),
        }
        if self.labelled:
            right = self.candidates.first + queries.answers[:, None]
            batch["edges_ids"] = right.astype(np.int32)
            batch["edges_weights"] = np.ones((len(example), 1), np.float32)
        if self.known is not None:
            others = self.known.others(queries, self.known_width)
            batch["known_entities"] = others[:, None]
        return batch

    def _fill(
        self,
        ids: np.ndarray,
        types: np.ndarray,
        sees: np.ndarray,
        query: int,
        key: np.ndarray,
        specials: Any,
    ) -> int:
        """Fill the arrays of a row, and return its number of tokens."""
        head, _, tail = self.queries.triples[query].tolist()
        first_relation, places = self.candidates.first, {}
        ids[0], ids[1:3], types[1:3] = specials.cls_id, specials.mask_id, (OUT, IN)
        size = 3

        def place(entity: int) -> int:
            nonlocal size
            if entity not in places:
                places[entity] = size
                ids[size] = FIRST + entity
                size += 1
            return places[entity]

        def link(out: int, into: int, begin: int, end: int) -> None:
            for a, b in ((out, into), (out, begin), (into, end)):
                sees[a, b] = sees[b, a] = 1

        link(1, 2, place(head), place(tail))
        for edge in self.context(head, tail, key):
            begin, relation, end = self.graph.edges[edge].tolist()
            begin, end = place(begin), place(end)
            ids[size : size + 2] = first_relation + relation
            types[size : size + 2] = OUT, IN
            size += 2
            link(size - 2, size - 1, begin, end)
        return size

    def for_scores(self) -> "Subgraphs":
        """Return the queries with fixed contexts, and with known answers."""
        return replace(self, learns=False, known=self.known_answers())

    def of_queries(self, outputs: Outputs, example: np.ndarray) -> Outputs:
        """Return outputs [n, 1, ...] without the axis of a row's queries."""
        return {name: np.asarray(found)[:, 0] for name, found in outputs.items()}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the query with its right answer, and the edges around it."""
        pieces, ids = tokenizer.pieces, row["input_ids"]
        sees, types = row["attention_edges"], row["token_type_ids"]

        def edge(out: int) -> str:
            ends = []
            for half in (out, out + 1):
                is_end = (sees[half] > 0) & (types == NODE)
                ends.append(pieces[ids[np.flatnonzero(is_end)[1]]])  # [0] is [CLS]
            return f"{ends[0]} {pieces[ids[out]]} {ends[1]}"

        first, *others = map(edge, np.flatnonzero(types == OUT))
        if self.labelled:
            first += f" = {pieces[row['edges_ids'][0]]}"
        yield "edge", first
        yield "around", "; ".join(others)

    def of_columns(self, labelled: bool) -> str:
        return f" of {self.length} tokens, {self.room} edges at most"

    def label_counts(self) -> dict[str, dict[str, float]]:
        parts = {"entities": len(self.graph.entities), "edges": len(self.graph.edges)}
        return {"graph": parts | {"relations": len(self.graph.relations)}}

    def notes(self) -> Iterator[str]:
        rows, most = int((self.hidden > 0).sum()), int(self.hidden.sum())
        if rows:
            yield (
                f"{rows:,} of {self.n:,} edges have others between the same ends, "
                f"inverses for instance: {counted(most, 'is', 'are')} hidden with them"
            )


def make_subgraphs(
    read: Sequence[Triple],
    form: Form,
    tokenizer: Tokenizer,
    labelled: bool,
    say: Say = silent,
) -> Subgraphs:
    """Make a query for the relation of each triple.

    Raises UserError, naming the place, for parts that are not in the graph.
    """
    how = form, labelled, say, "relation"
    form, triples = open_graph.number_triples(read, *how)
    queries = Queries(triples, np.full(len(triples), RELATION))
    edges = form.graph.edges
    relations = FIRST + len(form.graph.entities) + edges[:, RELATION]
    ids = np.concatenate([FIRST + edges[:, [HEAD, TAIL]].ravel(), relations])
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    return Subgraphs(form, counts, queries, labelled)


def check(config: ConfigDict) -> None:
    """Raise UserError for a model without the token types for an edge's direction."""
    open_graph.check(config)
    types = config.model.type_vocab_size
    if types is not None and types <= IN:
        raise UserError(
            f"model.type_vocab_size={types}: rows of edges have {IN + 1} types, of "
            "entities and of either end of an edge"
        )


TASK_TYPE = triple_type(
    make_rows=make_subgraphs,
    check=check,
    make_tokenizer=make_tokenizer,
)

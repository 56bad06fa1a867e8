# SPDX-License-Identifier: Apache-2.0
"""Rows of triples whose head or tail a masked LM spells (MLMLM).

Clouatre et al. 2021 (arXiv 2009.07058). The known parts of a triple are text; the part
that is asked for is a block of masks, as many as the longest entity has pieces. One
pass scores all entities by the likelihoods of their pieces at the masks. A row is

    [CLS] head [SEP] relation [SEP] masks [SEP]     for the tail
    [CLS] masks [SEP] relation [SEP] tail [SEP]     for the head

An entity is its name and, with task.descriptions, the text about it. If a row is too
long, only the given entity is cut, at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from bertjax import UserError, counted, join_names
from bertjax.data.rendering import decode
from bertjax.tasks import graphs, open_graph
from bertjax.tasks.graphs import HEAD, TAIL, Queries
from bertjax.tasks.spelled_entities import Candidates, Spelled, spell
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, min_mean_max
from bertjax.tasks.triple_files import BLANK, Triple
from bertjax.tasks.triple_rows import TripleRows, ask_for_ends, triple_type


@dataclass(frozen=True, eq=False)
class Spellings(TripleRows):
    """One row per query.

    spelled: the pieces of the graph's parts; answers_table: the pieces of possible
    answers, which the head receives too.
    """

    spelled: Spelled
    answers_table: Candidates

    @property
    def candidates(self) -> Candidates:
        """The pieces of the entities that may be answers."""
        return self.answers_table

    def arrays(self) -> list[np.ndarray | None]:
        parts = self.spelled.contexts, self.spelled.relations
        texts = [array for part in parts for array in (part.tokens, part.offsets)]
        own = self.candidates.table, self.candidates.counts
        return [*self.queries, *texts, *own]

    @property
    def specials(self) -> int:
        """The number of special tokens in a row."""
        return 2 + 2 * self.form.separators

    @property
    def shortest(self) -> int:
        longest = int(self.spelled.relations.lengths.max(initial=1))
        return self.specials + self.candidates.longest + longest + 1

    def plan(self, length: int) -> Self:
        if length < self.shortest:
            raise UserError(
                f"data.length={length} is too short: rows need {self.shortest}, of "
                f"which {self.candidates.longest} are masks, as many as the longest "
                "entity has pieces (task.target_length cuts it)"
            )
        return super().plan(length)

    @cached_property
    def given(self) -> np.ndarray:
        """The given entity of each query: i64 [n]."""
        others = TAIL - self.queries.sides
        return self.queries.triples[np.arange(len(others)), others].astype(np.int64)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        relations = self.spelled.relations.lengths[self.queries.triples[:, 1]]
        around = self.specials + self.candidates.longest + relations
        whole = self.spelled.contexts.lengths[self.given]
        kept = np.minimum(whole, self.planned - around)
        return around + kept, whole - kept

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask i32 [b, L]; mlm_positions i32 [b, K] of
        the masks. Labeled rows have right_entities i32 [b], the number of the right
        entity, mlm_ids i32 [b, K], its pieces and padding, and mlm_weights f32 [b, K],
        0 at padding unless task.pads is set. Rows to score have known_entities i32
        [b, F], other right entities, -1 for none.

        Head 7 8, relation 9, tail 6, K = 2 ([CLS] 1, [SEP] 2, mask 4), both queries:

            input_ids      1  7  8  2  9  2  4  4  2    mlm_positions  6  7
                           1  4  4  2  9  2  6  2  0                   1  2
        """
        queries, width = self.queries.take(example), self.candidates.longest
        _, cut = self.sizes
        between = [specials.sep_id] * self.form.separators
        masks = [specials.mask_id] * width
        ids = np.full((len(example), self.length), specials.pad_id, np.int32)
        real = np.zeros(ids.shape, np.int32)
        begins = np.zeros(len(example), np.int64)
        for row, (i, side) in enumerate(zip(example, queries.sides, strict=True)):
            entity = self.spelled.contexts[self.given[i]]
            known = entity[: len(entity) - cut[i]].tolist()
            relation = self.spelled.relations[queries.triples[row, 1]].tolist()
            parts = (masks, known) if side == HEAD else (known, masks)
            first, last = parts
            whole = [specials.cls_id, *first, *between, *relation, *between, *last]
            whole.append(specials.sep_id)
            ids[row, : len(whole)], real[row, : len(whole)] = whole, 1
            begins[row] = 1 if side == HEAD else len(whole) - 1 - width
        positions = (begins[:, None] + np.arange(width)).astype(np.int32)
        batch = {"input_ids": ids, "attention_mask": real, "mlm_positions": positions}
        return batch | (self._answers(queries) if self.labelled else {})

    def _answers(self, queries: Queries) -> Batch:
        """Make the arrays of the right answers."""
        right, table = queries.answers, self.candidates.table
        weights = np.arange(table.shape[1]) < self.candidates.counts[right][:, None]
        batch = {
            "right_entities": right.astype(np.int32),
            "mlm_ids": table[right],
            "mlm_weights": weights.astype(np.float32),
        }
        if self.known is not None:
            batch["known_entities"] = self.known.others(queries, self.known_width)
        return batch

    def for_scores(self) -> "Spellings":
        """Return the same queries, with known answers."""
        return replace(self, known=self.known_answers())

    def parts(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        sides = self.queries.sides[example]
        return {"sides": graphs.score_sides(outputs, sides, self.form.metrics)}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the text that the model sees, and the right answer."""
        yield from super().describe(row, example, tokenizer)
        if self.labelled:
            yield "answer", decode(tokenizer, row["mlm_ids"][row["mlm_weights"] > 0])

    def of_columns(self, labelled: bool) -> str:
        longest = self.candidates.longest
        return f" of {counted(longest, 'mask')} and {self.length} tokens"

    def label_counts(self) -> dict[str, dict[str, float]]:
        lengths = self.candidates.lengths
        counts = {"entities": len(lengths), "relations": len(self.graph.relations)}
        return {"candidates": counts, "pieces of an entity": min_mean_max(lengths)}


def make_spellings(
    read: Sequence[Triple],
    form: Form,
    tokenizer: Any,
    labelled: bool,
    say: Say = silent,
) -> Spellings:
    """Make queries of triples: for both ends if labeled, otherwise for the BLANK.

    An entity that is not in the graph is added, and encoded by its text. It may be an
    answer to labeled queries, which are scored, but not to others. Raises UserError,
    naming the place, for invalid queries, and for names that several entities have.
    """
    if not tokenizer.has_mask:
        raise UserError(
            "objective=mlmlm spells entities in the place of masks, and the vocabulary "
            "(data.vocab) has none: take a masked LM's"
        )
    own = form.graph
    ends = [(end, t.place) for t in read for end in (t.head, t.tail) if end != BLANK]
    graph = own.with_names(
        [own.entity_id(*end) for end in ends],
        [own.relation_id(t.relation, t.place) for t in read],
    )
    if new := graph.entities[len(own.entities) :]:
        what = f"{counted(len(new), 'entity', 'entities')} in no training triple"
        say(f"{what} from: {join_names(new)}")
    form = form._replace(graph=graph)
    form, triples = open_graph.number_triples(read, form, labelled, say)
    queries = ask_for_ends(triples, labelled)
    spelled = graph.cached("spelled", lambda: spell(graph, tokenizer, say), tokenizer)
    answering, pool = graph, spelled
    if not labelled:
        answering = own
        pool = own.cached("spelled", lambda: spell(own, tokenizer, silent), tokenizer)

    def make_table() -> Candidates:
        settings = answering.settings
        how = settings["target_length"], tokenizer.pad_id, settings["pads"]
        return Candidates.of(pool.answers, *how)

    table = answering.cached("candidates", make_table, tokenizer)
    parts = spelled.contexts, spelled.relations, spelled.answers
    counts = sum(part.counts(tokenizer) for part in parts)
    return Spellings(form, counts, queries, labelled, spelled, table)


TASK_TYPE = triple_type(
    make_rows=make_spellings,
    settings=("descriptions", "disambiguate", "pads", "target_length"),
    make_graph=open_graph.make_open_graph,
)

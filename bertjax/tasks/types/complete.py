# SPDX-License-Identifier: Apache-2.0
"""Rows of triples with a masked head or tail, over a vocabulary of entities (CoKE).

Wang et al. 2019 (arXiv 1911.02168), section 3. A triple is three tokens, entity,
relation, entity; a path is entity, relations, entity. One end is [MASK]. A sequence has
no start or end tokens. A row packs as many sequences as fit; they do not see each
other. Which sequences share a row is drawn once; rows are shuffled in every epoch.

Our addition: with task.answers, triples that ask the same query are trained on
together: once per epoch for every `answers` of its right answers (1-N scoring uses all
of them: Dettmers et al. 2018, arXiv 1707.01476, section 5.1). The query has the weight
of all these triples, so that an epoch has the same loss in fewer rows.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.tokenizers import plain_ids, tokenizer_files
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.tasks import graphs, open_graph
from bertjax.tasks.graphs import HEAD, TAIL, Graph, Queries
from bertjax.tasks.known_answers import KnownAnswers
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs
from bertjax.tasks.triple_files import Triple
from bertjax.tasks.triple_rows import TripleRows, ask_for_ends, triple_type
from bertjax.tasks.walks import LONGEST, Walks, draw_lengths

FIRST = len(plain_ids.SPECIAL)  # the token of the first entity; relations come after
SHUFFLE = counter_rng.fold(0, "triples")  # the key that draws which queries share a row
MOST_KNOWN = 2**18  # slots for known answers in a scored row of several queries


class Candidates(NamedTuple):
    """The tokens that answers are chosen from: `count` tokens from `first` on."""

    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Completions(TripleRows):
    """Queries, several per row.

    queries: in the order in which they were read; both ends of each labeled triple.
    paths: the most relations of a path; 1: only triples. at_once: the most right
    answers per query; if above 1, triples that ask the same become one query. `plan`
    sets the rest: laid, the queries in the order of the rows; edges i64 [queries], the
    number of relations of each; walks, with which paths are drawn, or None; firsts i64
    [queries], the number of each query's first answer in shared, the known answers, or
    None; starts i64 [rows + 1], the first query of each row, and the end; slots, the
    most queries of a row.
    """

    paths: int = 1
    at_once: int = 1
    laid: Queries | None = None
    edges: np.ndarray | None = None
    walks: Walks | None = None
    firsts: np.ndarray | None = None
    shared: KnownAnswers | None = None
    starts: np.ndarray | None = None
    slots: int = 0

    shortest = 3

    @property
    def candidates(self) -> Candidates:
        """The tokens of the entities."""
        return Candidates(FIRST, len(self.graph.entities))

    def arrays(self) -> list[np.ndarray | None]:
        settings = [np.array(self.paths)]
        if self.at_once > 1:
            settings.append(np.array(self.at_once))
        return [*self.queries, *settings, self.graph.vocabulary]

    def plan(self, length: int) -> Self:
        """Draw the lengths of paths, and fill rows with queries in turn."""
        every, walks, shared = self.queries, None, None
        is_learnt = self.labelled and self.known is None
        queries, firsts = every, np.zeros(len(every.sides), np.int64)
        if self.at_once > 1 and is_learnt:
            shared = KnownAnswers(every.triples, self.graph.width)
            queries, firsts = shared.shares(every, self.at_once)
        edges = np.ones(len(queries.sides), np.int64)
        if self.paths > 1:
            walks = Walks.of(every.triples[::2], len(self.graph.entities))
            drawn = draw_lengths(walks, every.triples[:, TAIL], self.paths)
            queries = queries.join(every.take(drawn > 1))
            edges = np.concatenate([edges, drawn[drawn > 1]])
            firsts = np.pad(firsts, (0, len(edges) - len(firsts)))
        if is_learnt:
            n = len(edges)
            order = np.argsort(counter_rng.permute(np.arange(n), n, SHUFFLE))
            queries, edges, firsts = queries.take(order), edges[order], firsts[order]
        if (longest := int(edges.max()) + 2) > length:
            raise UserError(
                f"data.length={length} is too short: a sequence has {longest} tokens"
            )
        starts, used, slots = [], length, length // 3
        if self.known is not None:  # each query takes the room of a hub's answers
            slots = max(1, min(slots, MOST_KNOWN // self.known_width))
        for i, width in enumerate((edges + 2).tolist()):
            if used + width > length or i - starts[-1] == slots:
                starts.append(i)
                used = 0
            used += width
        at = np.array([*starts, len(edges)], np.int64)
        laid = dict(laid=queries, edges=edges, walks=walks, firsts=firsts, starts=at)
        laid |= dict(shared=shared, slots=slots)
        return replace(super().plan(length), **laid)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        used = np.add.reduceat(self.edges + 2, self.starts[:-1])
        return used, np.zeros_like(used)

    def members(self, example: np.ndarray) -> np.ndarray:
        """Return the queries of rows: i64 [b, slots], -1 for none."""
        query = self.starts[example][:, None] + np.arange(self.slots)
        return np.where(query < self.starts[example + 1][:, None], query, -1)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, segment_ids, position_ids i32 [b, L];
        complete_positions i32 [b, S] of the masks; complete_given i32 [b, S], the other
        ends. Labeled rows have complete_ids i32 [b, S], the right tokens, and
        complete_weights f32 [b, S]. With several answers per query they also have
        complete_more i32 [b, S, at_once - 1], the tokens of the others, -1 for none;
        the weights then count the answers. Rows to score have known_entities i32
        [b, S, F], the numbers of other right entities, -1 for none.

        Entities 5 6, relation 7, the triple 5 7 6, length 8 (mask 4, padding 0):

            input_ids           5  7  4  4  7  6  0  0
            segment_ids         1  1  1  2  2  2  0  0
            position_ids        0  1  2  0  1  2  0  0
            complete_positions  2  3
            complete_given      5  6
            complete_ids        6  5
        """
        members = self.members(example)
        tokens, widths = self._sequences(members, keys, specials)
        begins = np.cumsum(widths, axis=1) - widths
        inside = np.arange(tokens.shape[2]) < widths[:, :, None]
        row, slot, at = np.nonzero(inside)
        column = begins[row, slot] + at
        ids, segments, positions = (
            np.full((len(example), self.length), fill, np.int32)
            for fill in (specials.pad_id, 0, 0)
        )
        segments[row, column], positions[row, column] = slot + 1, at
        is_head = self.laid.sides[members] == HEAD
        last = np.maximum(widths - 1, 0)
        ends = np.where(is_head, 0, last)
        right = np.take_along_axis(tokens, ends[:, :, None], 2)
        given = np.take_along_axis(tokens, (last - ends)[:, :, None], 2)
        np.put_along_axis(tokens, ends[:, :, None], specials.mask_id, 2)
        ids[row, column] = tokens[inside]
        batch = {
            "input_ids": ids,
            "attention_mask": (segments > 0).astype(np.int32),
            "segment_ids": segments,
            "position_ids": positions,
            "complete_positions": ((begins + ends) * (widths > 0)).astype(np.int32),
            "complete_given": given[:, :, 0].astype(np.int32),
        }
        if self.labelled:
            batch["complete_ids"] = right[:, :, 0].astype(np.int32)
            batch["complete_weights"] = (members >= 0).astype(np.float32)
        if self.shared is not None:
            own = self._own_share(members)
            is_path = self.edges[members] > 1
            own[is_path, 0], own[is_path, 1:] = right[is_path, 0], -1
            batch["complete_ids"] = own[..., 0]
            batch["complete_more"] = own[..., 1:]
            batch["complete_weights"] *= np.sum(own >= 0, axis=-1)
        if self.known is not None:
            others = self.known.others(
                self.laid.take(members.ravel()), self.known_width
            )
            batch["known_entities"] = others.reshape(*members.shape, -1)
        return batch

    def _own_share(self, members: np.ndarray) -> np.ndarray:
        """Return the tokens of the right answers of queries.

        They are i32 [b, S, at_once], -1 for none.
        """
        some = members.ravel()
        found = self.shared.share(self.laid.take(some), self.firsts[some], self.at_once)
        tokens = np.where(found < 0, -1, FIRST + found)
        return tokens.reshape(*members.shape, -1).astype(np.int32)

    def _sequences(
        self, members: np.ndarray, keys: Any, specials: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of queries, with both ends, i64 [b, S, W], and the number
        of tokens of each, i64 [b, S], 0 for none. An unknown end is entity 0."""
        triples = self.laid.triples[members].astype(np.int64)
        head, middle, tail = np.moveaxis(np.maximum(triples, 0), -1, 0)
        first_relation = FIRST + len(self.graph.entities)
        edges = self.edges[members]
        widths = np.where(members >= 0, edges + 2, 0)
        tokens = np.zeros(
            (*members.shape, (LONGEST if self.walks else 1) + 2), np.int64
        )
        tokens[..., 0], tokens[..., 1] = FIRST + head, first_relation + middle
        if self.walks:
            key = counter_rng.fold(keys, "path")
            walked, tail = self.walks.walk(tail, edges - 1, key)
            tokens[..., 2:-1] = first_relation + walked
        np.put_along_axis(tokens, edges[..., None] + 1, FIRST + tail[..., None], -1)
        return tokens, widths

    def for_scores(self) -> "Completions":
        """Return the queries of triples, without paths, and with known answers."""
        return replace(self, paths=1, known=self.known_answers())

    def of_queries(self, outputs: Outputs, example: np.ndarray) -> Outputs:
        """Convert outputs per row [n, S, ...] to outputs per query [queries, ...]."""
        real = self.members(example) >= 0
        return {name: np.asarray(found)[real] for name, found in outputs.items()}

    def parts(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        members = self.members(example)
        sides = self.laid.sides[members[members >= 0]]
        found = self.of_queries(outputs, example)
        return {"sides": graphs.score_sides(found, sides, self.form.metrics)}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield each query of a row, with its right answers."""
        for slot in range(int(row["segment_ids"].max())):
            own = row["input_ids"][row["segment_ids"] == slot + 1]
            asked = " ".join(tokenizer.pieces[i] for i in own)
            if self.labelled:
                more = row["complete_more"][slot] if "complete_more" in row else ()
                right = row["complete_ids"][slot], *(i for i in more if i >= 0)
                asked += f" = {', '.join(tokenizer.pieces[i] for i in right)}"
            yield f"query {slot + 1}", asked

    def read_as(self, tokenizer: Any, labelled: bool = True) -> str:
        # Show only the first query of the row.
        return super().read_as(tokenizer, labelled).partition("; query 2 ")[0]

    def of_columns(self, labelled: bool) -> str:
        return f" of {self.length} tokens"

    def label_counts(self) -> dict[str, dict[str, float]]:
        graph, counts = self.graph, np.bincount(self.edges, minlength=2).tolist()
        found: dict[str, float] = {"of triples": counts[1]}
        found |= {f"of paths of {k}": n for k, n in enumerate(counts) if k > 1}
        found |= {"entities": len(graph.entities), "relations": len(graph.relations)}
        return {"queries": found}

    def notes(self) -> Iterator[str]:
        if self.walks is not None:
            without = len(self.queries.sides) - int((self.edges > 1).sum())
            yield f"{without // 2:,} triples begin no path: their tails lead nowhere"


def make_completions(
    read: Sequence[Triple],
    form: Form,
    tokenizer: Tokenizer,
    labelled: bool,
    say: Say = silent,
) -> Completions:
    """Make queries of triples: for both ends if labeled, otherwise for the BLANK.

    Raises UserError, naming the place, for parts that are not in the graph.
    """
    form, triples = open_graph.number_triples(read, form, labelled, say)
    queries = ask_for_ends(triples, labelled)
    ends = queries.triples[:, [HEAD, TAIL]]
    tokens = queries.triples[:, 1] + len(form.graph.entities), ends[ends >= 0]
    ids = FIRST + np.concatenate(tokens)
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    settings = form.graph.settings
    each = [settings[key] if labelled else 1 for key in ("paths", "answers")]
    return Completions(form, counts, queries, labelled, *each)


def make_tokenizer(graph: Graph) -> Tokenizer:
    """Build the vocabulary: special tokens, entities, relations.

    A name that is already taken gets "'" appended.
    """
    taken = dict.fromkeys(plain_ids.SPECIAL)
    for name in (*graph.entities, *graph.relations):
        while name in taken:
            name += "'"
        taken[name] = None
    names = {"names": [*taken][FIRST:]}
    content = json.dumps(names, ensure_ascii=False).encode()
    reader = tokenizer_files.Reader("data.train", None)
    return Tokenizer(**reader.make({plain_ids.FILE: content}, {}))


def head_options(task: ConfigDict, labels: Sequence[str]) -> dict[str, int]:
    """Return the head's option `answers`, if there are several per query."""
    return {"answers": task.answers} if task.answers > 1 else {}


TASK_TYPE = triple_type(
    make_rows=make_completions,
    settings=("paths", "answers"),
    head_options=head_options,
    make_tokenizer=make_tokenizer,
)

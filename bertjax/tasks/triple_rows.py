# SPDX-License-Identifier: Apache-2.0
"""The base class of rows of queries to a knowledge graph, and of their task types."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from bertjax.tasks import graphs, open_graph, triple_files
from bertjax.tasks.graphs import HEAD, TAIL, Graph, Queries
from bertjax.tasks.known_answers import KnownAnswers
from bertjax.tasks.task_rows import Outputs, Rows
from bertjax.tasks.task_type import TaskType

# Builds the task type of rows of triples, given make_rows and what differs from these.
triple_type = partial(
    TaskType,
    read=triple_files.read_triples,
    parse=triple_files.parse_triples,
    metrics=graphs.METRICS,
    outputs=("greater", "equal"),
    file_names=triple_files.WANTED,
    columns=open_graph.COLUMNS,
    unused=open_graph.UNUSED,
    check=open_graph.check,
    text_columns=0,
    make_graph=open_graph.make_graph,
    open_graph=open_graph.open_graph,
    token_head=True,
)


@dataclass(frozen=True, eq=False)
class TripleRows(Rows):
    """Rows of queries.

    labelled: whether the right answers are known; known: for rows to score, all known
    right answers.
    """

    queries: Queries
    labelled: bool
    known: KnownAnswers | None = field(default=None, kw_only=True)

    answered = "entities"  # the attribute of the graph that answers come from

    @property
    def graph(self) -> Graph:
        """The graph, with its entities, relations and edges."""
        return self.form.graph

    @property
    def facts(self) -> dict[str, Any]:
        return {"labels": [], "graph": self.graph.to_json()}

    def known_answers(self) -> KnownAnswers:
        """Return the known right answers to queries of the graph."""
        return KnownAnswers(self.graph.known_triples, self.graph.width)

    @cached_property
    def known_width(self) -> int:
        """F, the most known answers to a query, of rows to score."""
        return self.known.most(self.queries)

    def of_queries(self, outputs: Outputs, example: np.ndarray) -> Outputs:
        """Convert outputs per row to outputs per query: [queries, ...]."""
        return outputs

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute ranking metrics from "greater" and "equal" f32 (`of_queries`)."""
        found = self.of_queries(outputs, example)
        counts = (np.asarray(found[name]) for name in ("greater", "equal"))
        return graphs.ranking_scores(*counts, self.form.metrics)

    def answers(self, outputs: Outputs, read: Sequence[Any]) -> Iterator[Any]:
        """Yield {"entities": [{"name", "probability"}, ...]}, the likeliest first."""
        found = self.of_queries(outputs, np.arange(self.n))
        for pair in zip(found["top_ids"], found["top_probabilities"], strict=True):
            yield graphs.answer_of(self.graph, *pair, self.answered)


def ask_for_ends(triples: np.ndarray, labelled: bool) -> Queries:
    """Return queries for the ends of triples i32 [n, 3].

    Labeled triples give 2 n queries, for both ends; others give one, for the end that
    is -1.
    """
    if labelled:
        return graphs.both_sides(triples)
    return Queries(triples, np.where(triples[:, 0] < 0, HEAD, TAIL))

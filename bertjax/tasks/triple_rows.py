# SPDX-License-Identifier: Apache-2.0
"""What rows of queries of a knowledge graph share, and their task types."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bertjax.tasks import graphs, open_graph, triple_files
from bertjax.tasks.graphs import HEAD, TAIL, Graph, Queries
from bertjax.tasks.known_answers import KnownAnswers
from bertjax.tasks.task_rows import Rows
from bertjax.tasks.task_type import TaskType

# Makes the type of rows of triples, of make_rows and of what is another one's.
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
    """Rows of queries. labelled: whether it is known what is right; known: what else
    is right, of rows that are scored."""

    queries: Queries
    labelled: bool
    known: KnownAnswers | None = field(default=None, kw_only=True)

    @property
    def graph(self) -> Graph:
        """Entities, relations and edges."""
        return self.form.graph

    @property
    def facts(self) -> dict[str, Any]:
        return {"labels": [], "graph": self.graph.to_json()}

    def known_answers(self) -> KnownAnswers:
        """Return what is known to be right."""
        return KnownAnswers(self.graph.known_triples, self.graph.width)


def ask_for_ends(triples: np.ndarray, labelled: bool) -> Queries:
    """Ask for both ends of triples i32 [n, 3] that say what is right, 2 n queries, and
    of others for the end that is -1."""
    if labelled:
        return graphs.both_sides(triples)
    return Queries(triples, np.where(triples[:, 0] < 0, HEAD, TAIL))

# SPDX-License-Identifier: Apache-2.0
"""Small graphs, and rows of subgraphs around their edges."""

import numpy as np

from bertjax.data import counter_rng
from bertjax.tasks.graphs import Graph
from bertjax.tasks.open_graph import number_triples
from bertjax.tasks.task_rows import Form
from bertjax.tasks.triple_files import parse_triples
from bertjax.tasks.types.edges import TASK_TYPE


def make_rows(train, queries=None, labelled=True):
    read = parse_triples(train, "t.tsv")
    made = Graph.of(read, [], {}, False)
    learnt = number_triples(read, Form((), "", (), 1, (), graph=made), True, print)[1]
    graph = Graph(made.entities, made.relations, learnt=lambda own: learnt)
    tokenizer = TASK_TYPE.make_tokenizer(graph)
    form = Form((), "", (), 1, TASK_TYPE.metrics, graph=graph)
    asked = parse_triples(queries, "q.tsv") if queries else read
    return TASK_TYPE.make_rows(asked, form, tokenizer, labelled), tokenizer


def gathered(rows, tokenizer, epoch=0):
    example = np.arange(rows.n)
    return rows.gather(example, counter_rng.fold(1, epoch, example), tokenizer)


def random_lines(entities=12, relations=3, n=70, seed=0):
    draw = np.random.default_rng(seed)
    rows = np.unique(draw.integers(0, [entities, relations, entities], (n, 3)), axis=0)
    return "".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in rows)

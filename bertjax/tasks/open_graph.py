# SPDX-License-Identifier: Apache-2.0
"""Build the graph of a config, and convert examples to numbered triples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.data.corpus.sources import expand_paths, named_sources
from bertjax.models.families import in_effect
from bertjax.tasks import tables, triple_files
from bertjax.tasks.graphs import Graph, check_queries
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_rows import Form
from bertjax.tasks.triple_files import Triple, read_descriptions, read_triples

# Keys of config.task -> the parts of a triple, which are always in this order.
COLUMNS = {"text": "head", "text_pair": "relation", "label": "tail"}
UNUSED = {"labels": "", "choices": "", **COLUMNS}
SETTINGS = (
    "paths",
    "answers",
    "descriptions",
    "disambiguate",
    "pads",
    "target_length",
)


def check(config: ConfigDict) -> None:
    """Raise UserError for a config that completion does not support."""
    for entry in registry.split_list(config.data.entities):
        expand_paths(entry, "data.entities", pattern=triple_files.WANTED)
    if in_effect(config.model.to_dict()).get("is_decoder"):
        raise UserError(
            f"model.is_decoder=True: objective={config.objective} predicts parts of a "
            "triple from later parts, which a decoder does not see: set "
            "model.is_decoder=False"
        )


def make_graph(
    config: ConfigDict,
    train: Sequence[Triple],
    others: Sequence[Triple],
    say: Say = silent,
    is_open: bool = False,
) -> Graph:
    """Build the graph of the triples of data.train and of `others`, of data.valid.

    is_open: see Graph.of. Reports entities that data.entities does not describe, ids in
    it that occur in no triple, and other triples that are also in data.train. Raises
    UserError if the files of data.entities cannot be read.
    """
    files = config.data.entities
    texts = read_descriptions(files, "data.entities", say) if files else {}
    graph = Graph.of(train, others, texts, is_open)
    learnt = {graph.ids_of(t) for t in train}
    both = [t.place for t in others if graph.ids_of(t) in learnt]
    tables.report(say, both, "triple", " of data.valid that data.train has too")
    if texts:
        ids = {*graph.entities, *graph.relations}
        plain = [name for name in graph.entities if name not in texts]
        unused = [name for name in texts if name not in ids]
        kept = "kept for what is asked" if is_open else "left out"
        for some, what in (
            (plain, "of entities without a name, which are called by it"),
            (unused, f"described that occur in no triple, {kept}"),
        ):
            if some:
                say(f"data.entities: {counted(len(some), 'id')} {what}: {some[0]}, ...")
    every = [*train, *others]
    return replace(
        graph,
        known=lambda own: own.numbers(every),
        learnt=lambda own: own.numbers(train),
        settings=settings_of(config),
    )


# Builds a graph that may have entities and relations without training triples.
make_open_graph = partial(make_graph, is_open=True)


def open_graph(config: ConfigDict, facts: Mapping[str, Any]) -> Graph:
    """Return the graph of a model; its triples are read only to filter ranks."""

    def read(graph: Graph, side: str) -> np.ndarray:
        found: list[Triple] = []
        key = f"data.{side}"
        for part in named_sources(config.data[side], key).values():
            found += read_triples(part, key, {})
        return graph.numbers(found)

    def known(graph: Graph) -> np.ndarray:
        return np.concatenate([graph.edges, read(graph, "valid")])

    learnt = partial(read, side="train")
    return Graph.from_json(facts["graph"], known, learnt, settings_of(config))


def settings_of(config: ConfigDict) -> dict[str, Any]:
    """Return the keys of config.task that say how triples are completed."""
    return {key: config.task[key] for key in SETTINGS}


def number_triples(
    read: Sequence[Triple],
    form: Form,
    labelled: bool,
    say: Say,
    asks: str = "head, or of the tail",
) -> tuple[Form, np.ndarray]:
    """Return the form and the triples as numbers, i32 [n, 3].

    Labeled triples are returned without repeats, and the form's graph then knows them
    too. asks: see check_queries. Reports triples that a checkpoint's graph was trained
    on. Raises UserError, naming the place, for parts that the graph does not have, and
    for invalid queries.
    """
    check_queries(read, labelled, asks)
    triples = form.graph.numbers(read)
    if not labelled:
        return form, triples
    if form.graph.is_saved:
        learnt = {*map(tuple, form.graph.edges.tolist())}
        pairs = zip(read, triples.tolist(), strict=True)
        both = [t.place for t, numbers in pairs if (*numbers,) in learnt]
        tables.report(say, both, "triple", " that data.train has too")
    _, first = np.unique(triples, axis=0, return_index=True)
    if len(first) < len(triples):
        again = np.setdiff1d(np.arange(len(triples)), first)
        places = [read[i].place for i in again[:4]] + [""] * (len(again) - 4)
        tables.report(say, places, "triple", " that came before, counted once")
    triples = triples[np.sort(first)]
    return form._replace(graph=form.graph.with_known(triples)), triples

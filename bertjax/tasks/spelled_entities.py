# SPDX-License-Identifier: Apache-2.0
"""Entities and relations as pieces of text, for the input and for the answers."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax import counted
from bertjax.tasks.graphs import Graph
from bertjax.tasks.tables import Say
from bertjax.tasks.task_rows import Ragged

SEPARATORS = re.compile(r"[_/\s]+")  # between the words of an id


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pieces of all answers.

    table i32 [N, K], padded; lengths i32 [N], the number of each answer's pieces, at
    least 1; counts i32 [N], how many of K slots count: lengths, or K with task.pads.
    """

    table: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    @property
    def longest(self) -> int:
        """K."""
        return self.table.shape[1]

    @classmethod
    def of(
        cls, answers: Ragged, longest: int, pad_id: int, pads: bool = False
    ) -> "Candidates":
        """Build the table of answers, each cut to `longest` pieces."""
        lengths = np.minimum(answers.lengths, longest)
        table = np.full((len(lengths), int(lengths.max())), pad_id, np.int32)
        inside = np.arange(table.shape[1]) < lengths[:, None]
        at = answers.offsets[:-1, None] + np.arange(table.shape[1])
        table[inside] = answers.tokens[at[inside]]
        counts = np.full_like(lengths, table.shape[1]) if pads else lengths
        return cls(table, lengths.astype(np.int32), counts.astype(np.int32))


@dataclass(frozen=True, eq=False)
class Spelled:
    """The pieces of a graph's entities and relations, by number.

    contexts: an entity in the input, with its name and text; answers: an entity as a
    prediction; relations: a relation in the input.
    """

    contexts: Ragged
    answers: Ragged
    relations: Ragged


def readable(graph: Graph, name: str) -> str:
    """Return the name of an entity or relation; without one, the words of its id.

    >>> readable(Graph([], ["_also_see"]), "_also_see")
    'also see'
    """
    if name in graph.texts:
        return graph.texts[name].name
    return SEPARATORS.sub(" ", name).strip() or name


def spell(graph: Graph, tokenizer: Any, say: Say) -> Spelled:
    """Encode the entities and relations of a graph, by its settings.

    descriptions: whether the input has an entity's text after its name. disambiguate:
    how many pieces of the text are added to the answer if other entities have the same
    name. Reports how many answers are still equal; such entities share their ranks.
    """
    settings = graph.settings
    names = [readable(graph, name) for name in graph.entities]
    texts = [graph.describe(name).text for name in graph.entities]
    wholes = names
    if settings["descriptions"]:
        wholes = [
            f"{name}: {text}" if text else name
            for name, text in zip(names, texts, strict=True)
        ]
    answers = _some(tokenizer, names)
    if most := settings["disambiguate"]:
        counts = Counter(names)
        shared = [i for i, name in enumerate(names) if counts[name] > 1]
        more = tokenizer.encode_batch([texts[i] for i in shared])
        for i, pieces in zip(shared, more, strict=True):
            answers[i] = answers[i] + pieces[:most]
    alike = Counter(map(tuple, answers))
    if many := sum(n for n in alike.values() if n > 1):
        say(f"{counted(many, 'entity', 'entities')} have the pieces of another one")
    relations = [readable(graph, name) for name in graph.relations]
    parts = _some(tokenizer, wholes), answers, _some(tokenizer, relations)
    return Spelled(*map(Ragged.of, parts))


def _some(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts; a text without pieces becomes one unknown token."""
    encoded = tokenizer.encode_batch([*texts])
    return [list(ids) or [tokenizer.unk_id] for ids in encoded]

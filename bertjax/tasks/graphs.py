# SPDX-License-Identifier: Apache-2.0
"""A knowledge graph: its entities and relations, what is known of it, and ranks.

Completion is scored as knowledge graphs are (Bordes et al. 2013, section 4.2): of
(h, r, ?) and (?, r, t) all entities are ranked, those aside that are known to be right
too (filtered). Where entities share the score of the right one it has, realistically,
the mean of the best and the worst of their ranks (Berrendorf et al. 2020, arXiv
2002.06914).
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from bertjax import UserError, counted
from bertjax.tasks.task_rows import Outputs
from bertjax.tasks.triple_files import BLANK, Described, Triple

HITS = 1, 3, 10
METRICS = ("mrr", *(f"hits@{k}" for k in HITS), "mean_rank")
METRICS += ("mrr_optimistic", "mrr_pessimistic")
HEAD, RELATION, TAIL = range(3)  # which part of a triple is asked for: its column
SIDES = {"head": HEAD, "relation": RELATION, "tail": TAIL}


class Queries(NamedTuple):
    """triples i32 [n, 3] of which one part is asked for: sides i64 [n], its column.

    A part that nobody knows is -1.
    """

    triples: np.ndarray
    sides: np.ndarray

    @property
    def answers(self) -> np.ndarray:
        """What is asked for: entities or relations, i32 [n]."""
        return self.triples[np.arange(len(self.sides)), self.sides]

    def take(self, which: np.ndarray) -> Self:
        """Return some of them, by number or by mask."""
        return Queries(self.triples[which], self.sides[which])

    def join(self, more: Self) -> Self:
        """Return these and more."""
        return Queries(*map(np.concatenate, zip(self, more, strict=True)))


def both_sides(triples: np.ndarray) -> Queries:
    """Ask for the tail of each triple, and then for its head: 2 n queries."""
    sides = np.tile([TAIL, HEAD], len(triples))
    return Queries(np.repeat(triples, 2, axis=0), sides)


def no_triples(graph: "Graph") -> np.ndarray:
    """Return none, i32 [0, 3]."""
    return np.zeros((0, 3), np.int32)


@dataclass(frozen=True, eq=False)
class Graph:
    """Entities and relations, by number, and what all files together say of them.

    texts: what they are called, of those that files describe. known: reads the triples
    i32 [n, 3] by which ranks are filtered; learnt: those that are learnt. settings:
    what config.task says of how they are completed. is_open: whether entities that are
    in no triple yet may be asked for, and what texts say of them is kept. is_saved:
    whether it is a checkpoint's.
    """

    entities: Sequence[str]
    relations: Sequence[str]
    texts: Mapping[str, Described] = field(default_factory=dict)
    known: Callable[["Graph"], np.ndarray] = no_triples
    learnt: Callable[["Graph"], np.ndarray] = no_triples
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False
    is_saved: bool = False
    _cache: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        train: Sequence[Triple],
        others: Iterable[Triple],
        texts: Mapping[str, Described],
        is_open: bool,
    ) -> Self:
        """Take the entities and relations of triples in the order of their first one.

        others: of the validation sets, whose entities belong to the graph where it is
        open, by their ids or names, or where texts describe them. Raises UserError for
        a name of several.
        """
        entities = dict.fromkeys(end for t in train for end in (t.head, t.tail))
        relations = dict.fromkeys(t.relation for t in train)
        learnt = cls([*entities], [*relations], texts, is_open=is_open)
        for t in others:
            ends = [end for end in (t.head, t.tail) if is_open or end in texts]
            if is_open:
                ends = [learnt.entity_id(end, t.place) for end in ends]
                relations.setdefault(learnt.relation_id(t.relation, t.place))
            entities |= dict.fromkeys(ends)
        return cls([*entities], [*relations], texts, is_open=is_open)

    @cached_property
    def entity_numbers(self) -> dict[str, int]:
        """The number of each entity, by its id."""
        return {name: i for i, name in enumerate(self.entities)}

    @cached_property
    def relation_numbers(self) -> dict[str, int]:
        """The number of each relation, by its id."""
        return {name: i for i, name in enumerate(self.relations)}

    @property
    def width(self) -> int:
        """More than any number of an entity or a relation."""
        return max(len(self.entities), len(self.relations), 1)

    @cached_property
    def entities_by_name(self) -> dict[str, list[str]]:
        """The ids of the entities of each name; where the graph is open also of those
        that are in no triple."""
        return self._by_name([*self.entities, *self._others])

    @cached_property
    def relations_by_name(self) -> dict[str, list[str]]:
        """The ids of the relations of each name."""
        return self._by_name(self.relations)

    def _by_name(self, ids: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in ids:
            found.setdefault(self.describe(name).name, []).append(name)
        return found

    @cached_property
    def _others(self) -> dict[str, None]:
        """The ids that texts describe, and that are in no triple, of an open graph."""
        known = self.entity_numbers.keys() | self.relation_numbers.keys()
        names = self.texts if self.is_open else ()
        return dict.fromkeys(name for name in names if name not in known)

    def describe(self, name: str) -> Described:
        """Return what an entity or a relation is called: without a file, its id."""
        return self.texts.get(name) or Described(name)

    @cached_property
    def edges(self) -> np.ndarray:
        """Triples that are learnt, each once: i32 [n, 3]."""
        return np.unique(self.learnt(self), axis=0)

    @cached_property
    def known_triples(self) -> np.ndarray:
        """Triples that are known to be right, i32 [n, 3]."""
        return self.known(self)

    def entity_id(self, name: str, place: str) -> str:
        """Return the id of an entity by this, or by a name that it alone has; what is
        neither as it is. Raises UserError, naming the place, for a name of several."""
        if name in self.entity_numbers or name in self._others:
            return name
        return _only("entity", "entities", name, self.entities_by_name, place)

    def relation_id(self, name: str, place: str) -> str:
        """Return the id of a relation, as `entity_id` does."""
        if name in self.relation_numbers:
            return name
        return _only("relation", "relations", name, self.relations_by_name, place)

    def ids_of(self, triple: Triple) -> tuple[str, str, str]:
        """Return the ids of a triple's parts, as `entity_id` does."""
        return (
            self.entity_id(triple.head, triple.place),
            self.relation_id(triple.relation, triple.place),
            self.entity_id(triple.tail, triple.place),
        )

    def entity(self, name: str, place: str) -> int:
        """Return the number of an entity by its id, or by a name that it alone has.

        Raises UserError, naming the place.
        """
        number = self.entity_numbers.get(self.entity_id(name, place))
        if number is None:
            known = [*self.entities, *self.entities_by_name]
            raise _unknown("entity", name, known, place)
        return number

    def relation(self, name: str, place: str) -> int:
        """Return the number of a relation, as `entity` does. Raises UserError."""
        number = self.relation_numbers.get(self.relation_id(name, place))
        if number is None:
            known = [*self.relations, *self.relations_by_name]
            raise _unknown("relation", name, known, place)
        return number

    def numbers(self, triples: Sequence[Triple]) -> np.ndarray:
        """Return the triples by the numbers of their parts, -1 for BLANK: i32 [n, 3].

        Raises UserError, naming the place, for what the graph does not have.
        """
        entities, relations = self.entity_numbers, self.relation_numbers

        def end(name: str, place: Triple) -> int:
            number = -1 if name == BLANK else entities.get(name)
            return self.entity(name, place.place) if number is None else number

        def middle(t: Triple) -> int:
            number = -1 if t.relation == BLANK else relations.get(t.relation)
            return self.relation(t.relation, t.place) if number is None else number

        rows = [(end(t.head, t), middle(t), end(t.tail, t)) for t in triples]
        return np.array(rows, np.int32).reshape(-1, 3)

    def with_names(self, entities: Iterable[str], relations: Iterable[str]) -> Self:
        """Return the graph with entities and relations behind its own, which stay."""
        own = self.entity_numbers, self.relation_numbers
        entities, relations = (
            [*dict.fromkeys([*known, *more])]
            for known, more in zip(own, (entities, relations), strict=True)
        )
        same = [len(entities), len(relations)] == [len(x) for x in own]
        return replace(
            self,
            entities=entities,
            relations=relations,
            known=lambda graph: self.known_triples,  # numbers stay
            learnt=lambda graph: self.edges,
            _cache=self._cache if same else {},
        )

    def cached(self, name: str, make: Callable[[], Any], tokenizer: Any) -> Any:
        """Make what depends on the graph's parts, its settings and a tokenizer once.

        Graphs that were made of this one by `with_known`, or by `with_names` without
        another name, share it.
        """
        key = name, tokenizer.identity
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def with_known(self, triples: np.ndarray) -> Self:
        """Return the graph in which more triples are known to be right."""
        more = self.known_triples
        both = np.concatenate([more, triples])
        return replace(self, known=lambda graph: both)

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the graph: no triples."""
        ids = (*self.entities, *self.relations)
        names = self.texts if self.is_open else ids
        texts = {name: [*self.texts[name]] for name in names if name in self.texts}
        return {
            "entities": [*self.entities],
            "relations": [*self.relations],
            "texts": texts,
        }

    @classmethod
    def from_json(
        cls,
        facts: Mapping[str, Any],
        known: Callable[["Graph"], np.ndarray],
        learnt: Callable[["Graph"], np.ndarray],
        settings: Mapping[str, Any],
    ) -> Self:
        """Return a checkpoint's graph. known, learnt: read the triples, at need."""
        texts = {name: Described(*text) for name, text in facts["texts"].items()}
        parts = facts["entities"], facts["relations"], texts
        # A graph that is not open has kept no texts of others.
        return cls(*parts, known, learnt, settings, is_open=True, is_saved=True)

    @cached_property
    def vocabulary(self) -> np.ndarray:
        """Entities and relations in their order, and their texts, as bytes u8 [n]."""
        return np.frombuffer(json.dumps(self.to_json()).encode(), np.uint8)


def _only(
    what: str, plural: str, name: str, by_name: Mapping[str, list[str]], place: str
) -> str:
    """Return the one id of a name, of none the name. Raises UserError for more."""
    ids = by_name.get(name, [name])
    if len(ids) > 1:
        raise UserError(
            f"{place}: {counted(len(ids), what, plural)} are called {name!r}: give an "
            f"id ({', '.join(ids[:3])})"
        )
    return ids[0]


def _unknown(what: str, name: str, known: Iterable[str], place: str) -> UserError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(
        f"{place}: the {what} {name!r} is in no triple that was learnt from{meant}"
    )


def check_queries(
    triples: Sequence[Triple], labelled: bool, asks: str = "head, or of the tail"
) -> None:
    """Refuse a BLANK in a triple that says what is right, and a query that has none
    where one is expected, or more: UserError, naming the place.

    asks: which parts may be asked for; or "relation".
    """
    for t in triples:
        blanks = (t.head, t.relation, t.tail).count(BLANK)
        right = (t.relation == BLANK) == (asks == "relation")
        if labelled and blanks:
            raise UserError(
                f"{t.place}: {BLANK!r} stands for what is asked for, and these triples "
                "say what is right"
            )
        if not labelled and not (blanks == 1 and right):
            raise UserError(
                f"{t.place}: write {BLANK} in the place of the {asks}, and nowhere "
                "else: it stands for what is asked for"
            )


def ranking_scores(
    greater: np.ndarray, equal: np.ndarray, names: Sequence[str] = METRICS
) -> dict[str, float]:
    """Compute the metrics of queries by how many entities have a greater score than the
    right one, and how many others the same: [n] each.

    As pykeen's RankBasedEvaluator has them: realistic ranks unless a name says
    otherwise.

    >>> ranking_scores(np.array([0, 2]), np.array([0, 1]), ["mrr", "mean_rank"])
    {'mrr': 0.6428571428571428, 'mean_rank': 2.25}
    """
    best = 1 + np.asarray(greater, np.float64)
    worst = best + equal
    rank = (best + worst) / 2
    found = {
        "mrr": np.mean(1 / rank),
        **{f"hits@{k}": np.mean(rank <= k) for k in HITS},
        "mean_rank": np.mean(rank),
        "mrr_optimistic": np.mean(1 / best),
        "mrr_pessimistic": np.mean(1 / worst),
    }
    return {name: float(found[name]) for name in names}


def score_sides(
    outputs: Outputs, sides: np.ndarray, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Compute the metrics of the queries of each side: {"head": {...}, "tail": ...}."""
    greater, equal = (np.asarray(outputs[name]) for name in ("greater", "equal"))
    return {
        name: ranking_scores(greater[sides == side], equal[sides == side], names)
        for name, side in SIDES.items()
        if (sides == side).any()
    }


def answer_of(
    graph: Graph,
    numbers: np.ndarray,
    probabilities: np.ndarray,
    what: str = "entities",
) -> dict[str, Any]:
    """Return {"entities": [{"name", "probability"}, ...]}, as predict prints it.

    With "id" where files say what entities are called. what: or "relations".
    """
    ids, found = getattr(graph, what), []
    pairs = zip(numbers.tolist(), probabilities.tolist(), strict=True)
    for number, probability in pairs:
        name = ids[number]
        one = {"name": graph.describe(name).name, "probability": probability}
        found.append(one | ({"id": name} if graph.texts else {}))
    return {what: found}

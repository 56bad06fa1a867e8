# SPDX-License-Identifier: Apache-2.0
"""A knowledge graph: its entities, relations and known triples; queries and ranks.

Completion is scored as is usual (Bordes et al. 2013, section 4.2): for (h, r, ?) and
(?, r, t) all entities are ranked, except other entities that are known to be right
(filtered). If other entities have the same score as the right one, its realistic rank
is the mean of the best and the worst possible rank (Berrendorf et al. 2020, arXiv
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
HEAD, RELATION, TAIL = range(3)  # the columns of triples; a side is one of them
SIDES = {"head": HEAD, "relation": RELATION, "tail": TAIL}


class Queries(NamedTuple):
    """Queries: triples i32 [n, 3], and sides i64 [n], the column that is asked for.

    An unknown part is -1.
    """

    triples: np.ndarray
    sides: np.ndarray

    @property
    def answers(self) -> np.ndarray:
        """The right answers: entities or relations, i32 [n]."""
        return self.triples[np.arange(len(self.sides)), self.sides]

    def take(self, which: np.ndarray) -> Self:
        """Return the queries with these numbers, or those of a mask."""
        return Queries(self.triples[which], self.sides[which])

    def join(self, more: Self) -> Self:
        """Return these queries followed by `more`."""
        return Queries(*map(np.concatenate, zip(self, more, strict=True)))


def both_sides(triples: np.ndarray) -> Queries:
    """Return 2 n queries: for each triple, one for its tail, then one for its head."""
    sides = np.tile([TAIL, HEAD], len(triples))
    return Queries(np.repeat(triples, 2, axis=0), sides)


def no_triples(graph: "Graph") -> np.ndarray:
    """Return an empty array of triples, i32 [0, 3]."""
    return np.zeros((0, 3), np.int32)


@dataclass(frozen=True, eq=False)
class Graph:
    """Numbered entities and relations, their descriptions, and the known triples.

    texts: the descriptions that files give, by id. known: returns the triples i32
    [n, 3] by which ranks are filtered; learnt: returns the triples to train on.
    settings: the keys of config.task for completion. is_open: whether queries may ask
    for entities that are in no triple yet; their descriptions are then saved, too.
    is_saved: whether the graph comes from a checkpoint.
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
        """Build a graph of the parts of triples, in the order of their first use.

        others: the triples of the validation sets. Their entities join an open graph,
        by id or name; a closed graph gets only those that texts describe. Raises
        UserError for a name that several entities or relations have.
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
        """A number greater than that of any entity or relation."""
        return max(len(self.entities), len(self.relations), 1)

    @cached_property
    def entities_by_name(self) -> dict[str, list[str]]:
        """The ids of the entities of each name.

        An open graph includes entities that are in no triple.
        """
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
        """In an open graph, the ids that texts describe and that are in no triple."""
        known = self.entity_numbers.keys() | self.relation_numbers.keys()
        names = self.texts if self.is_open else ()
        return dict.fromkeys(name for name in names if name not in known)

    def describe(self, name: str) -> Described:
        """Return the description of an entity or relation; without one, its id."""
        return self.texts.get(name) or Described(name)

    @cached_property
    def edges(self) -> np.ndarray:
        """The triples to train on, without repeats: i32 [n, 3]."""
        return np.unique(self.learnt(self), axis=0)

    @cached_property
    def known_triples(self) -> np.ndarray:
        """The triples that are known to be right, i32 [n, 3]."""
        return self.known(self)

    def entity_id(self, name: str, place: str) -> str:
        """Return the id of an entity, given its id or its unique name.

        Any other string is returned unchanged. Raises UserError, naming the place, for
        a name that several entities have.
        """
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
        """Return the number of an entity, given its id or its unique name.

        Raises UserError, naming the place, for an unknown or ambiguous one.
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
        """Return the triples as numbers, -1 for BLANK: i32 [n, 3].

        Raises UserError, naming the place, for parts that the graph does not have.
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
        """Return the graph with more entities and relations after its own.

        Its own keep their numbers.
        """
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
            known=lambda graph: self.known_triples,  # numbers do not change
            learnt=lambda graph: self.edges,
            _cache=self._cache if same else {},
        )

    def cached(self, name: str, make: Callable[[], Any], tokenizer: Any) -> Any:
        """Return the cached result of `make()`, by name and tokenizer.

        The result may depend only on the graph's parts, its settings and the tokenizer.
        Graphs made from this one by `with_known`, or by `with_names` without new names,
        share the cache.
        """
        key = name, tokenizer.identity
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def with_known(self, triples: np.ndarray) -> Self:
        """Return the graph with more triples that are known to be right."""
        more = self.known_triples
        both = np.concatenate([more, triples])
        return replace(self, known=lambda graph: both)

    def to_json(self) -> dict[str, Any]:
        """Return the parts of the graph that a checkpoint stores; no triples."""
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
        """Return a checkpoint's graph; known, learnt read the triples when needed."""
        texts = {name: Described(*text) for name, text in facts["texts"].items()}
        parts = facts["entities"], facts["relations"], texts
        # If the saved graph was not open, it has no texts of entities without triples.
        return cls(*parts, known, learnt, settings, is_open=True, is_saved=True)

    @cached_property
    def vocabulary(self) -> np.ndarray:
        """The JSON of entities, relations and texts, as bytes u8 [n]."""
        return np.frombuffer(json.dumps(self.to_json()).encode(), np.uint8)


def _only(
    what: str, plural: str, name: str, by_name: Mapping[str, list[str]], place: str
) -> str:
    """Return the only id with this name, or the name itself if there is none.

    Raises UserError for several ids.
    """
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
    return UserError(f"{place}: the {what} {name!r} is in no training triple{meant}")


def check_queries(triples: Sequence[Triple], labelled: bool, asks: str) -> None:
    """Raise UserError, naming the place, for a BLANK in labeled triples, and for
    queries that do not have exactly one BLANK, in the right part.

    asks: the parts that queries may ask for, as words of the message; "relation" or the
    ends.
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
                f"{t.place}: write {BLANK} in place of the {asks}, and nowhere "
                "else: it stands for what is asked for"
            )


def ranking_scores(
    greater: np.ndarray, equal: np.ndarray, names: Sequence[str] = METRICS
) -> dict[str, float]:
    """Compute the metrics of queries from the counts of `entity_ranks.count_above`.

    greater, equal: [n] each, the number of entities with a greater score than the right
    one, and of other entities with the same score. Metrics are those of pykeen's
    RankBasedEvaluator, with realistic ranks unless the name says otherwise.

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
    """Compute the metrics for each side: {"head": {...}, "tail": ...}."""
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

    If the graph has descriptions, each also has its "id". what: "entities" or
    "relations".
    """
    ids, found = getattr(graph, what), []
    pairs = zip(numbers.tolist(), probabilities.tolist(), strict=True)
    for number, probability in pairs:
        name = ids[number]
        one = {"name": graph.describe(name).name, "probability": probability}
        found.append(one | ({"id": name} if graph.texts else {}))
    return {what: found}

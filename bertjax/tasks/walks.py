# SPDX-License-Identifier: Apache-2.0
"""Draw random walks along the edges of a graph: the paths that completion trains on."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from bertjax.data import counter_rng

LONGEST = 3  # the most relations of a path, one token each (Guu et al. 2015: up to 5)
LENGTHS = counter_rng.fold(0, "path lengths")


@dataclass(frozen=True, eq=False)
class Walks:
    """The edges of a graph, sorted by the entity at which they begin.

    starts i64 [N + 1]: the first edge of each entity, and the end; relations, ends i32
    [E]; deep i64 [N]: how many of each entity's edges (its first ones) end at an entity
    with outgoing edges.
    """

    starts: np.ndarray
    relations: np.ndarray
    ends: np.ndarray
    deep: np.ndarray

    @classmethod
    def of(cls, triples: np.ndarray, entities: int) -> Self:
        """Build from triples i32 [n, 3]; entities: N."""
        heads, relations, tails = triples.T
        leaves = np.bincount(heads, minlength=entities)
        ends_there = leaves[tails] == 0
        order = np.lexsort((ends_there, heads))
        starts = np.concatenate([[0], np.cumsum(leaves)])
        deep = np.bincount(heads[~ends_there], minlength=entities)
        return cls(starts, relations[order], tails[order], deep)

    def reach(self, entities: np.ndarray) -> np.ndarray:
        """Return how many edges can be walked from entities, at most 2: i64 [n]."""
        leaves = np.diff(self.starts)[entities]
        return (leaves > 0).astype(np.int64) + (self.deep[entities] > 0)

    def walk(
        self, begins: np.ndarray, edges: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw walks of `edges` edges from the entities `begins`, i64 [b, S] each.

        edges must not exceed `reach`. keys: u64 [b]. Returns the relations of each
        walk, i64 [b, S, LONGEST - 1], padded with 0, and its last entity, i64 [b, S].
        """
        at = begins.astype(np.int64)
        walked = np.zeros((*at.shape, LONGEST - 1), np.int64)
        slots = np.arange(at.shape[1]) * (LONGEST - 1)
        for step in range(LONGEST - 1):
            left = edges - step
            goes = left > 0
            start = self.starts[at]
            choices = np.where(left > 1, self.deep[at], self.starts[at + 1] - start)
            drawn = counter_rng.below(
                keys[:, None], slots + step, np.maximum(choices, 1)
            )
            edge = np.where(goes, start + drawn, 0)
            walked[..., step] = np.where(goes, self.relations[edge], 0)
            at = np.where(goes, self.ends[edge], at)
        return walked, at


def draw_lengths(walks: Walks, tails: np.ndarray, longest: int) -> np.ndarray:
    """Draw the number of relations of the path that begins with each triple: i64 [n].

    It is uniform from 2 to `longest`, limited by the walks from the triple's tail; 1 if
    the tail has no outgoing edge.
    """
    most = 1 + np.minimum(walks.reach(tails), longest - 1)
    drawn = counter_rng.below(LENGTHS, np.arange(len(tails)), np.maximum(most - 1, 1))
    return np.where(most > 1, 2 + drawn, 1)

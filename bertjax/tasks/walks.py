# SPDX-License-Identifier: Apache-2.0
"""Random walks along the edges of a graph: the paths that completion learns from."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from bertjax.data import counter_rng

LONGEST = 3  # relations of a path (Guu et al. 2015 have up to 5; each is a token)
LENGTHS = counter_rng.fold(0, "path lengths")


@dataclass(frozen=True, eq=False)
class Walks:
    """The edges of a graph by the entity that they leave.

    starts i64 [N + 1]: the first edge of each entity, and the end; relations, ends i32
    [E]; deep i64 [N]: how many edges of each, its first ones, end where others begin.
    """

    starts: np.ndarray
    relations: np.ndarray
    ends: np.ndarray
    deep: np.ndarray

    @classmethod
    def of(cls, triples: np.ndarray, entities: int) -> Self:
        """Take the edges of triples i32 [n, 3]."""
        heads, relations, tails = triples.T
        leaves = np.bincount(heads, minlength=entities)
        ends_there = leaves[tails] == 0
        order = np.lexsort((ends_there, heads))
        starts = np.concatenate([[0], np.cumsum(leaves)])
        deep = np.bincount(heads[~ends_there], minlength=entities)
        return cls(starts, relations[order], tails[order], deep)

    def reach(self, entities: np.ndarray) -> np.ndarray:
        """Return how many edges can be walked from entities, 2 at most: i64 [n]."""
        leaves = np.diff(self.starts)[entities]
        return (leaves > 0).astype(np.int64) + (self.deep[entities] > 0)

    def walk(
        self, begins: np.ndarray, edges: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Walk so many edges from entities: i64 [b, S] each, at most what they reach.

        keys: u64 [b]. Returns the relations on the way, i64 [b, S, LONGEST - 1], 0
        where there are no more, and the entities where walks end, i64 [b, S].
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
    """Draw how many relations a path has that begins with each triple: i64 [n].

    From 2 to `longest`, all alike, as far as its tail leads on; 1 where it does not.
    """
    most = 1 + np.minimum(walks.reach(tails), longest - 1)
    drawn = counter_rng.below(LENGTHS, np.arange(len(tails)), np.maximum(most - 1, 1))
    return np.where(most > 1, 2 + drawn, 1)

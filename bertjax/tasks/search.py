# SPDX-License-Identifier: Apache-2.0
"""Exact search on the host, for several kinds of vectors.

All passages are scored, tile by tile, so the search is exact, and memory holds only one
tile of scores and of vectors; the vectors may be in a file (np.memmap). The score is
the inner product, or MaxSim for several vectors per text. Among equal scores the
earlier passage wins.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from bertjax import UserError

SCORES = 2**25  # floats per tile: memory stays within a few times 128 MiB
QUERIES = 1024  # at once, at most
Found = tuple[np.ndarray, np.ndarray]
Score = Callable[[slice, slice], np.ndarray]


class Index(Protocol):
    """The vectors of texts to search, or of queries.

    len(): the number of texts; nbytes: the size in memory. score(queries, a slice of
    the queries, a slice of the texts) -> f32 [q, p]; costs(queries): the number of
    floats that score allocates per pair, and per text. Kinds that models produce also
    have split(n), which returns the first n texts and the others.
    """

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray: ...
    def costs(self, queries: Any) -> tuple[int, int]:
        return 1, 1

    def search(
        self, queries: Any, leave: Sequence[int] | None = None, k: int = 100
    ) -> Found:
        """Return the k best passages for each query, best first.

        Returns numbers i64 [q, k], padded with -1, and scores f32 [q, k], padded with
        -inf. leave: per query, a passage to leave out, or -1. Passages with a NaN score
        are never found.
        """
        score = functools.partial(self.score, queries)
        return best(score, len(queries), len(self), leave, k, *self.costs(queries))


@dataclass(frozen=True, eq=False)
class Dense(Index):
    """One vector per text: f32 [n, D].

    >>> passages = Dense(np.array([[1.0, 0], [0, 1], [2, 0]], np.float32))
    >>> passages.search(Dense(np.eye(2, dtype=np.float32)), k=2)[0].tolist()
    [[2, 0], [1, 0]]
    """

    vectors: np.ndarray

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def nbytes(self) -> int:
        return int(self.vectors.nbytes)

    def split(self, n: int) -> tuple[Self, Self]:
        return type(self)(self.vectors[:n]), type(self)(self.vectors[n:])

    def tile(self, which: slice) -> np.ndarray:
        """Return the vectors of a slice of texts, f32."""
        return np.asarray(self.vectors[which], np.float32)

    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray:
        return queries.tile(rows) @ self.tile(which).T

    def costs(self, queries: Any) -> tuple[int, int]:
        return 1, self.vectors.shape[1]


@dataclass(frozen=True, eq=False)
class Sparse(Index):
    """A few weights per text: scipy's csr_array [n, V]."""

    weights: Any

    @classmethod
    def of_top(cls, weights: np.ndarray, terms: np.ndarray, width: int) -> Self:
        """Build from weights f32 [n, K] of pieces `terms` i32 [n, K]; width: V."""
        from scipy.sparse import csr_array

        rows, columns = np.nonzero(weights)
        values = weights[rows, columns], (rows, terms[rows, columns])
        return cls(csr_array(values, shape=(len(weights), width)))

    def __len__(self) -> int:
        return int(self.weights.shape[0])

    @property
    def width(self) -> int:
        """V, the number of pieces."""
        return int(self.weights.shape[1])

    @property
    def nbytes(self) -> int:
        parts = self.weights.data, self.weights.indices, self.weights.indptr
        return sum(int(x.nbytes) for x in parts)

    def split(self, n: int) -> tuple[Self, Self]:
        return type(self)(self.weights[:n]), type(self)(self.weights[n:])

    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray:
        return (queries.weights[rows] @ self.weights[which].T).toarray()


@dataclass(frozen=True, eq=False)
class MultiVectors(Index):
    """One vector per token: f32 [T, E]; text i has [offsets[i], offsets[i + 1]).

    Every text has at least one.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[np.ndarray]) -> Self:
        """Concatenate the vectors of texts, f32 [tokens, E] each."""
        return cls(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, text: int) -> np.ndarray:
        return self.tokens[self.offsets[text] : self.offsets[text + 1]]

    @property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes + self.offsets.nbytes)

    def split(self, n: int) -> tuple[Self, Self]:
        at = self.offsets[n]
        first = type(self)(self.tokens[:at], self.offsets[: n + 1])
        return first, type(self)(self.tokens[at:], self.offsets[n:] - at)

    def tile(self, which: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of a slice of texts, and where each text begins."""
        begins = self.offsets[which.start : which.stop + 1]
        tokens = self.tokens[begins[0] : begins[-1]]
        return np.asarray(tokens, np.float32), begins[:-1] - begins[0]

    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray:
        (asking, first), (tokens, begins) = queries.tile(rows), self.tile(which)
        products = np.maximum.reduceat(asking @ tokens.T, begins, axis=1)
        return np.add.reduceat(products, first, axis=0)

    def costs(self, queries: Any) -> tuple[int, int]:
        asked, longest = (int(np.diff(x.offsets).max()) for x in (queries, self))
        return asked * longest, longest * self.tokens.shape[1]


@dataclass(frozen=True, eq=False)
class Int8(Index):
    """Dense vectors in 8 bits per number: i8 [n, D] times a scale f32 [D].

    Queries are f32.
    """

    codes: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, vectors: np.ndarray) -> Self:
        """Round vectors to 127 steps up to the largest magnitude of each dimension.

        Raises UserError for numbers that are not finite.
        """
        size = np.zeros(vectors.shape[1], np.float32)
        for part in _parts(len(vectors), QUERIES * 16):
            size = np.maximum(size, np.abs(_finite(vectors[part])).max(0, initial=0))
        scale = np.maximum(size / 127, np.finfo(np.float32).tiny).astype(np.float32)
        codes = np.empty(vectors.shape, np.int8)
        for part in _parts(len(vectors), QUERIES * 16):
            codes[part] = np.rint(vectors[part] / scale)
        return cls(codes, scale)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scale.nbytes)

    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray:
        return (queries.tile(rows) * self.scale) @ self.codes[which].astype("f4").T

    def costs(self, queries: Any) -> tuple[int, int]:
        return 1, self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class Binary(Index):
    """The signs of dense vectors, one bit per number: u8 [n, ceil(D / 8)].

    Scores are inner products of vectors of +1 and -1 with f32 queries.
    """

    bits: np.ndarray
    width: int

    @classmethod
    def of(cls, vectors: np.ndarray) -> Self:
        """Store whether each number is above 0.

        Raises UserError for numbers that are not finite.
        """
        parts = _parts(len(vectors), QUERIES * 16)
        bits = [np.packbits(_finite(vectors[part]) > 0, axis=1) for part in parts]
        return cls(np.concatenate(bits), vectors.shape[1])

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def nbytes(self) -> int:
        return int(self.bits.nbytes)

    def score(self, queries: Any, rows: slice, which: slice) -> np.ndarray:
        bits = np.unpackbits(self.bits[which], axis=1, count=self.width)
        return queries.tile(rows) @ (2 * bits.astype(np.float32) - 1).T

    def costs(self, queries: Any) -> tuple[int, int]:
        return 1, 3 * self.width


def _finite(vectors: np.ndarray) -> np.ndarray:
    if not np.isfinite(vectors).all():
        raise UserError(
            "a vector has numbers that are not finite, which few bytes cannot keep: "
            "look for a text that the model cannot embed"
        )
    return vectors


PRECISIONS = {"float32": Dense, "int8": Int8.of, "binary": Binary.of}


def rescore(found: np.ndarray, queries: Dense, vectors: np.ndarray, k: int) -> Found:
    """Rank the results of a coarse search again by exact inner products: [q, k].

    found: i64 [q, more than k], -1 for none; vectors: f32 [n, D]; if they are in a
    file, only the vectors that were found are read.
    """
    k = min(k, found.shape[1])
    numbers = np.full((len(found), k), -1, np.int64)
    scores = np.full((len(found), k), -np.inf, np.float32)
    for row, passages in enumerate(found):
        passages = np.sort(passages[passages >= 0])
        products = np.asarray(vectors[passages], np.float32) @ queries.vectors[row]
        passages, products = (x[~np.isnan(products)] for x in (passages, products))
        order = np.argsort(-products, kind="stable")[:k]
        numbers[row, : len(order)] = passages[order]
        scores[row, : len(order)] = products[order]
    return numbers, scores


def best(
    score: Score,
    queries: int,
    passages: int,
    leave: Sequence[int] | None,
    k: int,
    cost: int = 1,
    width: int = 1,
) -> Found:
    """Return the k best of `passages` passages for each query, as Index.search does.

    score(slice of queries, slice of passages) -> f32 [q, p]; cost: the floats that it
    allocates per pair; width: per passage, for its vectors.
    """
    k = min(k, passages)
    left = np.full(queries, -1) if leave is None else np.asarray(leave)
    numbers = np.full((queries, k), -1, np.int64)
    scores = np.full((queries, k), -np.inf, np.float32)
    for rows in _parts(queries, min(QUERIES, max(1, SCORES // (16 * cost)))):
        count = rows.stop - rows.start
        own = numbers[rows], scores[rows]
        for which in _parts(passages, max(1, SCORES // max(count * cost, width))):
            found = score(rows, which)
            hidden = left[rows] - which.start
            some = np.flatnonzero((hidden >= 0) & (hidden < found.shape[1]))
            found[some, hidden[some]] = -np.inf
            merge(own, found, which.start)
    return numbers, scores


def merge(own: Found, scores: np.ndarray, first: int) -> None:
    """Merge the scores of a tile, f32 [q, p], into the k best so far, in place.

    first: the number of the tile's first passage; it is greater than all in `own`.
    """
    numbers, kept = own
    k, bound = kept.shape[1], kept[:, -1:]
    if np.isneginf(bound).any() and scores.shape[1] > k:
        scores = np.where(np.isnan(scores), -np.inf, scores)
        place = scores.shape[1] - k
        least = np.partition(scores, place, axis=1)[:, place, None]
        better = (scores > bound) & (scores >= least)
        # Of equal scores keep the first ones: sparse vectors score many passages 0.
        for row in np.flatnonzero(better.sum(axis=1) > k):
            equal = np.flatnonzero(scores[row] == least[row])
            better[row, equal[k - better[row].sum() :]] = False
    else:
        better = scores > bound  # False for NaN
    row, column = np.nonzero(better)
    if not len(row):
        return
    rows = np.concatenate([np.repeat(np.arange(len(kept)), k), row])
    names = np.concatenate([numbers.ravel(), first + column])
    values = np.concatenate([kept.ravel(), scores[row, column]])
    order = np.lexsort((names, -values, rows))
    begins = np.searchsorted(rows[order], np.arange(len(kept)))
    top = order[begins[:, None] + np.arange(k)]
    numbers[:], kept[:] = names[top], values[top]


def _parts(n: int, size: int) -> Iterator[slice]:
    for begin in range(0, n, size):
        yield slice(begin, min(begin + size, n))

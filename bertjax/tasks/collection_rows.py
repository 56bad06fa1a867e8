# SPDX-License-Identifier: Apache-2.0
"""The base class of rows of queries and passages, for training and for search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bertjax import counted
from bertjax.data.rendering import decode
from bertjax.tasks.task_rows import Batch, Lines, Ragged, Rows


@dataclass(frozen=True, eq=False)
class CollectionRows(Rows):
    """Queries and passages. When planned, a row is `length` tokens with several texts.

    texts: the token ids of the queries, then of the passages. grades, own, taught: the
    grades, own and scores of a Collection. longest: the most tokens of a text, special
    tokens included.
    """

    texts: Ragged
    grades: Sequence[Mapping[int, int]]
    own: np.ndarray
    taught: Sequence[Mapping[int, float]] = ()
    longest: int = 0

    @property
    def queries(self) -> int:
        """The number of queries."""
        return len(self.grades)

    @cached_property
    def kept(self) -> np.ndarray:
        """The number of kept tokens per text, special ones included: i64 [texts]."""
        return np.minimum(self.texts.lengths + 2, self.longest)

    @cached_property
    def cut(self) -> np.ndarray:
        """The number of tokens cut off per text: i64 [texts]."""
        return self.texts.lengths + 2 - self.kept

    @cached_property
    def graded(self) -> np.ndarray:
        """i64 [grades, 3]: query, passage, grade."""
        graded = [(q, p, g) for q, of in enumerate(self.grades) for p, g in of.items()]
        return np.array(graded, np.int64)

    @property
    def answers(self) -> np.ndarray:
        """i64 [n, 2]: query, passage that answers it."""
        return self.graded[self.graded[:, 2] > 0, :2]

    def _seen(self, text: int) -> bytes:
        """The tokens of a text that the model sees; cut texts may become equal."""
        room = self.longest - 2 if self.longest else None
        return self.texts[text][:room].tobytes()

    def _first_alike(self, begin: int, end: int) -> np.ndarray:
        """Return, for each text, the first text with the same tokens.

        Both are numbered from `begin`.
        """
        first: dict[bytes, int] = {}
        names = map(self._seen, range(begin, end))
        return np.array([first.setdefault(x, i) for i, x in enumerate(names)], np.int32)

    @cached_property
    def identity(self) -> np.ndarray:
        """i32 [passages]: the first passage with the same tokens."""
        return self._first_alike(self.queries, len(self.texts.lengths))

    @cached_property
    def asked(self) -> np.ndarray:
        """i32 [queries]: the first query with the same tokens."""
        return self._first_alike(0, self.queries)

    def _keys(self, query: Any, passage: Any) -> np.ndarray:
        """Return one number per (query, passage); copies have the same number."""
        places = self.asked[query].astype(np.int64) * len(self.identity)
        return places + self.identity[passage]

    @cached_property
    def relevant_keys(self) -> np.ndarray:
        """i64 [n], ascending: `_keys` of passages that are not negatives of a query.

        They answer it, or a query with the same tokens, or are the query itself.
        """
        itself = np.flatnonzero(self.own >= 0)
        itself = np.stack([itself, self.own[itself]], axis=1)
        return np.unique(self._keys(*np.concatenate([self.answers, itself]).T))

    def is_relevant(self, query: Any, passage: Any) -> np.ndarray:
        """Return whether passages are not negatives of the queries: bool [n]."""
        keys, known = self._keys(query, passage), self.relevant_keys
        return known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys

    def arrays(self) -> list[np.ndarray | None]:
        arrays = [self.texts.tokens, self.texts.offsets, self.graded, self.own]
        if any(self.taught):  # workdirs from before there were scores lack this array
            each = [
                (q, p, s) for q, of in enumerate(self.taught) for p, s in of.items()
            ]
            arrays.append(np.array(each, np.float64))
        return arrays

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the texts of a row, which do not see each other."""
        for segment, name in enumerate(self.names_of(example), 1):
            is_part = row["segment_ids"] == segment
            if is_part.any():
                yield name, decode(tokenizer, row["input_ids"][is_part])

    def label_counts(self) -> dict[str, dict[str, float]]:
        answers = len(self.answers)
        counts = {"queries": self.queries, "answers": answers}
        counts["passages"] = len(self.texts.lengths) - self.queries
        return {"texts": counts | {"given negatives": len(self.graded) - answers}}

    def of_columns(self, labelled: bool) -> str:
        return ""  # a folder has no columns; its files were reported when it was read

    def notes(self) -> Iterator[str]:
        texts, rows = counted(len(self.kept), "text"), counted(self.n, "row")
        yield f"{texts}, {rows} of {self.length} tokens"
        if cut := int((self.cut > 0).sum()):
            yield f"{cut:,} of {len(self.cut):,} texts are cut at {self.longest}"

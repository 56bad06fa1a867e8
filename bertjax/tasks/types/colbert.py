# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and passages for one vector per token, based on types/retrieve.py."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax.tasks import retrieval_options as options
from bertjax.tasks import search
from bertjax.tasks.task_rows import Outputs
from bertjax.tasks.types import retrieve


@dataclass(frozen=True, eq=False)
class TokensSearched(retrieve.Searched):
    """Rows of the texts to search, with one vector per token."""

    def vectors(self, outputs: Outputs, example: np.ndarray) -> search.Index:
        """Return the vectors of the texts, from "tokens" f32 [n, L, E].

        The texts of a row follow one another.
        """
        texts = []
        for row, members in zip(
            outputs["tokens"], self.members(example).tolist(), strict=True
        ):
            at = 0
            for text in members:
                size = int(self.kept[text]) if text >= 0 else 0
                texts += [row[at : at + size]] * (text >= 0)
                at += size
        return search.MultiVectors.of(texts)


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    return options.head_options(task, "embedding_size")


def _facts(config: ConfigDict) -> dict[str, Any]:
    """Return how to make vectors (sentence_transformers.py)."""
    how = {"kind": "multi_vector", "normalize": True, "dot": True}
    return {"sentences": how | {"longest": config.data.length}}


TASK_TYPE = replace(
    retrieve.TASK_TYPE,
    make_rows=functools.partial(
        retrieve.make_pairs, searched=TokensSearched, with_query_positions=True
    ),
    outputs=("tokens",),
    settings=("temperature", "embedding_size", *options.SHARED),
    check=options.check_pairs,
    head_options=_head_options,
    facts=_facts,
)

# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and passages for sparse vectors, based on types/retrieve.py."""

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
class SparseSearched(retrieve.Searched):
    """Rows of the texts to search, with the largest weights of each text."""

    def vectors(self, outputs: Outputs, example: np.ndarray) -> search.Index:
        """Return the sparse vectors of the texts.

        They come from "weights" f32 and "terms" i32 [n, TOGETHER, K].
        """
        is_text = self.members(example) >= 0
        weights, terms = (np.asarray(outputs[x])[is_text] for x in ("weights", "terms"))
        # The padded vocabulary of an imported model may be larger than its tokenizer's.
        width = max(len(self.counts), 1 + int(terms.max()))
        return search.Sparse.of_top(weights, terms, width)


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    return options.head_options(task, "query_flops", "passage_flops", "active")


def _facts(config: ConfigDict) -> dict[str, Any]:
    """Return how to make vectors (sentence_transformers.py)."""
    how = {"kind": "sparse", "dot": True, "longest": config.data.length}
    return {"sentences": how | {"active": config.task.active}}


TASK_TYPE = replace(
    retrieve.TASK_TYPE,
    make_rows=functools.partial(retrieve.make_pairs, searched=SparseSearched),
    outputs=("weights", "terms"),
    settings=(
        *("temperature", "query_flops", "passage_flops", "active"),
        *options.SHARED,
    ),
    check=options.check_pairs,
    head_options=_head_options,
    facts=_facts,
)

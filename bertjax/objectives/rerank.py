# SPDX-License-Identifier: Apache-2.0
"""A score of a query read together with a passage: a cross-encoder.

The pooled vector of [CLS] query [SEP] passage [SEP] makes the score (Nogueira and Cho
2019, arXiv 1901.04085). The loss is a softmax's over the passage that answers a query
and its negatives (Gao et al. 2021, arXiv 2101.08751, equation 7), a row's sequences
[B, C, L] as of objective=choose.
"""

import functools

import jax

from bertjax.objectives import choose
from bertjax.objectives.base import Batch, Head
from bertjax.objectives.task_head import make_task_head


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores` f32 [B] of rows of one sequence, of others [B C]."""
    return {"scores": logits[:, 0]}


def make_head(choices: int = 5) -> Head:
    """Make the head. choices: passages of a row, where batches are to be made up."""
    labels = functools.partial(choose.labels, choices)

    def is_learnt(batch: Batch) -> bool:
        return "choice_weights" in batch

    parts = choose.loss, outputs, labels  # the first of a row is right
    return make_task_head("rerank", 1, *parts, has_loss=is_learnt)

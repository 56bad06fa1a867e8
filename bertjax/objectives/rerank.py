# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder: score a query and a passage that are read together.

The score is computed from the pooled vector of [CLS] query [SEP] passage [SEP]
(Nogueira and Cho 2019, arXiv 1901.04085). The loss is the cross-entropy of a softmax
over the passage that answers a query and its negatives (Gao et al. 2021, arXiv
2101.08751, equation 7). They are the sequences of one row, [B, C, L], as in
objective=choose.
"""

import functools

import jax

from bertjax.objectives import choose
from bertjax.objectives.base import Batch, Head
from bertjax.objectives.task_head import make_task_head


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores`, f32 [B], or [B C] for rows of C sequences."""
    return {"scores": logits[:, 0]}


def make_head(choices: int = 5) -> Head:
    """Make the head; choices: passages per row, in batches that are made up."""
    labels = functools.partial(choose.labels, choices)

    def is_learnt(batch: Batch) -> bool:
        return "choice_weights" in batch

    parts = choose.loss, outputs, labels  # the right choice is a row's first
    return make_task_head("rerank", 1, *parts, has_loss=is_learnt)

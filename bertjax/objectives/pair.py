# SPDX-License-Identifier: Apache-2.0
"""A two-way head on the pooled vector: is a pair of segments in order (0) or not (1)?

What "not" means is the host's affair (sequences/sentence_pairs.py): a random partner
(next-sentence prediction) or the two halves swapped (sentence-order prediction).
"""

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import NOWHERE, Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy


def pair_weights(name: str, batch: Batch) -> jax.Array:
    """Return 1 for each pair, f32 like the labels: [B], or [B, S] in packed rows.

    Rows that fill up a last batch of an evaluation, and unused slots, weigh 0.
    """
    labels = batch[f"{name}_labels"]
    weights = batch.get("cls_weights", jnp.ones(labels.shape, jnp.float32))
    if "example_weights" in batch:
        rows = batch["example_weights"]
        weights = weights * rows.reshape(-1, *(1,) * (labels.ndim - 1))
    return weights


def make_pair_head(name: str) -> Head:
    """Make the head of a pair rule.

    Its labels, `<name>_labels` i32 [B] or [B, S], are scored by the pooled vectors [B,
    D] or [B, S, D].
    """

    def sums(
        params: Params,
        cfg: EncoderConfig,
        encoded: Encoded,
        batch: Batch,
        rng: jax.Array | None,
    ) -> dict[str, Sum]:
        logits = heads.class_logits(params[name], encoded.pooled)
        args = logits, batch[f"{name}_labels"], pair_weights(name, batch)
        loss, right = cross_entropy(*args), accuracy(*args)
        return {f"{name}_loss": loss, f"{name}_accuracy": right}

    return Head(
        name,
        heads.init_classes,
        lambda batch: {f"{name}_loss": jnp.sum(pair_weights(name, batch))},
        sums,
        reads=NOWHERE,
        needs=frozenset({name}),
        pooled=True,
    )

# SPDX-License-Identifier: Apache-2.0
"""Vectors of queries and passages by one encoder: the right passage is the nearest.

-log softmax of a query's passage among all passages of the global batch, those given
as negatives and those of other queries (Karpukhin et al. 2020, DPR, equation 2; with
normalised vectors and a temperature: Gao et al. 2021, SimCSE, equation 1). A passage
that answers a query is never its negative, whoever's row it stands in.
"""

import jax
import jax.numpy as jnp

from bertjax.models.encoder import Encoded
from bertjax.models.pooling import first_tokens, means, normalize_vectors
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.task_head import row_weights
from bertjax.parallel.sharding import constrain

HIDDEN = -1e9  # the score of a passage that is no negative
PRECISE = jax.lax.Precision.HIGHEST  # a TPU would round vectors to 8 bits


def vectors(encoded: Encoded, batch: Batch, cls: bool, normalize: bool) -> jax.Array:
    """Return the vector of each text of packed rows: f32 [B, S, D].

    The mean over its tokens, special ones included, or the first token's. A slot
    without a text has some vector.
    """
    with jax.named_scope("pooling"):
        pool = first_tokens if cls else means
        out = pool(encoded.hidden.astype(jnp.float32), batch)
        return normalize_vectors(out) if normalize else out


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of rows, f32 []; nothing of rows that are only searched."""
    if "relevant_numbers" not in batch:
        return {}
    return {"retrieve_loss": jnp.sum(row_weights(batch))}


def score(texts: jax.Array, temperature: float, batch: Batch) -> dict[str, Sum]:
    """Score each row's query, slot 0, by its passage, slot 1, among all passages.

    texts: their vectors, f32 [B, S, D]. passage_numbers i32 [B, S - 1]: equal for equal
    passages, -1 for none; relevant_numbers i32 [B, R]: those that answer the query,
    then -1. Rows that are only searched have neither, and no loss.
    """
    queries, passages = texts[:, 0], texts[:, 1:]
    rows, each, width = passages.shape
    # Every device sees the passages of all.
    passages = constrain(passages.reshape(rows * each, width), "_ _")
    numbers = constrain(batch["passage_numbers"].reshape(rows * each), "_")
    with jax.named_scope("scores"):
        scores = jnp.matmul(queries, passages.T, precision=PRECISE) / temperature
    answers = jnp.any(batch["relevant_numbers"][:, :, None] == numbers, axis=1)
    own = jnp.arange(rows, dtype=jnp.int32) * each
    others = jnp.arange(rows * each) != own[:, None]
    scores = jnp.where(others & (answers | (numbers < 0)), HIDDEN, scores)
    args = scores, own, row_weights(batch)
    return {"retrieve_loss": cross_entropy(*args), "retrieve_accuracy": accuracy(*args)}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name what a batch of queries and a passage each holds beside tokens."""
    sizes = {"segment_ids": length, "position_ids": length, "cls_positions": 2}
    sizes |= {"passage_numbers": 1, "relevant_numbers": 1}
    return {k: jax.ShapeDtypeStruct((rows, n), jnp.int32) for k, n in sizes.items()}


def make_head(
    cls: bool = False, normalize: bool = True, temperature: float = 0.05
) -> Head:
    """Make a head without parameters; its outputs are the `vectors` f32 [B, S, D].

    A task's options come from task.* of a config.
    """

    def sums(params, cfg, encoded, batch, rng):
        if "relevant_numbers" not in batch:
            return {}
        return score(vectors(encoded, batch, cls, normalize), temperature, batch)

    def outputs(params, cfg, encoded, batch):
        return {"vectors": vectors(encoded, batch, cls, normalize)}

    return Head(
        "retrieve",
        lambda rng, cfg: {},
        weights,
        sums,
        reads=EVERYWHERE,
        task_type="retrieve",
        whole_batch=0,  # an evaluation has no loss: vectors are made row by row
        outputs=outputs,
        labels=labels,
    )

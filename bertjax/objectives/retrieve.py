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
from bertjax.objectives.losses import cross_entropy, kl_divergence
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.task_head import row_weights
from bertjax.objectives.teacher import Soft, Teacher
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


def passage_scores(
    texts: jax.Array, temperature: float, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Score each row's query, slot 0, by all passages: f32 [B, B (S - 1)].

    texts: their vectors, f32 [B, S, D]. passage_numbers i32 [B, S - 1]: equal for equal
    passages, -1 for none; relevant_numbers i32 [B, R]: those that answer the query,
    then -1. Also returns which column is a row's own passage, slot 1, i32 [B]; what is
    neither that nor a negative has the score HIDDEN.
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
    return jnp.where(others & (answers | (numbers < 0)), HIDDEN, scores), own


def score(texts: jax.Array, temperature: float, batch: Batch) -> dict[str, Sum]:
    """Score each row's query by its passage among all passages (`passage_scores`)."""
    args = *passage_scores(texts, temperature, batch), row_weights(batch)
    return {"retrieve_loss": cross_entropy(*args), "retrieve_accuracy": accuracy(*args)}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name what a batch of queries and a passage each holds beside tokens."""
    sizes = {"segment_ids": length, "position_ids": length, "cls_positions": 2}
    sizes |= {"passage_numbers": 1, "relevant_numbers": 1}
    return {k: jax.ShapeDtypeStruct((rows, n), jnp.int32) for k, n in sizes.items()}


def make_head(
    cls: bool = False,
    normalize: bool = True,
    temperature: float = 0.05,
    teacher_weight: float = 0.5,
    teacher_temperature: float = 2.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make a head without parameters; its outputs are the `vectors` f32 [B, S, D].

    A task's options come from task.* of a config. With a teacher, whose vectors may
    have another width, its distribution over the passages weighs teacher_weight (Soft).
    Rows that are only searched have no relevant_numbers, and no loss.
    """

    def soft_loss(own: jax.Array, known: jax.Array, batch: Batch, t: float) -> Sum:
        return kl_divergence(own, known, row_weights(batch), t)

    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    taught = teacher and teacher.pooled(False)
    terms = ["retrieve_loss", *["retrieve_kl_loss"] * bool(taught)]

    def weights(batch: Batch) -> dict[str, jax.Array]:
        if "relevant_numbers" not in batch:
            return {}
        return dict.fromkeys(terms, jnp.sum(row_weights(batch)))

    def sums(params, cfg, encoded, batch, rng):
        if "relevant_numbers" not in batch:
            return {}
        texts = vectors(encoded, batch, cls, normalize)
        found = score(texts, temperature, batch)
        if taught:
            theirs = vectors(taught.encode(params, batch), batch, cls, normalize)
            both = (passage_scores(x, temperature, batch)[0] for x in (texts, theirs))
            found["retrieve_kl_loss"] = soft.loss(*both, batch, soft.temperature)
        return found

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
        coefficients=soft.coefficients("retrieve"),
        flops=taught and taught.head_flops,
        init_teacher=taught and taught.init,
    )

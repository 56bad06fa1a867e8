# SPDX-License-Identifier: Apache-2.0
"""Vectors of queries and passages by one encoder: the right passage is the nearest.

The losses are those of ranking.py, of inner products. With widths they are also those
of the first numbers of each vector (Kusupati et al. 2022, Matryoshka, arXiv 2205.13147,
equation 1), which are then vectors of their own.
"""

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.models.pooling import normalize_vectors, text_vectors
from bertjax.objectives import ranking
from bertjax.objectives.base import EVERYWHERE, Batch, Head
from bertjax.objectives.classify import soft_loss
from bertjax.objectives.ranking import PRECISE, Ranking
from bertjax.objectives.task_head import row_weights
from bertjax.objectives.teacher import Soft, Teacher
from bertjax.parallel.sharding import gather_rows

NAME = "retrieve"


def vectors(encoded: Encoded, batch: Batch, cls: bool, normalize: bool) -> jax.Array:
    """Return the vector of each text of packed rows: f32 [B, S, D].

    The mean over its tokens, special ones included, or the first token's.
    """
    return text_vectors(encoded.hidden, batch, "cls" if cls else "mean", normalize)


def product_scores(texts: jax.Array, temperature: float) -> jax.Array:
    """Score each row's query, slot 0, by all passages: f32 [B, B (S - 1)].

    texts: their vectors, f32 [B, S, D].
    """
    # Every device sees the passages of all.
    passages = gather_rows(texts[:, 1:].reshape(-1, texts.shape[-1]))
    with jax.named_scope("scores"):
        return jnp.matmul(texts[:, 0], passages.T, precision=PRECISE) / temperature


def read_widths(widths: str | int) -> list[int]:
    """Read the option: "32/64", or one number; "" for none."""
    return [int(width) for width in str(widths).split("/") if width]


def check_widths(widths: list[int], size: int) -> None:
    """Refuse widths that vectors of that size do not have. UserError."""
    if wide := [width for width in widths if not 0 < width <= size]:
        raise UserError(f"task.widths: {wide[0]} is no width of vectors of {size}")


def shorten(texts: jax.Array, width: int, normalize: bool) -> jax.Array:
    """Take the first numbers of vectors, again of length 1 where they were so."""
    part = texts[..., :width]
    return normalize_vectors(part) if normalize else part


def make_head(
    cls: bool = False,
    normalize: bool = True,
    temperature: float = 0.05,
    widths: str | int = "",
    margin_weight: float = 0.0,
    chunks: int = 1,
    teacher_weight: float = 0.5,
    teacher_temperature: float = 2.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make a head without parameters; its outputs are the `vectors` f32 [B, S, D].

    A task's options come from task.* of a config; widths: as `read_widths` has them,
    each with a loss of its own, retrieve_WIDTH_loss, of the weight of the whole's. With
    a teacher, whose vectors may have another width, its distribution over the passages
    weighs teacher_weight (Soft). Rows that are only searched have no relevant_numbers,
    and no loss. Raises UserError for margins beside a teacher.
    """
    parts = read_widths(widths)
    losses = Ranking([NAME, *(f"{NAME}_{w}" for w in parts)], margin_weight)

    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    taught = teacher and teacher.pooled(False)
    if taught and margin_weight:
        raise UserError(
            f"task.margin_weight={margin_weight}: teacher= is another way of learning "
            "from a model: leave one of the two out"
        )

    def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
        check_widths(parts, cfg.hidden_size)
        return {}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        out = losses.weights(batch)
        if out and taught:
            out[f"{NAME}_kl_loss"] = jnp.sum(row_weights(batch))
        return out

    def reduce(params, cfg, encoded, batch):
        return vectors(encoded, batch, cls, normalize)

    def sums(params, cfg, texts, batch, rng):
        if not ranking.has_losses(batch):
            return {}
        scores = {NAME: product_scores(texts, temperature)}
        for width in parts:
            part = shorten(texts, width, normalize)
            scores[f"{NAME}_{width}"] = product_scores(part, temperature)
        found = losses.sums(scores, batch)
        if taught:
            theirs = vectors(taught.encode(params, batch), batch, cls, normalize)
            both = scores[NAME], product_scores(theirs, temperature)
            both = (ranking.hide_others(x, batch)[0] for x in both)
            found[f"{NAME}_kl_loss"] = soft.loss(*both, batch, soft.temperature)
        return found

    return Head(
        NAME,
        init,
        weights,
        sums,
        reads=EVERYWHERE,
        task_type=NAME,
        whole_batch=0,  # an evaluation has no loss: vectors are made row by row
        outputs=lambda params, cfg, texts, batch: {"vectors": texts},
        labels=losses.labels,
        coefficients=losses.coefficients | soft.coefficients(NAME),
        flops=taught and taught.head_flops,
        init_teacher=taught and taught.init,
        reduce=reduce,
        chunks=chunks,
    )

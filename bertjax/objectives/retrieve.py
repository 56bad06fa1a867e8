# SPDX-License-Identifier: Apache-2.0
"""Dense retrieval: one encoder makes the vectors of queries and passages.

Scores are inner products; the losses are those of ranking.py. With `widths` there are
also losses of the vectors' first numbers, so that shortened vectors can be used alone
(Kusupati et al. 2022, Matryoshka, arXiv 2205.13147, equation 1).
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

    It is the mean over the text's tokens, special tokens included; with cls it is the
    first token's.
    """
    return text_vectors(encoded.hidden, batch, "cls" if cls else "mean", normalize)


def product_scores(texts: jax.Array, temperature: float) -> jax.Array:
    """Return the scores of each row's query, slot 0, and all passages: f32
    [B, B (S - 1)].

    texts: their vectors, f32 [B, S, D].
    """
    # Every device needs the passages of all devices.
    passages = gather_rows(texts[:, 1:].reshape(-1, texts.shape[-1]))
    with jax.named_scope("scores"):
        return jnp.matmul(texts[:, 0], passages.T, precision=PRECISE) / temperature


def read_widths(widths: str | int) -> list[int]:
    """Parse the option: "32/64", or one number; "" for none."""
    return [int(width) for width in str(widths).split("/") if width]


def check_widths(widths: list[int], size: int) -> None:
    """Raise UserError for widths outside 1 to `size`, the width of the vectors."""
    if wide := [width for width in widths if not 0 < width <= size]:
        raise UserError(
            f"task.widths: {wide[0]} must be from 1 to {size}, the width of the vectors"
        )


def shorten(texts: jax.Array, width: int, normalize: bool) -> jax.Array:
    """Return the first `width` numbers of vectors, normalized again if `normalize`."""
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
    """Make a head without parameters; its outputs are the `vectors`, f32 [B, S, D].

    A task sets the options from task.* of its config. widths: see `read_widths`; each
    has its own loss, retrieve_WIDTH_loss, with the same factor as retrieve_loss. A
    teacher's vectors may have another width; the KL divergence from its distribution
    over the passages has the factor teacher_weight (Soft). Rows that are only encoded
    for search have no relevant_numbers and no loss. Raises UserError for a
    margin_weight together with a teacher.
    """
    parts = read_widths(widths)
    losses = Ranking([NAME, *(f"{NAME}_{w}" for w in parts)], margin_weight)

    soft = Soft(teacher, soft_loss, teacher_weight, teacher_temperature)
    taught = teacher and teacher.pooled(False)
    if taught and margin_weight:
        raise UserError(
            f"task.margin_weight={margin_weight}: config.teacher teaches too: give "
            "one of the two"
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
        whole_batch=0,  # evaluations have no loss, only the vectors of each row
        outputs=lambda params, cfg, texts, batch: {"vectors": texts},
        labels=losses.labels,
        coefficients=losses.coefficients | soft.coefficients(NAME),
        flops=taught and taught.head_flops,
        init_teacher=taught and taught.init,
        reduce=reduce,
        chunks=chunks,
    )

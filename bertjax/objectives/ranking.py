# SPDX-License-Identifier: Apache-2.0
"""What the heads of retrieval share: a query's passage among all of the global batch.

A row is a packed one (tasks/types/retrieve.py): its first text is a query, the second a
passage that answers it, the others are given negatives. How texts become vectors, and
how these are compared, is each head's own (retrieve, splade, colbert).

-log softmax of a query's passage among all passages of the global batch, those given
as negatives and those of other queries (Karpukhin et al. 2020, DPR, equation 2; with
normalised vectors and a temperature: Gao et al. 2021, SimCSE, equation 1). A passage
that answers a query is never its negative, whoever's row it stands in.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.objectives.base import Batch, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.task_head import row_weights
from bertjax.parallel.sharding import gather_rows

HIDDEN = -1e9  # the score of a passage that is no negative
PRECISE = jax.lax.Precision.HIGHEST  # a TPU would round vectors to 8 bits


def hide_others(scores: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Hide what is no negative in scores of queries by passages, f32 [B, B (S - 1)].

    passage_numbers i32 [B, S - 1]: equal for equal passages, -1 for none;
    relevant_numbers i32 [B, R]: those that answer the query, then -1. Also returns
    which column is a row's own passage, slot 1, i32 [B]; what is neither that nor a
    negative has the score HIDDEN.
    """
    rows, each = batch["passage_numbers"].shape
    numbers = gather_rows(batch["passage_numbers"].reshape(rows * each))
    answers = jnp.any(batch["relevant_numbers"][:, :, None] == numbers, axis=1)
    own = jnp.arange(rows, dtype=jnp.int32) * each
    others = jnp.arange(rows * each) != own[:, None]
    return jnp.where(others & (answers | (numbers < 0)), HIDDEN, scores), own


def contrast(scores: jax.Array, batch: Batch) -> tuple[Sum, Sum]:
    """Return loss and accuracy of each row's own passage among all: f32 [B, B (S - 1)].

    The loss is sentence-transformers' MultipleNegativesRankingLoss, but for what
    `hide_others` hides.
    """
    args = *hide_others(scores, batch), row_weights(batch)
    return cross_entropy(*args), accuracy(*args)


def margin_weights(batch: Batch) -> jax.Array:
    """Return 1 for each given negative whose margin a teacher knows: f32 [B, S - 2].

    teacher_weights f32 [B, S - 1]: 1 where teacher_scores f32 [B, S - 1] has a score.
    Raises UserError where the rows have none.
    """
    if "teacher_weights" not in batch or batch["teacher_weights"].shape[1] < 2:
        raise UserError(
            "task.margin_weight is more than 0, and data.train has no scores of a "
            "teacher: JSON lines with query, positive, negatives and scores, as "
            "bertjax.evaluate --what=retrieval --mine=FILE --rerank=MODEL writes them"
        )
    known = batch["teacher_weights"]
    return known[:, :1] * known[:, 1:] * row_weights(batch)[:, None]


def margin_error(scores: jax.Array, batch: Batch) -> Sum:
    """Square how far margins of own passages over given negatives are from a teacher's.

    scores: f32 [B, B (S - 1)]. (Hofstaetter et al. 2020, arXiv 2010.02666, equation 3.)
    """
    rows, each = batch["passage_numbers"].shape
    columns = jnp.arange(rows)[:, None] * each + jnp.arange(each)
    own, known = jnp.take_along_axis(scores, columns, 1), batch["teacher_scores"]
    ours, theirs = (x[:, :1] - x[:, 1:] for x in (own, known))
    weights = margin_weights(batch)
    error = jnp.square(ours - jnp.where(weights > 0, theirs, 0.0))
    return Sum(jnp.sum(weights * error), jnp.sum(weights))


class Ranking:
    """The losses of one head's scores: their names, weights, coefficients.

    names: what begins the names of the losses, one for each set of scores.
    margin_weight: the share of margin_error in the loss, `contrast` has the rest.
    Raises UserError for one that is no share.
    """

    def __init__(self, names: Iterable[str], margin_weight: float) -> None:
        if not 0 <= margin_weight <= 1:
            raise UserError(f"task.margin_weight={margin_weight} must be from 0 to 1")
        self.names, self.share = [*names], margin_weight

    @property
    def coefficients(self) -> dict[str, float]:
        """{term: its factor}; {} without margins."""
        if not self.share:
            return {}
        parts = {"loss": 1 - self.share, "margin_loss": self.share}
        return {f"{x}_{part}": f for x in self.names for part, f in parts.items()}

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """{term: global weight}; {} for rows that are only searched."""
        if not has_losses(batch):
            return {}
        rows = jnp.sum(row_weights(batch))
        out = {f"{name}_loss": rows for name in self.names}
        if self.share:
            total = jnp.sum(margin_weights(batch))
            out |= {f"{name}_margin_loss": total for name in self.names}
        return out

    def sums(self, scores: Mapping[str, jax.Array], batch: Batch) -> dict[str, Sum]:
        """Return losses and accuracies. scores: of each of the names."""
        out = {}
        for name, each in scores.items():
            out[f"{name}_loss"], out[f"{name}_accuracy"] = contrast(each, batch)
            if self.share:
                out[f"{name}_margin_loss"] = margin_error(each, batch)
        return out

    def labels(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Name what a batch holds beside tokens: a query, a passage, and where there
        are margins a negative."""
        texts = 3 if self.share else 2
        sizes = {"segment_ids": length, "position_ids": length, "cls_positions": texts}
        sizes |= {"passage_numbers": texts - 1, "relevant_numbers": 1}
        out = {k: jax.ShapeDtypeStruct((rows, n), jnp.int32) for k, n in sizes.items()}
        of_teacher = ("teacher_scores", "teacher_weights") if self.share else ()
        shape = jax.ShapeDtypeStruct((rows, texts - 1), jnp.float32)
        return out | dict.fromkeys(of_teacher, shape)


def has_losses(batch: Batch) -> bool:
    """False for rows that are only searched."""
    return "relevant_numbers" in batch

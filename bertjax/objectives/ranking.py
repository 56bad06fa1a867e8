# SPDX-License-Identifier: Apache-2.0
"""The losses of the retrieval heads, with in-batch negatives from the global batch.

Rows are packed (tasks/types/retrieve.py): the first text is a query, the second a
passage that answers it, and the others are hard negatives. The heads (retrieve, splade,
colbert) differ in how they make vectors of texts and compare them.

The loss is -log softmax of a query's passage among all passages of the global batch:
its hard negatives, and the passages and hard negatives of other queries (Karpukhin et
al. 2020, DPR, equation 2; with normalized vectors and a temperature: Gao et al. 2021,
SimCSE, equation 1). A passage that answers a query is never its negative, whichever row
it is in.
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

HIDDEN = -1e9  # the score of a passage that does not count
# By default a TPU would round vectors to bfloat16, which has 8 significant bits.
PRECISE = jax.lax.Precision.HIGHEST


def hide_others(scores: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Set the scores of passages that are not negatives to HIDDEN.

    scores: of queries and passages, f32 [B, B (S - 1)]. The batch has passage_numbers
    i32 [B, S - 1], equal for equal passages, -1 for none; relevant_numbers i32 [B, R],
    the passages that answer the query, padded with -1. Returns the scores, and i32 [B]:
    the column of each row's own passage (slot 1), which is not hidden.
    """
    rows, each = batch["passage_numbers"].shape
    numbers = gather_rows(batch["passage_numbers"].reshape(rows * each))
    answers = jnp.any(batch["relevant_numbers"][:, :, None] == numbers, axis=1)
    own = jnp.arange(rows, dtype=jnp.int32) * each
    others = jnp.arange(rows * each) != own[:, None]
    return jnp.where(others & (answers | (numbers < 0)), HIDDEN, scores), own


def contrast(scores: jax.Array, batch: Batch) -> tuple[Sum, Sum]:
    """Return the contrastive loss and the accuracy of each row's own passage.

    scores: f32 [B, B (S - 1)]. The loss is sentence-transformers'
    MultipleNegativesRankingLoss, except for the passages that `hide_others` hides.
    """
    args = *hide_others(scores, batch), row_weights(batch)
    return cross_entropy(*args), accuracy(*args)


def margin_weights(batch: Batch) -> jax.Array:
    """Return 1 for each hard negative with a margin from a teacher: f32 [B, S - 2].

    The batch has teacher_weights f32 [B, S - 1], 1 where teacher_scores f32 [B, S - 1]
    has a score. Raises UserError if it has none.
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
    """Sum the squared differences between the student's and the teacher's margins.

    A margin is the score of a row's own passage minus that of a hard negative. scores:
    f32 [B, B (S - 1)]. (Hofstaetter et al. 2020, arXiv 2010.02666, equation 3.)
    """
    rows, each = batch["passage_numbers"].shape
    columns = jnp.arange(rows)[:, None] * each + jnp.arange(each)
    own, known = jnp.take_along_axis(scores, columns, 1), batch["teacher_scores"]
    ours, theirs = (x[:, :1] - x[:, 1:] for x in (own, known))
    weights = margin_weights(batch)
    error = jnp.square(ours - jnp.where(weights > 0, theirs, 0.0))
    return Sum(jnp.sum(weights * error), jnp.sum(weights))


class Ranking:
    """The losses of one head: their names, weights, coefficients and sums.

    names: a prefix of the losses' names for each set of scores. margin_weight: the
    factor of margin_error; the factor of `contrast` is 1 - margin_weight. Raises
    UserError if margin_weight is not in [0, 1].
    """

    def __init__(self, names: Iterable[str], margin_weight: float) -> None:
        if not 0 <= margin_weight <= 1:
            raise UserError(f"task.margin_weight={margin_weight} must be from 0 to 1")
        self.names, self.share = [*names], margin_weight

    @property
    def coefficients(self) -> dict[str, float]:
        """The factor of each term; {} without margins."""
        if not self.share:
            return {}
        parts = {"loss": 1 - self.share, "margin_loss": self.share}
        return {f"{x}_{part}": f for x in self.names for part, f in parts.items()}

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """Return {term: global weight}; {} for rows only encoded for search."""
        if not has_losses(batch):
            return {}
        rows = jnp.sum(row_weights(batch))
        out = {f"{name}_loss": rows for name in self.names}
        if self.share:
            total = jnp.sum(margin_weights(batch))
            out |= {f"{name}_margin_loss": total for name in self.names}
        return out

    def sums(self, scores: Mapping[str, jax.Array], batch: Batch) -> dict[str, Sum]:
        """Return losses and accuracies; scores: {name: f32 [B, B (S - 1)]}."""
        out = {}
        for name, each in scores.items():
            out[f"{name}_loss"], out[f"{name}_accuracy"] = contrast(each, batch)
            if self.share:
                out[f"{name}_margin_loss"] = margin_error(each, batch)
        return out

    def labels(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe the arrays of a batch, beside tokens.

        Rows have a query and a passage; with margins also a negative.
        """
        texts = 3 if self.share else 2
        sizes = {"segment_ids": length, "position_ids": length, "cls_positions": texts}
        sizes |= {"passage_numbers": texts - 1, "relevant_numbers": 1}
        out = {k: jax.ShapeDtypeStruct((rows, n), jnp.int32) for k, n in sizes.items()}
        of_teacher = ("teacher_scores", "teacher_weights") if self.share else ()
        shape = jax.ShapeDtypeStruct((rows, texts - 1), jnp.float32)
        return out | dict.fromkeys(of_teacher, shape)


def has_losses(batch: Batch) -> bool:
    """Return whether the rows are for training; False if only encoded for search."""
    return "relevant_numbers" in batch

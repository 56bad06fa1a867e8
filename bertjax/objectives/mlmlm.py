# SPDX-License-Identifier: Apache-2.0
"""MLMLM: predict the entity that fills a block of masks, by its pieces' likelihood.

Clouatre et al. 2021 (arXiv 2009.07058), section 3. The masked LM learns to predict the
pieces of the right entity, one per mask. An entity of k pieces is scored by its pieces
at the first k masks; one forward pass scores all entities. The score is the mean of ln
p (`mean_logp`, the paper's formula), the mean of p (`mean_p`, as the paper's name of
the method says), or the sum of ln p (`sum_logp`), which favors short names. With
`task.pads` the padding after an entity's pieces counts like pieces.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import registry
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import head_flops
from bertjax.models.layers import Params, Rng
from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.entity_ranks import best_candidates, check_top, count_above
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import PARAMS, score_in_chunks, sum_in_chunks

SCORES = dict.fromkeys(("mean_logp", "mean_p", "sum_logp"))


def candidate_sums(
    log_p: jax.Array, table: jax.Array, counts: jax.Array, first: Any, of_p: bool
) -> jax.Array:
    """Add up ln p, or p if `of_p`, of the pieces of each candidate: f32 [B, N].

    log_p f32 [B, w, V] of the slots from `first` on; table i32 [N, K], the pieces;
    counts i32 [N], the number of slots that count. It works slot by slot, so that no
    array is [B, N, K].
    """

    def add(total: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
        at = jnp.minimum(first + slot, table.shape[1] - 1)
        found = log_p[:, slot][:, table[:, at]]
        found = jnp.exp(found) if of_p else found
        return total + jnp.where(first + slot < counts, found, 0.0), None

    zeros = jnp.zeros((len(log_p), len(table)), jnp.float32)
    return jax.lax.scan(add, zeros, jnp.arange(log_p.shape[1]))[0]


def labels(masks: int, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch with `masks` masks per row."""
    shape = rows, min(masks, length)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    right = jax.ShapeDtypeStruct((rows,), jnp.int32)
    names = "mlm_positions", "mlm_ids"
    found = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    return {**found, "mlm_weights": weights, "right_entities": right}


def make_head(
    score: str = "mean_logp", top: int = 10, masks: int = 16, candidates: Any = None
) -> Head:
    """Make the head: `mlm_loss`, `mlm_accuracy`; its parameters are the masked LM's.

    score: see the module's docstring. top: the most entities in an answer. masks: per
    row, in batches that are made up. candidates: the pieces of all entities
    (tasks/spelled_entities.py); None if nothing is ranked. Raises UserError for an
    unknown score and a top below 1.
    """
    registry.pick("objective: mlmlm's score", score, SCORES)
    check_top("mlmlm", top)
    slot_weights = partial(weights_of, "mlm_weights")

    def weights(batch: Batch) -> dict[str, jax.Array]:
        if "mlm_ids" not in batch:
            return {}
        return {"mlm_loss": jnp.sum(slot_weights(batch))}

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        if "mlm_ids" not in batch:  # rows to answer, without known answers
            return {}
        arrays = encoded.hidden, batch["mlm_ids"], slot_weights(batch)
        return score_in_chunks(params, cfg, arrays)

    def entity_scores(
        params: Params, cfg: EncoderConfig, encoded: Encoded
    ) -> jax.Array:
        """Return the score of every candidate, f32 [B, N]."""
        table = jnp.asarray(candidates.table)
        counts = jnp.asarray(candidates.counts)

        def of_slots(first: Any, hidden: jax.Array) -> tuple[Any, tuple[()]]:
            log_p = jax.nn.log_softmax(heads.token_logits(params, cfg, hidden))
            start = 0 if first is None else first
            args = log_p, table, counts, start, score == "mean_p"
            return candidate_sums(*args), ()

        total = sum_in_chunks(of_slots, cfg, (encoded.hidden,))[0]
        return total if score == "sum_logp" else total / counts

    def outputs(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
    ) -> dict[str, jax.Array]:
        if candidates is None:
            return {}
        scores = entity_scores(params, cfg, encoded)
        if "right_entities" in batch:
            known = batch.get("known_entities")
            return count_above(scores, batch["right_entities"], known)
        likely = scores if score == "mean_p" else jnp.exp(scores)
        return best_candidates(scores, likely, top)

    return Head(
        "mlmlm",
        heads.init_mlm,
        weights,
        sums,
        reads="mlm_positions",
        params=PARAMS,
        outputs=outputs,
        labels=partial(labels, masks),
        flops=head_flops,
        task_type="mlmlm",
    )

# SPDX-License-Identifier: Apache-2.0
"""A text is predicted from another one, token after token: sequence to sequence.

Without a decoder the text and its target are one row. With `attention_steps` the text
sees all of itself, and the target what is before it (the sequence-to-sequence masks of
Dong et al. 2019, UniLM, section 2.3); where model.is_decoder is set every token sees
those before it alone. The head over the vocabulary is that of pretraining.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded, without_pooler
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch, Labels, Objective, Term
from bertjax.objectives.combine import combine
from bertjax.objectives.task_head import row_weights
from bertjax.objectives.token_head import make_token_head, score_tokens, sum_in_chunks

NAME = "lm"  # of its arrays and terms


def make_objective(
    cfg: EncoderConfig, target_length: int = 64
) -> tuple[Objective, EncoderConfig]:
    """Predict the tokens of targets, and no others: `lm_loss` and `lm_accuracy`.

    A batch has lm_positions, lm_ids i32 and lm_weights f32 [B, T + 1], its targets
    and what ends them. target_length: T of batches that are made up.
    """
    cfg = without_pooler(cfg)
    head = make_token_head(NAME, frozenset())
    whole = combine([dataclasses.replace(head, outputs=outputs)], cfg)

    def evaluate(params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        if f"{NAME}_ids" not in batch:  # rows that are to be answered
            return {}, {}
        return whole.evaluate(params, seen(batch))

    objective = dataclasses.replace(
        whole,
        weights=lambda batch: whole.weights(seen(batch)),
        sums=lambda params, batch, rng: whole.sums(params, seen(batch), rng),
        evaluate=evaluate,
        labels=make_labels(target_length, not cfg.is_decoder),
        task_type="seq2seq",
    )
    return objective, cfg


def seen(batch: Batch) -> Batch:
    """Return a batch in which rows that fill it up weigh nothing."""
    name = f"{NAME}_weights"
    return {**batch, name: batch[name] * row_weights(batch)[:, None]}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return of each row's target `nats`, -ln p, and how many tokens of it are `right`
    first guesses: f32 [B] each."""

    def score(first, hidden, ids, weights):
        _, logits = score_tokens(params, cfg, hidden, ids, weights, NAME)
        true = jnp.take_along_axis(logits, ids[..., None], -1, mode="clip")[..., 0]
        nats = jax.nn.logsumexp(logits, axis=-1) - true
        right = true >= jnp.max(logits, axis=-1)
        return (), {"nats": weights * nats, "right": weights * right}

    arrays = encoded.hidden, batch[f"{NAME}_ids"], batch[f"{NAME}_weights"]
    _, each = sum_in_chunks(score, cfg, arrays)
    return {name: jnp.sum(values, axis=-1) for name, values in each.items()}


def make_labels(target_length: int, has_steps: bool) -> Labels:
    """Make Head.labels of batches whose targets have so many tokens at most."""

    def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        width = min(target_length + 1, length)
        names = [f"{NAME}_positions", f"{NAME}_ids"]
        found = {name: jax.ShapeDtypeStruct((rows, width), jnp.int32) for name in names}
        kind = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        found[f"{NAME}_weights"] = kind
        if has_steps:
            steps = jax.ShapeDtypeStruct((rows, length), jnp.int32)
            found["attention_steps"] = steps
        return found

    return labels

# SPDX-License-Identifier: Apache-2.0
"""Sequence to sequence: predict a target text from a source text, token by token.

Without a decoder, source and target are one row. By `attention_steps` the source sees
all of itself, and each token of the target sees the source and the target before it
(the sequence-to-sequence masks of Dong et al. 2019, UniLM, section 2.3). If
model.is_decoder is set, the whole row is causal instead. With a decoder, the encoder
reads the source and the decoder writes the target. The head over the vocabulary is that
of pretraining.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models import decoder
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded, without_pooler
from bertjax.models.layers import Params, Rng
from bertjax.objectives import denoise
from bertjax.objectives.base import Batch, Objective, Term
from bertjax.objectives.combine import combine
from bertjax.objectives.metrics import nats_and_right
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import make_token_head, score_tokens, sum_in_chunks
from bertjax.parallel.sharding import gather_params, gather_rows

NAME = "lm"  # the prefix of the names of arrays and terms


def make_objective(
    cfg: EncoderConfig, target_length: int = 64
) -> tuple[Objective, EncoderConfig]:
    """Predict only the tokens of targets: `lm_loss` and `lm_accuracy`.

    A batch has lm_ids i32 and lm_weights f32 [B, T], the targets with their end tokens;
    without a decoder also lm_positions i32 [B, T], with a decoder decoder_input_ids i32
    [B, T]. target_length: for batches that are made up.
    """
    cfg = without_pooler(cfg)
    whole = of_decoder(cfg) if cfg.num_decoder_layers else of_rows(cfg)

    def evaluate(params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        if f"{NAME}_ids" not in batch:  # rows to answer, without targets
            return {}, {}
        return whole.evaluate(params, seen(batch))

    objective = dataclasses.replace(
        whole,
        weights=lambda batch: whole.weights(seen(batch)),
        sums=lambda params, batch, rng: whole.sums(params, seen(batch), rng),
        evaluate=evaluate,
        labels=functools.partial(labels, cfg, target_length),
        task_type="seq2seq",
    )
    return objective, cfg


def of_rows(cfg: EncoderConfig) -> Objective:
    """Build the objective for rows of source and target, without a decoder."""
    head = make_token_head(NAME, frozenset())
    return combine([dataclasses.replace(head, outputs=outputs)], cfg)


def of_decoder(cfg: EncoderConfig) -> Objective:
    """Build the objective with a decoder, which attends to the encoded source."""
    head = make_token_head(NAME, frozenset(), everywhere=True)

    def run(params: Params, batch: Batch, rng: Rng) -> tuple[Params, Encoded]:
        params, batch = gather_params(params, cfg.dtype), dict(batch)
        memory = decoder.encode(params, cfg, batch, rng)
        hidden = decoder.apply(params, cfg, batch, memory, rng)
        return params, Encoded(hidden, None)

    def sums(params: Params, batch: Batch, rng: Rng) -> dict[str, Term]:
        params, encoded = run(params, batch, rng)
        return head.sums(params, cfg, encoded, batch, rng)

    def evaluate(params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        params, encoded = run(params, batch, None)
        own = outputs(params, cfg, encoded, batch)
        return head.sums(params, cfg, encoded, batch, None), gather_rows(own)

    return Objective(
        init=functools.partial(denoise.init, cfg),
        weights=head.weights,
        sums=sums,
        needs=frozenset(),
        coefficients={},
        evaluate=evaluate,
        flops=functools.partial(denoise.flops, cfg),
    )


def seen(batch: Batch) -> Batch:
    """Return the batch with weight 0 for the rows that pad it."""
    name = f"{NAME}_weights"
    return {**batch, name: weights_of(name, batch)}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return, per row, `nats` and `right`, f32 [B] each.

    nats: -ln p of the target; right: how many of its tokens are predicted right.
    """

    def score(first, hidden, ids, weights):
        _, logits = score_tokens(params, cfg, hidden, ids, weights, NAME)
        nats, right = nats_and_right(logits, ids)
        return (), {"nats": weights * nats, "right": weights * right}

    arrays = encoded.hidden, batch[f"{NAME}_ids"], batch[f"{NAME}_weights"]
    _, each = sum_in_chunks(score, cfg, arrays)
    return {name: jnp.sum(values, axis=-1) for name, values in each.items()}


def labels(
    cfg: EncoderConfig, target_length: int, rows: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch with targets of at most `target_length` tokens."""
    places = "decoder_input_ids" if cfg.num_decoder_layers else f"{NAME}_positions"
    target = jax.ShapeDtypeStruct((rows, min(target_length + 1, length)), jnp.int32)
    found = {f"{NAME}_ids": target, places: target}
    found[f"{NAME}_weights"] = jax.ShapeDtypeStruct(target.shape, jnp.float32)
    if not (cfg.num_decoder_layers or cfg.is_decoder):
        steps = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        found["attention_steps"] = steps
    return found

# SPDX-License-Identifier: Apache-2.0
"""Generation by models that were finetuned to write texts, for evaluate and predict."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.generation import beam, decode, marginal
from bertjax.models import incremental
from bertjax.objectives.rag import by_passage
from bertjax.objectives.read import passage_log_probs
from bertjax.parallel.sharding import gather_params, gather_rows
from bertjax.tasks import prepare_task

Batch = Mapping[str, jax.Array]


class Writing(NamedTuple):
    """How texts are generated: greedily, or by beam search.

    max_new_tokens: per text, including special tokens. temperature: divides the scores
    of passages, if the rows have passages.
    """

    max_new_tokens: int
    num_beams: int = 1
    length_penalty: float = 1.0
    temperature: float = 1.0


def writing_of(config: Any) -> Writing:
    """Return how the model of a config generates texts."""
    task, width = config.task, prepare_task.targets_of(config).width
    return Writing(width, task.num_beams, task.length_penalty, task.temperature)


def with_texts(objective: Any, cfg: Any, tokens: Any, writing: Writing) -> Any:
    """Return the objective (objectives/seq2seq.py) with generation in its `evaluate`.

    `evaluate` then also outputs for every row generated_ids i32 [B, T],
    generated_lengths i32 [B], and generated_scores f32 [B], the sum of ln p of these
    tokens. tokens: the TokenIds of the tokenizer.
    """

    def evaluate(params: Any, batch: Batch) -> tuple[Any, Any]:
        sums, outputs = objective.evaluate(params, batch)
        params = gather_params(params, cfg.dtype, objective.shardings)
        if objective.find is not None:
            batch = objective.find(params, batch)
        with jax.named_scope("generation"):
            written = write(params, cfg, batch, tokens, writing)
        more = {
            "generated_ids": written.ids,
            "generated_lengths": written.lengths,
            "generated_scores": written.scores,
        }
        return sums, outputs | gather_rows(more)

    return dataclasses.replace(objective, evaluate=evaluate)


def write(
    params: Any, cfg: Any, batch: Batch, tokens: Any, writing: Writing
) -> decode.Generated:
    """Generate a text for each row of a batch, ignoring its target."""
    decoder = incremental.make_decoder(cfg)
    params = incremental.unstack_layers(params, cfg)
    if "passage_scores" in batch:
        decoder = marginal.marginal_decoder(decoder)
        prompts = prompts_of_passages(batch, writing.temperature)
    else:
        prompts = prompts_of(batch)
    shared = dict(
        max_new_tokens=writing.max_new_tokens,
        ends=decode.Ends((tokens.sep_id,), tokens.pad_id),
    )
    if writing.num_beams == 1:
        return decode.generate(decoder, params, prompts, **shared)
    beams = beam.Beams(writing.num_beams, writing.length_penalty)
    return beam.beam_search(decoder, params, prompts, beams=beams, **shared)


def prompts_of_passages(batch: Batch, temperature: float) -> dict[str, jax.Array]:
    """Return the batch for marginal_decoder from rows of objective=rag."""
    b, k = batch["passage_scores"].shape
    rows = prompts_of(by_passage(batch))
    prompts = {x: y.reshape(b, k, -1).swapaxes(1, 2) for x, y in rows.items()}
    known = passage_log_probs(batch["passage_scores"], batch, temperature)
    return prompts | {marginal.PASSAGES: known}


def prompts_of(batch: Batch) -> dict[str, jax.Array]:
    """Return the rows of a batch without their targets.

    A row of text and target is cut at the position that predicts the target's first
    token. On a decoder's side only the start token is left.
    """
    ids, real = batch["input_ids"], batch["attention_mask"]
    if "decoder_input_ids" in batch:
        start = batch["decoder_input_ids"][:, :1]
        own = {"decoder_input_ids": start}
        own["decoder_attention_mask"] = jnp.ones_like(start)
        return {"input_ids": ids, "attention_mask": real} | own
    if "lm_positions" in batch:
        # Batches of short rows are cut to what they need, and may have no room for the
        # longest target, so only the row itself says where its text ends.
        size = batch["lm_positions"][:, :1] + 1
        real = (jnp.arange(ids.shape[1]) < size).astype(jnp.int32)
        ids = ids * real
    prompts = {"input_ids": ids, "attention_mask": real}
    if "attention_steps" in batch:
        prompts["attention_steps"] = jnp.zeros_like(real)
    return prompts

# SPDX-License-Identifier: Apache-2.0
"""Texts that a finetuned model writes to rows of texts, in evaluations and answers."""

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
    """How texts are written: the likeliest token each time, or the best of beams.

    max_new_tokens: of a text, special ones included. temperature: divides the scores
    of passages, where rows have some.
    """

    max_new_tokens: int
    num_beams: int = 1
    length_penalty: float = 1.0
    temperature: float = 1.0


def writing_of(config: Any) -> Writing:
    """Return how the model of a config writes texts."""
    task, width = config.task, prepare_task.targets_of(config).width
    return Writing(width, task.num_beams, task.length_penalty, task.temperature)


def with_texts(objective: Any, cfg: Any, tokens: Any, writing: Writing) -> Any:
    """Return the objective of rows of texts (objectives/seq2seq.py) whose `evaluate`
    writes texts too, and has more outputs of every row:

    generated_ids i32 [B, T]; generated_lengths i32 [B], of them; generated_scores f32
    [B], the sum of ln p of these tokens. tokens: the TokenIds of the tokenizer.
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
    """Write a text for each row of a batch, whatever its target is."""
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
    """Return what marginal_decoder takes, of rows of objective=rag."""
    b, k = batch["passage_scores"].shape
    rows = prompts_of(by_passage(batch))
    prompts = {x: y.reshape(b, k, -1).swapaxes(1, 2) for x, y in rows.items()}
    known = passage_log_probs(batch["passage_scores"], batch, temperature)
    return prompts | {marginal.PASSAGES: known}


def prompts_of(batch: Batch) -> dict[str, jax.Array]:
    """Return what is known of rows before a target is: their texts.

    Of rows of text and target the text, which ends where the first token of the target
    is predicted; of a decoder's side what it begins with.
    """
    ids, real = batch["input_ids"], batch["attention_mask"]
    if "decoder_input_ids" in batch:
        start = batch["decoder_input_ids"][:, :1]
        own = {"decoder_input_ids": start}
        own["decoder_attention_mask"] = jnp.ones_like(start)
        return {"input_ids": ids, "attention_mask": real} | own
    if "lm_positions" in batch:
        # Batches of short rows are cut to what they need, with no room for the longest
        # target: how far texts reach is in their rows alone.
        size = batch["lm_positions"][:, :1] + 1
        real = (jnp.arange(ids.shape[1]) < size).astype(jnp.int32)
        ids = ids * real
    prompts = {"input_ids": ids, "attention_mask": real}
    if "attention_steps" in batch:
        prompts["attention_steps"] = jnp.zeros_like(real)
    return prompts

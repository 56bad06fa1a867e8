# SPDX-License-Identifier: Apache-2.0
"""Measure how fast texts are generated from left to right, with random parameters."""

import dataclasses
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.data.features.base import Spec
from bertjax.measuring.results import Measured, Seconds, mean_seconds
from bertjax.measuring.synthetic_data import expected_vocab_size
from bertjax.models.flops import encoder_flops, head_flops

CAUSAL = frozenset({"clm"})  # the needs of a causal objective
FORWARD = 1 / 3  # of the operations of forward and backward passes


def measure_generate(config: ConfigDict) -> Measured:
    """Time greedy continuation of batch_size prompts to twice their length.

    Prompts have half of data.length, and texts never end early. The prompts of an
    encoder-decoder go to the encoder. Tokens are new ones. Raises UserError for a model
    that does not generate from left to right.
    """
    import jax

    from bertjax.generation.decode import generate
    from bertjax.generation.open_writer import place_decoder
    from bertjax.objectives.make_objective import make_objective

    vocab_size, backend = expected_vocab_size(config), jax.default_backend()
    cfg = resolve.encoder_config(config, vocab_size, backend)
    objective, cfg = make_objective(config.objective, cfg)
    if not cfg.num_decoder_layers and objective.needs != CAUSAL:
        raise UserError(
            f"--what=generate: objective={config.objective} does not teach to write "
            "from left to right: give objective=clm, or a model with a decoder"
        )
    is_decoder = not cfg.num_decoder_layers
    cfg = dataclasses.replace(cfg, pooler=False, is_decoder=is_decoder)
    params = jax.jit(objective.init)(jax.random.key(config.seed))
    decoder, params = place_decoder(cfg, params)
    n = config.data.length // 2
    batch = make_prompts(cfg, config.batch_size, n)

    def write(step: int) -> None:
        written = generate(decoder, params, batch, max_new_tokens=n)
        jax.block_until_ready(written)

    compile_seconds = mean_seconds(write, 1) - mean_seconds(write, 1)
    facts = {
        "tokens": config.batch_size * n,
        "compile_seconds": compile_seconds,
        "dtype": cfg.dtype,
        "device_kind": jax.devices()[0].device_kind,
        "flops_per_token": flops_of_new(objective, cfg, n),
    }

    def run(steps: int) -> Seconds:
        return {"step": mean_seconds(write, steps)}

    return Measured(facts, run)


def make_prompts(cfg: Any, rows: int, length: int) -> dict[str, np.ndarray]:
    """Draw prompts [rows, length] of random ids; a decoder begins with 0."""
    ids = np.random.default_rng(0).integers(5, cfg.vocab_size, (rows, length), "i4")
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if cfg.num_decoder_layers:
        start = np.zeros((rows, 1), np.int32)
        batch["decoder_input_ids"] = start
        batch["decoder_attention_mask"] = np.ones_like(start)
    return batch


def flops_of_new(objective: Any, cfg: Any, new: int) -> float:
    """Count floating point operations per new token.

    They are those of its own forward pass and of its prompt's, which is
    as long as the text.
    """
    if cfg.num_decoder_layers:
        names = "input_ids", "decoder_input_ids"
        return FORWARD * objective.flops(dict.fromkeys(names, Spec((new,))))
    row = 2 * new
    each = encoder_flops(cfg, row, new) + head_flops(cfg, row, new)
    return FORWARD * each * row / new

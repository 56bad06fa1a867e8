# SPDX-License-Identifier: Apache-2.0
"""How fast texts are written from left to right, by random parameters."""

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

CAUSAL = frozenset({"clm"})  # what a row of such an objective needs
FORWARD = 1 / 3  # of the operations of forward and backward


def measure_generate(config: ConfigDict) -> Measured:
    """Time writing greedily behind batch_size prompts of half of data.length the other
    half: texts have no end. Of an encoder-decoder the prompts are the encoder's.

    Tokens are new ones. Raises UserError for a model that does not write so.
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
    """Make prompts [rows, length] of ids that are drawn; a decoder begins with 0."""
    ids = np.random.default_rng(0).integers(5, cfg.vocab_size, (rows, length), "i4")
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if cfg.num_decoder_layers:
        start = np.zeros((rows, 1), np.int32)
        batch["decoder_input_ids"] = start
        batch["decoder_attention_mask"] = np.ones_like(start)
    return batch


def flops_of_new(objective: Any, cfg: Any, new: int) -> float:
    """Count floating point operations for a new token: those of its prompt's forward
    pass, as long as the text, and its own."""
    if cfg.num_decoder_layers:
        names = "input_ids", "decoder_input_ids"
        return FORWARD * objective.flops(dict.fromkeys(names, Spec((new,))))
    row = 2 * new
    each = encoder_flops(cfg, row, new) + head_flops(cfg, row, new)
    return FORWARD * each * row / new

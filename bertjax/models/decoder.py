# SPDX-License-Identifier: Apache-2.0
"""The decoder of an encoder-decoder: T5 (Raffel et al. 2020), BART (Lewis et al. 2020).

Its layers are those of the encoder (transformer_layer.py) with a cross-attention added:
causal self-attention, attention to the encoder's output, MLP. It shares the encoder's
word embeddings; positions, their norm and the final norm are its own. Switches of
EncoderConfig select T5 or BART (families.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models import encoder
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig, decoder_config
from bertjax.models.embeddings import embed
from bertjax.models.initializers import draw_params
from bertjax.models.layer_specs import layer_specs, position_specs
from bertjax.models.layers import Params, Rng, fold_in, norm_specs
from bertjax.models.stacked_layers import run_layers
from bertjax.models.transformer_layer import (
    MemoryInputs,
    make_attention_inputs,
    normalize,
)

# Folded into the random key, so that dropout differs from the encoder's.
OWN_KEYS = 2**31 - 1


class Memory(NamedTuple):
    """The encoder's output, to which a decoder attends.

    hidden: [B, S, D]; segments: i32 [B, S], 1 = real, in packed rows the number of the
    sequence, 0 = padding.
    """

    hidden: jax.Array
    segments: jax.Array


def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Create params["decoder"], initialized like the encoder, layers on axis 0."""
    own = decoder_config(cfg)
    specs = {"embeddings": position_specs(own), "layers": layer_specs(own, cross=True)}
    if not specs["embeddings"]:
        del specs["embeddings"]
    if cfg.final_norm:
        specs["final_norm"] = norm_specs(cfg.hidden_size, cfg.norm_bias)
    return draw_params(rng, specs, cfg)


def encode(
    params: Params, cfg: EncoderConfig, batch: dict[str, jax.Array], rng: Rng = None
) -> Memory:
    """Run the encoder on a batch (as for `encoder.apply`); params: the whole tree."""
    cfg = encoder.without_pooler(cfg)
    hidden = encoder.apply(params["encoder"], cfg, batch, rng).hidden
    return Memory(hidden, batch.get("segment_ids", batch["attention_mask"]))


def apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    memory: Memory,
    rng: Rng = None,
) -> jax.Array:
    """Return hidden states [B, T, D] in cfg.dtype; `rng=None` means evaluation.

    params: the whole tree. batch: decoder_input_ids i32 [B, T], shifted right by the
    host, and decoder_attention_mask (1 = real; all tokens are if it is missing). Packed
    rows have decoder_segment_ids and decoder_position_ids i32 [B, T]; a sequence has
    the same number there as in memory.segments. rng may be the encoder's.
    """
    own, tokens = decoder_config(cfg), decoder_tokens(batch)
    rng = fold_in(rng, OWN_KEYS)
    embeddings = decoder_embeddings(params)
    with jax.named_scope("decoder"):
        with jax.named_scope("embeddings"):
            x = embed(embeddings, own, tokens, rng)
        inputs = make_attention_inputs(embeddings, own, tokens)
        seen = make_memory_inputs(tokens, memory)
        layers = params["decoder"]["layers"]
        x = run_layers(layers, own, x, inputs, rng, memory=seen).hidden
        if cfg.final_norm:
            with jax.named_scope("final_norm"):
                x = normalize(params["decoder"]["final_norm"], cfg, x)
        return x


def decoder_tokens(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return a batch's decoder_* arrays under the names of an encoder's arrays."""
    start = "decoder_"
    own = {k.removeprefix(start): v for k, v in batch.items() if k.startswith(start)}
    return {"attention_mask": jnp.ones_like(own["input_ids"]), **own}


def decoder_embeddings(params: Params) -> Params:
    """Return parameters for `embed`: the decoder's positions, the encoder's words."""
    word = params["encoder"]["embeddings"]["word"]
    return {**params["decoder"].get("embeddings", {}), "word": word}


def make_memory_inputs(tokens: dict[str, jax.Array], memory: Memory) -> MemoryInputs:
    """Build the inputs of the cross-attention; tokens: from `decoder_tokens`."""
    packed = "segment_ids" in tokens
    queries = tokens["segment_ids" if packed else "attention_mask"]
    mask = AttentionMask(memory.segments, packed, queries=queries)
    return MemoryInputs(mask, memory.hidden)

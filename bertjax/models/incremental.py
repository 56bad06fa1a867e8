# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding: a few tokens at a time, with a key-value cache.

    decoder = make_decoder(cfg)
    cache, logits = decoder.prefill(params, batch, room)         # logits [B, V]
    cache, logits = decoder.extend(params, cache, ids)           # ids [B, n], [B, n, V]

`room` is static, so each function is compiled once; `extend` can be the body of a loop.
Layers are unrolled: each has its own arrays in the cache, and should have them in the
parameters too, for speed (`unstack_layers`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models import decoder as decoders
from bertjax.models.cache import Cache, init_layers
from bertjax.models.config import EncoderConfig, decoder_config
from bertjax.models.embeddings import embed
from bertjax.models.encoder import without_pooler
from bertjax.models.heads import token_logits
from bertjax.models.layers import Params, take_at
from bertjax.models.stacked_layers import run_layers, unstack
from bertjax.models.transformer_layer import (
    AttentionInputs,
    MemoryInputs,
    make_attention_inputs,
    normalize,
)

Batch = dict[str, jax.Array]


class Decoder(NamedTuple):
    """The two functions with which every model generates.

    prefill(params, batch, room) -> (cache, logits f32 [B, V] of the token after each
    row's last one); room: the tokens that a row can hold, including those of the batch;
    a cache is a Cache, or any tree of arrays with the rows of the batch on axis 0.
    extend(params, cache, ids i32 [B, n]) -> (cache, logits f32 [B, n, V] of the token
    after each of them). params: the whole tree.
    """

    prefill: Callable[[Params, Any, int], tuple[Any, jax.Array]]
    extend: Callable[[Params, Any, jax.Array], tuple[Any, jax.Array]]


def make_decoder(cfg: EncoderConfig) -> Decoder:
    """Return the functions that generate with a model of this config.

    A causal model (cfg.is_decoder) continues input_ids i32 [B, L], and so does a prefix
    LM, whose batch has attention_steps, 0 for the context. A model with a decoder
    (cfg.num_decoder_layers) encodes input_ids and continues decoder_input_ids i32 [B,
    L]: the start token and what follows it. Rows may differ in length: attention_mask
    (decoder_attention_mask) is 1 at their tokens, which are at the beginning of the
    row.

    New tokens have type 0, or, if the batch has token_type_ids or streams of ids, the
    last token's. If the batch has position_ids, those of new tokens count up from the
    last token's. `prefill` raises ValueError for packed rows, for a room of fewer than
    L slots, for position_ids without a table of positions, and for a model whose tokens
    attend to later ones. Tokens beyond the room are dropped: the caller must reserve as
    many slots as a row will have tokens.
    """
    stack = decoder_config(cfg) if cfg.num_decoder_layers else without_pooler(cfg)

    def prefill(params: Params, batch: Batch, room: int) -> tuple[Cache, jax.Array]:
        memory, memory_segments, tokens = None, None, batch
        if cfg.num_decoder_layers:
            encoded = decoders.encode(params, cfg, batch)
            tokens = decoders.decoder_tokens(batch)
            memory = decoders.make_memory_inputs(tokens, encoded)
            memory_segments = encoded.segments
        check_prompts(stack, tokens, room)
        b, length = tokens["input_ids"].shape
        real = tokens["attention_mask"].astype(jnp.int32)
        free = ((0, 0), (0, room - length))
        steps = tokens.get("attention_steps")
        cache = Cache(
            init_layers(stack, b, room),
            jnp.pad(real, free),
            None if steps is None else jnp.pad(steps, free),
            jnp.sum(real, axis=1),
            memory_segments,
        )
        cache = cache._replace(more=last_values(tokens, cache.index))
        embeddings, _ = own_parts(params, cfg)
        inputs = make_attention_inputs(embeddings, stack, tokens)
        cache, x = run(params, cfg, stack, tokens, inputs, memory, cache)
        last = take_at(x, jnp.maximum(cache.index - 1, 0)[:, None])
        return cache, token_logits(params, cfg, last)[:, 0]

    def extend(params: Params, cache: Cache, ids: jax.Array) -> tuple[Cache, jax.Array]:
        slots = cache.index[:, None] + jnp.arange(ids.shape[1])
        cache = add_tokens(cache, slots)
        seen = {"attention_mask": cache.segments}
        if cache.steps is not None:
            seen["attention_steps"] = cache.steps
        embeddings, _ = own_parts(params, cfg)
        inputs = make_attention_inputs(embeddings, stack, seen, slots)
        memory = None
        if cache.memory_segments is not None:
            encoded = decoders.Memory(None, cache.memory_segments)
            tokens = {"attention_mask": jnp.ones_like(ids)}
            memory = decoders.make_memory_inputs(tokens, encoded)
        tokens = {"input_ids": ids, "position_ids": slots}
        for name, values in (cache.more or {}).items():
            each = jnp.broadcast_to(values[:, None], ids.shape)
            tokens[name] = tokens[name] + each if name in tokens else each
        cache, x = run(params, cfg, stack, tokens, inputs, memory, cache)
        return cache, token_logits(params, cfg, x)

    return Decoder(prefill, extend)


def last_values(tokens: Batch, index: jax.Array) -> dict[str, jax.Array]:
    """Return the values that new tokens continue with, i32 [B] by name.

    tokens: a batch, whose further arrays [B, L] (positions, types, streams of ids) are
    read; index: i32 [B], the number of tokens in each row.
    """
    usual = ("input_ids", "attention_mask", "attention_steps")
    last = jnp.maximum(index - 1, 0)[:, None]
    more = {
        name: jnp.take_along_axis(values, last, axis=1)[:, 0]
        for name, values in tokens.items()
        if name not in usual and values.shape == tokens["input_ids"].shape
    }
    if "position_ids" in more:
        more["position_ids"] -= last[:, 0]
    return more


def check_prompts(stack: EncoderConfig, tokens: Batch, room: int) -> None:
    """Raise ValueError for prompts that cannot be continued in `room` slots."""
    length = tokens["input_ids"].shape[1]
    if room < length:
        raise ValueError(f"room={room} does not hold prompts of {length} tokens")
    if "segment_ids" in tokens:
        raise ValueError("a prompt has a row of its own, and begins it: no packed rows")
    if "position_ids" in tokens and not has_table_alone(stack):
        raise ValueError(
            "position_ids of a prompt go with a table of positions alone: those of new "
            "tokens would be their slots elsewhere"
        )
    if not stack.is_decoder and "attention_steps" not in tokens:
        raise ValueError(
            "tokens of this model see those behind them: it continues a batch with "
            "attention_steps alone"
        )


def has_table_alone(stack: EncoderConfig) -> bool:
    """Return whether only a table of positions reads position_ids.

    Then a token's position may differ from its slot.
    """
    distances = stack.relative_attention_num_buckets or not all(stack.is_global)
    return stack.position_embedding_type == "absolute" and not distances


def add_tokens(cache: Cache, slots: jax.Array) -> Cache:
    """Mark the slots i32 [B, n], the next ones of each row, as tokens.

    A new token's step is its slot counted from 1, as in data/features/prefix.py.
    """
    rows = jnp.arange(len(slots))[:, None]
    segments = cache.segments.at[rows, slots].set(1, mode="drop")
    steps = cache.steps
    if steps is not None:
        steps = steps.at[rows, slots].set(slots + 1, mode="drop")
    index = cache.index + slots.shape[1]
    return cache._replace(segments=segments, steps=steps, index=index)


def run(
    params: Params,
    cfg: EncoderConfig,
    stack: EncoderConfig,
    tokens: Batch,
    inputs: tuple[AttentionInputs, ...],
    memory: MemoryInputs | None,
    cache: Cache,
) -> tuple[Cache, jax.Array]:
    """Run the layers on tokens [B, n]; return the new cache and hidden [B, n, D]."""
    embeddings, part = own_parts(params, cfg)
    x = embed(embeddings, stack, tokens)
    if not isinstance(part["layers"], tuple):
        part = unstack(part, stack)
    result = run_layers(
        part["layers"], stack, x, inputs, None, memory=memory, caches=cache.layers
    )
    x = result.hidden
    if cfg.final_norm:
        x = normalize(part["final_norm"], cfg, x)
    return cache._replace(layers=result.caches), x


def own_parts(params: Params, cfg: EncoderConfig) -> tuple[Params, Params]:
    """Return the embeddings and the parameters of the decoder or causal encoder."""
    if cfg.num_decoder_layers:
        return decoders.decoder_embeddings(params), params["decoder"]
    return params["encoder"]["embeddings"], params["encoder"]


def unstack_layers(params: Params, cfg: EncoderConfig) -> Params:
    """Apply `stacked_layers.unstack` to the encoder and, if there is one, the decoder.

    Each layer then has its own arrays, so a loop over `extend` copies no parameters.
    """
    parts = {"encoder": unstack(params["encoder"], without_pooler(cfg))}
    if cfg.num_decoder_layers:
        parts["decoder"] = unstack(params["decoder"], decoder_config(cfg))
    return {**params, **parts}

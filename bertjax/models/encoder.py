# SPDX-License-Identifier: Apache-2.0
"""The encoder of BERT: post-LN, learned positions (Devlin et al. 2019, section 3)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.attention import attend, attention_mask
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import (
    Params,
    activate,
    draw,
    dropout,
    layer_norm,
    linear,
    linear_specs,
    norm_specs,
    stack_specs,
)
from bertjax.parallel.sharding import constrain


class Encoded(NamedTuple):
    """What heads see: hidden [B, L, D], pooled [B, D] or None."""

    hidden: jax.Array
    pooled: jax.Array | None


def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the parameters: truncated normal 0.02, biases 0, norm scales 1, all f32.

    Leaves of the layers are stacked on axis 0, [N, ...].
    """
    d, m = cfg.hidden_size, cfg.intermediate_size
    heads = (cfg.num_attention_heads, cfg.head_dim)
    embeddings = {
        "word": ((cfg.vocab_size, d), "normal"),
        "position": ((cfg.max_position_embeddings, d), "normal"),
        "norm": norm_specs(d),
    }
    if cfg.type_vocab_size:
        embeddings["token_type"] = ((cfg.type_vocab_size, d), "normal")
    layer = {
        "attention": {
            "query": linear_specs(into=(d,), out=heads),
            "key": linear_specs(into=(d,), out=heads),
            "value": linear_specs(into=(d,), out=heads),
            "output": linear_specs(into=heads, out=(d,)),
            "norm": norm_specs(d),
        },
        "mlp": {
            "up": linear_specs(into=(d,), out=(m,)),
            "down": linear_specs(into=(m,), out=(d,)),
            "norm": norm_specs(d),
        },
    }
    specs = {
        "embeddings": embeddings,
        "layers": stack_specs(layer, cfg.num_hidden_layers),
    }
    if cfg.pooler:
        specs["pooler"] = linear_specs(into=(d,), out=(d,))
    return draw(rng, specs, cfg.initializer_range)


def apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None = None,
) -> Encoded:
    """Encode a batch; `rng=None` means evaluation (no dropout).

    batch: input_ids, attention_mask (1 = real) i32 [B, L]; optional token_type_ids
    and position_ids i32 [B, L]. Returns hidden [B, L, D] in cfg.dtype and, with a
    pooler, pooled [B, D]. Ids must be below the table sizes: the host sees to it.
    """
    b, length = batch["input_ids"].shape
    dtype = jnp.dtype(cfg.dtype)
    with jax.named_scope("embeddings"):
        x = embed(params["embeddings"], cfg, batch)
        x = dropout(x, cfg.hidden_dropout_prob, fold(rng, cfg.num_hidden_layers))
        x = constrain(x.astype(dtype), "batch length embed")
    mask = attention_mask(batch["attention_mask"])

    def layer(x: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        layer_params, index = inputs
        x = apply_layer(layer_params, cfg, x, mask, fold(rng, index))
        return constrain(x, "batch length embed"), None

    if cfg.remat != "none":
        policy = (
            jax.checkpoint_policies.dots_saveable
            if cfg.remat == "dots"
            else jax.checkpoint_policies.nothing_saveable
        )
        layer = jax.checkpoint(layer, policy=policy)
    n = cfg.num_hidden_layers
    # An unrolled scan with its single body is what costs least memory and time.
    x, _ = jax.lax.scan(
        layer, x, (params["layers"], jnp.arange(n)), unroll=cfg.unroll or n
    )
    pooled = None
    if cfg.pooler:
        with jax.named_scope("pooler"):
            pooled = jnp.tanh(linear(params["pooler"], x[:, 0]))
    return Encoded(x.reshape(b, length, -1), pooled)


def embed(params: Params, cfg: EncoderConfig, batch: dict[str, jax.Array]) -> jax.Array:
    """Sum word, position and token type embeddings, normalised: f32 [B, L, D]."""
    ids = batch["input_ids"]
    x = jnp.take(params["word"], ids, axis=0, mode="clip")
    if "position_ids" in batch:
        x = x + jnp.take(params["position"], batch["position_ids"], axis=0, mode="clip")
    else:
        x = x + params["position"][: ids.shape[1]]
    if cfg.type_vocab_size:
        # Without token types in the batch everything is of type 0.
        x = x + (
            jnp.take(params["token_type"], batch["token_type_ids"], axis=0, mode="clip")
            if "token_type_ids" in batch
            else params["token_type"][0]
        )
    return layer_norm(params["norm"], x, cfg.layer_norm_eps)


def apply_layer(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
) -> jax.Array:
    """Run one post-LN layer on x [B, L, D]; mask broadcasts to [B, H, L, L].

    Matrix products see [B*L, D]: gradients of products of three axes run slower.
    """
    b, length, d = x.shape
    heads = (b, length, cfg.num_attention_heads, cfg.head_dim)
    rngs = (None, None, None) if rng is None else jax.random.split(rng, 3)
    x = x.reshape(b * length, d)
    p = params["attention"]
    with jax.named_scope("qkv"):
        q, k, v = (linear(p[n], x).reshape(heads) for n in ("query", "key", "value"))
    y = attend(q, k, v, mask, cfg.attention_probs_dropout_prob, rngs[0])
    with jax.named_scope("attention_out"):
        y = linear(p["output"], y.reshape(b * length, d))
        y = dropout(y, cfg.hidden_dropout_prob, rngs[1])
        x = layer_norm(p["norm"], x + y, cfg.layer_norm_eps)
    p = params["mlp"]
    with jax.named_scope("mlp"):
        y = activate(linear(p["up"], x), cfg.hidden_act)
        y = dropout(linear(p["down"], y), cfg.hidden_dropout_prob, rngs[2])
        x = layer_norm(p["norm"], x + y, cfg.layer_norm_eps)
    return x.reshape(b, length, d)


def fold(rng: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive a key for a layer; None stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def count_params(params: Params) -> int:
    """Count the numbers in a tree of arrays or of shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def without_pooler(cfg: EncoderConfig) -> EncoderConfig:
    """Return the same encoder, whose pooled vector nobody wants."""
    return dataclasses.replace(cfg, pooler=False)

# SPDX-License-Identifier: Apache-2.0
"""Heads on an encoder: the tied masked-LM head and the two-way pair head."""

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import (
    Params,
    activate,
    draw,
    layer_norm,
    linear,
    linear_specs,
    norm_specs,
)


def init_mlm(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the masked-LM head: transform, norm, output bias [V]; its matrix is tied."""
    d = cfg.hidden_size
    specs = {
        "transform": linear_specs(into=(d,), out=(d,)),
        "norm": norm_specs(d),
        "bias": ((cfg.vocab_size,), 0.0),
    }
    return draw(rng, specs, cfg.initializer_range)


def mlm_logits(
    params: Params,
    word: jax.Array,
    cfg: EncoderConfig,
    hidden: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Predict the tokens at `positions` only.

    params: the head's; word: the tied embeddings [V, D]; hidden [B, L, D];
    positions i32 [B, P]. Returns f32 logits [B, P, V]. (Devlin et al. 2019, section
    3.1; transform and bias as in google-research/bert, run_pretraining.py.)
    """
    b, p = positions.shape
    with jax.named_scope("mlm_head"):
        x = jnp.take_along_axis(hidden, positions[:, :, None], axis=1, mode="clip")
        x = x.reshape(b * p, -1)
        x = activate(linear(params["transform"], x), cfg.hidden_act)
        x = layer_norm(params["norm"], x, cfg.layer_norm_eps)
        logits = jax.lax.dot_general(
            x,
            word.astype(x.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return (logits + params["bias"]).reshape(b, p, -1)


def init_pair(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the pair head: [D, 2] and its bias."""
    specs = linear_specs(into=(cfg.hidden_size,), out=(2,))
    return draw(rng, specs, cfg.initializer_range)


def pair_logits(params: Params, pooled: jax.Array) -> jax.Array:
    """Return f32 logits [B, 2] of "in order" and "not" from pooled [B, D]."""
    with jax.named_scope("pair_head"):
        return linear(params, pooled).astype(jnp.float32)

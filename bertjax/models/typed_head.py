# SPDX-License-Identifier: Apache-2.0
"""A head that predicts a token's type first, and then the token given the type."""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.heads import finish_logits, transform
from bertjax.models.layers import (
    Params,
    activate,
    draw,
    linear,
    linear_specs,
    lookup,
    norm_specs,
    product_f32,
)


def init_typed(
    rng: jax.Array, cfg: EncoderConfig, types: int, by_type: bool = True
) -> Params:
    """Initialize the head.

    It has a transform [D, E] and a norm; embeddings "types" [Y, E] and "type_bias" [Y];
    "dense" [2 E, E] if tokens are predicted given types (by_type); "bias" [V]. The
    matrix over the vocabulary is that of the word embeddings.
    """
    d, e = cfg.hidden_size, cfg.embedding_width
    specs: dict[str, Any] = {
        "transform": linear_specs(into=(d,), out=(e,)),
        "norm": norm_specs(e),
        "types": ((types, e), "normal"),
        "type_bias": ((types,), 0.0),
        "bias": ((cfg.vocab_size,), 0.0),
    }
    if by_type:
        specs["dense"] = linear_specs(into=(2 * e,), out=(e,))
    return draw(rng, specs, cfg.initializer_range)


def typed_shardings(name: str) -> tuple[tuple[str, str], ...]:
    """Return the logical axes of `params[name]`, a head created by `init_typed`."""
    return (
        (f"{name}/(transform|dense)/kernel", "embed width"),
        (f"{name}/((transform|dense)/bias|norm/(scale|bias))", "width"),
        (f"{name}/types", "table embed"),
        (f"{name}/type_bias", "table"),
        (f"{name}/bias", "vocab"),
    )


def typed_logits(
    params: Params,
    word: jax.Array,
    cfg: EncoderConfig,
    hidden: jax.Array,
    types: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Predict types and tokens from hidden [B, P, D]: f32 logits [B, P, Y], [B, P, V].

    z = norm(gelu(W h)). The logits of the types are the products of z and the
    embeddings of types. e is the embedding of the most likely type, or of `types` i32
    [B, P]; no gradient flows through the choice of a type. Tokens are predicted from
    gelu(W' [z, e]) with the word embeddings [V, E], or without "dense" from z. (Liu et
    al. 2020, CugLM, section 3.3; LiuFang816/CugLM, run_pretraining.py.)
    """
    with jax.named_scope("typed_head"):
        b, p, d = hidden.shape
        z = transform(params, cfg, hidden.reshape(b * p, d))
        table = params["types"]
        type_logits = product_f32(z, table.astype(z.dtype), 1) + params["type_bias"]
        x = z
        if "dense" in params:
            if types is None:
                chosen = jnp.argmax(type_logits, axis=-1)
            else:
                chosen = types.reshape(-1)
            e = lookup(table, chosen).astype(z.dtype)
            x = linear(params["dense"], jnp.concatenate([z, e], axis=-1))
            x = activate(x, cfg.classifier_activation or cfg.hidden_act)
        logits = product_f32(x, word.astype(x.dtype), 1)
        logits = finish_logits(params, cfg, logits, 1)
        return type_logits.reshape(b, p, -1), logits.reshape(b, p, -1)


def typed_flops(
    cfg: EncoderConfig, types: int, by_type: bool, length: int, predictions: int
) -> float:
    """Count the head's FLOPs, forward and backward, per token slot of `length`."""
    d, e = cfg.hidden_size, cfg.embedding_width
    each = d * e + types * e + 2 * e * e * by_type + cfg.vocab_size * e
    return 6.0 * each * predictions / length

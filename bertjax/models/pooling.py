# SPDX-License-Identifier: Apache-2.0
"""From the hidden states of a sequence to the vector that its classes are made of.

The first token through a dense layer and tanh: Devlin et al. 2019, section 3.1 and
google-research/bert, modeling.py; what other families do: models/families.py.
"""

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, activate, linear, take_at


def pool(
    params: Params, cfg: EncoderConfig, x: jax.Array, batch: dict[str, jax.Array]
) -> jax.Array:
    """Return the vector of each sequence that classes are computed of.

    x [B, L, D] -> [B, D], of packed rows [B, S, D].
    """
    one = means if cfg.classifier_pooling == "mean" else first_tokens
    vectors = one(x, batch)
    if not cfg.pooler_activation:
        return vectors
    vectors = linear(params["pooler"], vectors)
    if cfg.pooler_activation == "tanh":
        return jnp.tanh(vectors)
    return activate(vectors, cfg.pooler_activation)


def means(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Average the tokens of each sequence: [B, D], of packed rows [B, S, D]."""
    mine = batch["attention_mask"][:, None, :] > 0
    if "cls_positions" in batch:
        number = 1 + jnp.arange(batch["cls_positions"].shape[1])
        mine = batch["segment_ids"][:, None, :] == number[:, None]
    mine = mine.astype(jnp.float32)  # [B, S, L]
    # A TPU would round what it multiplies to 8 bits.
    precise = jax.lax.Precision.HIGHEST
    total = jnp.matmul(mine, x.astype(jnp.float32), precision=precise)
    out = total / jnp.maximum(mine.sum(axis=-1, keepdims=True), 1)
    return (out if "cls_positions" in batch else out[:, 0]).astype(x.dtype)


def first_tokens(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Take the first token of each sequence: [B, D], of packed rows [B, S, D]."""
    if "cls_positions" not in batch:
        return x[:, 0]
    return take_at(x, batch["cls_positions"])


POOLINGS = {"mean": means, "cls": first_tokens}  # named in tasks/task_type.py too


def normalize_vectors(vectors: jax.Array) -> jax.Array:
    """Make vectors of length 1, [..., D]; zeros stay zeros."""
    size = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(size, 1e-24))

# SPDX-License-Identifier: Apache-2.0
"""Pooling: one vector per sequence, from which classes are computed.

BERT's is the first token through a dense layer and tanh (Devlin et al. 2019, section
3.1; google-research/bert, modeling.py). models/families.py has that of other families.
"""

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, activate, linear, take_at


def pool(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    batch: dict[str, jax.Array],
    pooling: str = "",
) -> jax.Array:
    """Return the vector of each sequence from which classes are computed.

    x [B, L, D] -> [B, D], or [B, S, D] for packed rows. pooling: a key of POOLINGS;
    empty: the config's. Raises UserError if a decoder's config pools the first token.
    """
    if cfg.is_decoder and cfg.classifier_pooling == "cls":
        raise UserError(
            "model.classifier_pooling=cls: with model.is_decoder=True the first token "
            "sees itself alone; set model.classifier_pooling to last or mean"
        )
    vectors = POOLINGS[pooling or cfg.classifier_pooling](x, batch)
    if not cfg.pooler_activation:
        return vectors
    vectors = linear(params["pooler"], vectors)
    if cfg.pooler_activation == "tanh":
        return jnp.tanh(vectors)
    return activate(vectors, cfg.pooler_activation)


def members_of(batch: dict[str, jax.Array]) -> jax.Array:
    """Return the tokens of each sequence, boolean [B, S, L]; S = 1 if unpacked."""
    if "cls_positions" not in batch:
        return batch["attention_mask"][:, None, :] > 0
    number = 1 + jnp.arange(batch["cls_positions"].shape[1])
    return batch["segment_ids"][:, None, :] == number[:, None]


def means(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Average the tokens of each sequence: [B, D], or [B, S, D] for packed rows."""
    mine = members_of(batch).astype(jnp.float32)
    # By default a TPU rounds the inputs of a product to 8 bits.
    precise = jax.lax.Precision.HIGHEST
    total = jnp.matmul(mine, x.astype(jnp.float32), precision=precise)
    out = total / jnp.maximum(mine.sum(axis=-1, keepdims=True), 1)
    return (out if "cls_positions" in batch else out[:, 0]).astype(x.dtype)


def first_tokens(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Select the first token of each sequence: [B, D], or [B, S, D] for packed rows."""
    if "cls_positions" not in batch:
        return x[:, 0]
    return take_at(x, batch["cls_positions"])


def last_positions(batch: dict[str, jax.Array]) -> jax.Array:
    """Find the last token of each sequence: i32 [B, 1], or [B, S] for packed rows.

    It is 0 for a slot without a sequence.

        attention_mask   0  1  1  1  0  ->  3
        segment_ids      1  1  2  2  0  ->  1  3
    """
    mine = members_of(batch)
    place = jnp.arange(mine.shape[-1], dtype=jnp.int32)
    return jnp.max(jnp.where(mine, place, 0), axis=-1)


def last_tokens(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Select the last token of each sequence: [B, D], or [B, S, D] for packed rows."""
    vectors = take_at(x, last_positions(batch))
    return vectors if "cls_positions" in batch else vectors[:, 0]


# tasks/task_type.py has these names too.
POOLINGS = {"mean": means, "cls": first_tokens, "last": last_tokens}


def normalize_vectors(vectors: jax.Array) -> jax.Array:
    """Scale vectors [..., D] to length 1; zeros stay zeros."""
    size = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(size, 1e-24))


def text_vectors(
    x: jax.Array, batch: dict[str, jax.Array], pooling: str, normalize: bool
) -> jax.Array:
    """Return the embedding of each sequence, f32 [B, D], or [B, S, D] for packed rows.

    The vector of a slot without a sequence is meaningless. pooling: a key of POOLINGS;
    normalize: scale to length 1.
    """
    with jax.named_scope("pooling"):
        vectors = POOLINGS[pooling](x.astype(jnp.float32), batch)
        return normalize_vectors(vectors) if normalize else vectors

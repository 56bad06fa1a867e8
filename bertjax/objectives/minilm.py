# SPDX-License-Identifier: Apache-2.0
"""MiniLM: distill the self-attention relations of one layer of a teacher.

Wang et al. 2020 (MiniLM, arXiv 2002.10957, section 3) and 2021 (MiniLMv2, arXiv
2012.15828, section 3.1). The queries, keys and values of a layer are split into
relation heads; the relation of vectors A is softmax(A A^T / sqrt(head width)), whose
shape does not depend on the widths of teacher and student. The relations of the
student's last layer learn to equal those of the teacher's layer.
"""

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import EncodedInside
from bertjax.models.layers import Params, Rng
from bertjax.models.skips import Earlier
from bertjax.models.stacked_layers import take_layer
from bertjax.models.transformer_layer import first_values, layer_vectors
from bertjax.objectives.base import NOWHERE, Batch, Head, Sum
from bertjax.objectives.losses import kl_divergence
from bertjax.objectives.task_head import real_tokens
from bertjax.objectives.teacher import Teacher
from bertjax.parallel.sharding import TEACHER

HIDDEN = -1e9  # the score of padding and of tokens of other sequences
# Relation -> the two kinds of vectors that are multiplied.
RELATIONS = {
    "attention": ("query", "key"),
    "query": ("query", "query"),
    "key": ("key", "key"),
    "value": ("value", "value"),
}


def make_head(
    layer: int = 0,
    heads: int = 0,
    queries: float = 1.0,
    keys: float = 1.0,
    values: float = 1.0,
    attention: float = 0.0,
    teacher: Teacher | None = None,
) -> Head:
    """Make the head, which has no parameters.

    layer: the teacher's layer, from 1; 0: the last. heads: the number of relation
    heads; 0: as many as the teacher's attention heads. queries, keys, values,
    attention: the factors of query_relation_loss and so on, each KL(teacher || student)
    averaged over real tokens and heads; 0 leaves a loss out. MiniLM (2020) is
    attention=1,queries=0,keys=0; MiniLMv2 uses layer 21 of 24 of a large teacher, and
    heads=48 or 64. Raises UserError for numbers below 0, no factor above 0, and a layer
    that the teacher does not have.
    """
    weigh = {"query": queries, "key": keys, "value": values, "attention": attention}
    if min(weigh.values()) < 0 or not any(weigh.values()) or layer < 0 or heads < 0:
        raise UserError(
            "objective: minilm's layer, heads and weights (queries, keys, values, "
            "attention) must be 0 or more, and some weight more"
        )
    teacher = teacher and teacher.pooled(False)
    pairs = {k: RELATIONS[k] for k, weight in weigh.items() if weight and teacher}
    if teacher and layer > teacher.cfg.num_hidden_layers:
        raise UserError(
            f"objective: minilm:layer={layer}, and the teacher has "
            f"{teacher.cfg.num_hidden_layers} layers"
        )

    def weights(batch: Batch) -> dict[str, jax.Array]:
        real = jnp.sum(real_tokens(batch))
        return {f"{name}_relation_loss": real for name in pairs}

    def sums(
        params: Params,
        cfg: EncoderConfig,
        encoded: EncodedInside,
        batch: Batch,
        rng: Rng,
    ) -> dict[str, Sum]:
        if teacher is None:
            return {}
        n = teacher.cfg.num_hidden_layers
        at = (layer or n) - 1
        known = teacher.encode(params, batch, depths=(at, 0, (n - at) % n)).inner
        own = vectors_of(params["encoder"], cfg, encoded.inner, -1)
        theirs = vectors_of(params[TEACHER]["encoder"], teacher.cfg, known, at)
        count = heads or teacher.cfg.num_attention_heads
        return {
            f"{name}_relation_loss": relation_divergence(
                [own[k] for k in pair], [theirs[k] for k in pair], count, batch
            )
            for name, pair in pairs.items()
        }

    def flops(cfg: EncoderConfig, length: int, predictions: int) -> float:
        if teacher is None:
            return 0.0
        # Queries, keys and values are computed a second time; each relation takes L D
        # multiply-adds per token.
        own = 6.0 * (3 * cfg.hidden_size**2 + len(pairs) * length * cfg.hidden_size)
        d = teacher.cfg.hidden_size
        return own + teacher.flops(length) + 2.0 * (3 * d * d + len(pairs) * length * d)

    return Head(
        "minilm",
        lambda rng, cfg: {},
        weights,
        sums,
        reads=NOWHERE,
        coefficients={f"{k}_relation_loss": weigh[k] for k in pairs},
        flops=flops,
        inner=(-1, 0, 1),
        needs_teacher=True,
        init_teacher=teacher and teacher.init,
    )


def vectors_of(
    params: Params, cfg: EncoderConfig, inner: tuple[jax.Array, ...], layer: int
) -> dict[str, jax.Array]:
    """Return the queries, keys and values of an encoder's layer.

    inner: the input of the layer, the input of the first layer, and the earlier result
    that unet_skips add to this layer (skips.py); the last is read only if the layer has
    such a skip.
    """
    groups, (x, first, result) = cfg.groups, inner
    own, begin = (
        take_layer(params["layers"], group, groups[-1] + 1)
        for group in (groups[layer], 0)
    )
    earlier = Earlier(
        first if cfg.embedding_skip else None,
        first_values(begin, cfg, first) if cfg.value_skip else None,
        result if "unet_skips" in own else None,
    )
    return layer_vectors(own, cfg, x, earlier)


def relation_divergence(
    student: list[jax.Array], teacher: list[jax.Array], heads: int, batch: Batch
) -> Sum:
    """Sum KL(teacher || student) of the relations over tokens; average over heads.

    student, teacher: two vectors per token, [B, L, M] each; the models may have
    different M, which `heads` must divide. A token attends to the real tokens of its
    own sequence. Only one head's [B, L, L] is in memory at a time; the backward pass
    recomputes it. Raises UserError if `heads` does not divide M.
    """
    for vectors in (student, teacher):
        if (width := vectors[0].shape[-1]) % heads:
            raise UserError(
                f"objective: minilm:heads={heads} does not divide vectors of {width}: "
                "take a number that divides teacher's and student's hidden_size"
            )
    number = batch.get("segment_ids", batch["attention_mask"])  # 0: padding
    mask = (number[:, :, None] == number[:, None]) & (number[:, None] > 0)
    real = real_tokens(batch) / heads

    def cut(x: jax.Array) -> jax.Array:
        b, length, width = x.shape
        return jnp.moveaxis(x.reshape(b, length, heads, width // heads), 2, 0)

    def scores(pair: list[jax.Array]) -> jax.Array:
        x, y = (part.astype(jnp.float32) for part in pair)
        found = jnp.einsum("bqd,bkd->bqk", x, y) / x.shape[-1] ** 0.5
        return jnp.where(mask, found, HIDDEN)

    def add(total: jax.Array, one: list[list[jax.Array]]) -> tuple[jax.Array, None]:
        return total + kl_divergence(*map(scores, one), real).value, None

    parts = [[*map(cut, vectors)] for vectors in (student, teacher)]
    with jax.named_scope("relations"):
        start = jnp.zeros((), jnp.float32)
        total, _ = jax.lax.scan(jax.checkpoint(add), start, parts)
    return Sum(total, jnp.sum(real_tokens(batch)))

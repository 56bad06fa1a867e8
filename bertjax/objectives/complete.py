# SPDX-License-Identifier: Apache-2.0
"""Which entity completes a triple: a softmax over all entities (CoKE).

Wang et al. 2019 (arXiv 1911.02168), section 3: the hidden state at the [MASK] of an
end, through the masked LM's transform, meets the embeddings of the entities. The right
one's share of the target is `gold`, the others share the rest alike. That number is
what the official code calls SOFT_LABEL (PaddlePaddle/Research, KG/CoKE), 0.15 to 1: its
README lists it as "label smoothing", of which it is the contrary. Relations and special
pieces are no candidates here; there they share the softmax, though never the target.

Ours: with `product` the hidden state is multiplied by the embedding of the entity that
is given, and normalised, in the place of the transform. A candidate's score is then
bilinear in the two entities, as in DistMult (Yang et al. 2015, arXiv 1412.6575), with a
relation that has seen the entity; a sum of embeddings alone learns that slowly.
Where a batch has several right answers to a query they share `gold` (task.answers).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import head_flops
from bertjax.models.initializers import draw_params
from bertjax.models.layers import Params, dropout, layer_norm, lookup, norm_specs
from bertjax.objectives.base import NO_TOKENIZER, Batch, Head, Labels, Sum
from bertjax.objectives.entity_ranks import best_candidates, check_top, count_above
from bertjax.objectives.losses import check_shapes
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import PARAMS, sum_in_chunks


def soft_cross_entropy(
    scores: jax.Array, right: jax.Array, weights: jax.Array, gold: float
) -> Sum:
    """Sum weighted cross-entropies, in nats, of targets that give the right candidate
    `gold` and each of the others (1 - gold) / (N - 1).

    Of A right ones the target is the mean of theirs. scores f32 [..., N]; right i32
    [..., A], -1 for none but in the first place; weights f32 [...].
    """
    check_shapes(scores, right[..., 0], weights)
    is_right = right >= 0
    count = jnp.sum(is_right, axis=-1)
    own = jnp.take_along_axis(scores, right, axis=-1, mode="clip")
    own = jnp.sum(own * is_right, axis=-1) / count
    rest = (1.0 - gold) / max(scores.shape[-1] - 1, 1)
    each = jax.nn.logsumexp(scores, axis=-1) - (gold - rest) * own
    if gold < 1:
        each -= rest * jnp.sum(scores, axis=-1)
    return Sum(jnp.sum(weights * each), jnp.sum(weights))


def right_numbers(ids: jax.Array, more: jax.Array | None, first: int) -> jax.Array:
    """Return the numbers of right candidates, i32 [..., A], -1 for none.

    ids i32 [...], more i32 [..., A - 1]: their tokens; first: that of candidate 0.
    """
    right = jnp.maximum(ids - first, 0)[..., None]
    if more is None:
        return right
    return jnp.concatenate([right, jnp.where(more < 0, -1, more - first)], axis=-1)


def likeliest_of(scores: jax.Array, right: jax.Array) -> jax.Array:
    """Return the right candidate of the highest score, i32 [...], as above."""
    own = jnp.take_along_axis(scores, right, axis=-1, mode="clip")
    best = jnp.argmax(jnp.where(right >= 0, own, -jnp.inf), axis=-1, keepdims=True)
    return jnp.take_along_axis(right, best, axis=-1)[..., 0]


def entity_scores(
    params: Params, cfg: EncoderConfig, hidden: jax.Array, first: int, count: int
) -> jax.Array:
    """Return the logits of the entities, f32 [B, S, N], from hidden [B, S, D].

    Their tokens are `count` ones from `first` on.
    """
    tokens = slice(first, first + count)
    head = dict(params.get(PARAMS, {}))
    for name in head.keys() & {"bias", "decoder"}:
        head[name] = head[name][tokens]
    word = params["encoder"]["embeddings"]["word"][tokens]
    return heads.mlm_logits(head, word, dataclasses.replace(cfg, pieces=0), hidden)


def labels(rows: int, length: int, answers: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Name what a batch of packed triples holds beside tokens, and of a query so many
    answers."""
    slots = length // 3
    sizes = {"segment_ids": length, "position_ids": length}
    names = ("positions", "given", "ids")
    sizes |= {f"complete_{name}": slots for name in names}
    arrays = {k: jax.ShapeDtypeStruct((rows, n), jnp.int32) for k, n in sizes.items()}
    if answers > 1:
        shape = rows, slots, answers - 1
        arrays["complete_more"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct((rows, slots), jnp.float32)
    return arrays | {"complete_weights": weights}


def init_product(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the masked LM's head with a norm, whatever the config says, and without a
    transform. Raises UserError for embeddings of another width than hidden states."""
    if cfg.embedding_width != cfg.hidden_size:
        raise UserError(
            f"objective: complete's product needs model.embedding_size="
            f"{cfg.embedding_size} to be model.hidden_size={cfg.hidden_size}"
        )
    plain = heads.init_mlm(rng, dataclasses.replace(cfg, classifier_transform=False))
    norm = norm_specs(cfg.hidden_size, cfg.norm_bias)
    return plain | draw_params(rng, {"norm": norm}, cfg)


def read_hidden(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Any
) -> jax.Array:
    """Return what meets the head's transform: the hidden states [B, S, D]."""
    return encoded.hidden


def read_product(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Any
) -> jax.Array:
    """Return hidden states times the entities that are given, [B, S, D]."""
    given = batch["complete_given"]
    return multiply_by_given(params, cfg, encoded.hidden, given, rng)


def multiply_by_given(
    params: Params,
    cfg: EncoderConfig,
    hidden: jax.Array,
    given: jax.Array,
    rng: jax.Array | None,
) -> jax.Array:
    """Return hidden [B, S, D] times the embeddings of tokens given i32 [B, S],
    normalised, and dropped out as hidden states are, unless rng is None."""
    with jax.named_scope("product"):
        x = hidden * lookup(params["encoder"]["embeddings"]["word"], given)
        norm = params[PARAMS]["norm"]
        x = layer_norm(norm, x, cfg.layer_norm_eps, cfg.norm_type)
        return dropout(x, cfg.hidden_dropout_prob, rng).astype(cfg.dtype)


def make_head(
    gold: float = 1.0,
    top: int = 10,
    product: bool = False,
    answers: int = 1,
    candidates: Any = None,
) -> Head:
    """Make the head, whose parameters are the masked LM's; with `product` a norm and
    a bias are all that it has of its own.

    gold: the right entity's share of the target. top: entities of an answer at most.
    product: multiply by the entity that is given, in the place of the transform.
    answers: of a query in batches that are made up (task.answers). candidates: which
    tokens are entities (tasks/types/complete.py); None: all that are not special.
    Raises UserError for a gold that is no share, and a top below 1; init does for a
    product of embeddings that are not as wide as hidden states.
    """
    parts = (init_product, read_product) if product else (heads.init_mlm, read_hidden)
    own = partial(labels, answers=answers)
    return make_candidate_head("complete", own, gold, top, candidates, *parts)


def tokens_of(candidates: Any, cfg: EncoderConfig) -> tuple[int, int]:
    """Return the first token of the candidates, and how many there are; of None of all
    that are not special."""
    if candidates is not None:
        return candidates.first, candidates.count
    special = len(NO_TOKENIZER.special_ids)
    return special, max(cfg.vocab_size - special, 1)


def make_candidate_head(
    name: str,
    labels: Labels,
    gold: float,
    top: int,
    candidates: Any,
    init: Callable[..., Params] = heads.init_mlm,
    read: Callable[..., jax.Array] = read_hidden,
) -> Head:
    """Make a head that chooses among tokens at `<name>_positions` i32 [B, S].

    A batch has `<name>_ids` i32, `<name>_weights` f32 [B, S] where it is known what is
    right, `<name>_more` i32 [B, S, A - 1] where more is, -1 for none, known_entities
    i32 [B, S, F] where it is ranked. init makes the head's parameters, read what it
    reads, as read_hidden does.
    """
    ids_name = f"{name}_ids"
    slot_weights = partial(weights_of, f"{name}_weights")
    if not 0 < gold <= 1:
        raise UserError(f"objective: {name}'s gold={gold} has to be above 0, at most 1")
    check_top(name, top)

    def weights(batch: Batch) -> dict[str, jax.Array]:
        if ids_name not in batch:
            return {}
        return {f"{name}_loss": jnp.sum(slot_weights(batch))}

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Any
    ) -> dict[str, Sum]:
        if ids_name not in batch:  # rows that are to be answered
            return {}
        first, count = tokens_of(candidates, cfg)
        hidden = read(params, cfg, encoded, batch, rng)
        right = right_numbers(batch[ids_name], batch.get(f"{name}_more"), first)

        def score(_: Any, hidden: Any, right: Any, weights: Any) -> tuple[Any, Any]:
            scores = entity_scores(params, cfg, hidden, first, count)
            loss = soft_cross_entropy(scores, right, weights, gold)
            is_right = accuracy(scores, likeliest_of(scores, right), weights)
            return {f"{name}_loss": loss, f"{name}_accuracy": is_right}, ()

        arrays = hidden, right, slot_weights(batch)
        return sum_in_chunks(score, cfg, arrays)[0]

    def outputs(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
    ) -> dict[str, jax.Array]:
        first, count = tokens_of(candidates, cfg)
        hidden = read(params, cfg, encoded, batch, None)

        def rank(_: Any, hidden: Any, *more: Any) -> tuple[Any, Any]:
            scores = entity_scores(params, cfg, hidden, first, count)
            if not more:
                return (), best_candidates(scores, jax.nn.softmax(scores), top)
            ids, *known = more
            return (), count_above(scores, jnp.maximum(ids - first, 0), *known)

        given = [k for k in (ids_name, "known_entities") if k in batch]
        arrays = hidden, *(batch[k] for k in given)
        return sum_in_chunks(rank, cfg, arrays)[1]

    return Head(
        name,
        init,
        weights,
        sums,
        reads=f"{name}_positions",
        params=PARAMS,
        outputs=outputs,
        labels=labels,
        flops=head_flops,
        task_type=name,
    )

# SPDX-License-Identifier: Apache-2.0
"""CoKE: predict the entity that completes a triple, by a softmax over all entities.

Wang et al. 2019 (arXiv 1911.02168), section 3. The head or tail of a triple is [MASK];
its hidden state passes through the masked LM's transform, and is multiplied with the
embeddings of the entities. In the target distribution the right entity has probability
`gold`, and the others share the rest equally. The official code calls this number
SOFT_LABEL (PaddlePaddle/Research, KG/CoKE), 0.15 to 1; its README lists it as "label
smoothing", but it is 1 minus the smoothing. Here relations and special tokens are not
candidates; there they are part of the softmax, but never of the target.

Our addition: with `product` the hidden state is multiplied by the embedding of the
given entity, and normalized, instead of transformed. The score of a candidate is then
bilinear in the two entities, as in DistMult (Yang et al. 2015, arXiv 1412.6575), with a
relation that has attended to the entity; from sums of embeddings alone a model learns
this slowly. If a query has several right answers in a batch (task.answers), they share
`gold`.
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
from bertjax.models.layers import Params, Rng, dropout, layer_norm, lookup, norm_specs
from bertjax.objectives.base import NO_TOKENIZER, Batch, Head, Labels, Sum
from bertjax.objectives.entity_ranks import best_candidates, check_top, count_above
from bertjax.objectives.losses import check_shapes
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import PARAMS, sum_in_chunks


def soft_cross_entropy(
    scores: jax.Array, right: jax.Array, weights: jax.Array, gold: float
) -> Sum:
    """Sum weighted cross-entropies, in nats, with targets that give the right candidate
    probability `gold` and each other candidate (1 - gold) / (N - 1).

    With several right candidates, the target is the mean of their targets. scores f32
    [..., N]; right i32 [..., A], -1 for none, but never in the first place; weights f32
    [...].
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
    """Return the numbers of the right candidates, i32 [..., A], -1 for none.

    ids i32 [...], more i32 [..., A - 1]: their tokens; first: the token of candidate 0.
    """
    right = jnp.maximum(ids - first, 0)[..., None]
    if more is None:
        return right
    return jnp.concatenate([right, jnp.where(more < 0, -1, more - first)], axis=-1)


def likeliest_of(scores: jax.Array, right: jax.Array) -> jax.Array:
    """Return the right candidate with the highest score, i32 [...].

    Arguments as in `soft_cross_entropy`.
    """
    own = jnp.take_along_axis(scores, right, axis=-1, mode="clip")
    best = jnp.argmax(jnp.where(right >= 0, own, -jnp.inf), axis=-1, keepdims=True)
    return jnp.take_along_axis(right, best, axis=-1)[..., 0]


def entity_scores(
    params: Params, cfg: EncoderConfig, hidden: jax.Array, first: int, count: int
) -> jax.Array:
    """Return the logits of the entities, f32 [B, S, N], from hidden [B, S, D].

    The entities are the `count` tokens from `first` on.
    """
    tokens = slice(first, first + count)
    head = dict(params.get(PARAMS, {}))
    for name in head.keys() & {"bias", "decoder"}:
        head[name] = head[name][tokens]
    word = params["encoder"]["embeddings"]["word"][tokens]
    return heads.mlm_logits(head, word, dataclasses.replace(cfg, pieces=0), hidden)


def labels(rows: int, length: int, answers: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch of packed triples, beside tokens.

    answers: right answers per query.
    """
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
    """Make the masked LM's head without a transform and always with a norm.

    Raises UserError if embeddings are not as wide as hidden states.
    """
    if cfg.embedding_width != cfg.hidden_size:
        raise UserError(
            f"objective: complete's product needs model.embedding_size="
            f"{cfg.embedding_size} to be model.hidden_size={cfg.hidden_size}"
        )
    plain = heads.init_mlm(rng, dataclasses.replace(cfg, classifier_transform=False))
    norm = norm_specs(cfg.hidden_size, cfg.norm_bias)
    return plain | draw_params(rng, {"norm": norm}, cfg)


def read_hidden(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
) -> jax.Array:
    """Return the input of the head's transform: the hidden states, [B, S, D]."""
    return encoded.hidden


def read_product(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
) -> jax.Array:
    """Return hidden states times the embeddings of the given entities, [B, S, D].

    The product is normalized, and dropped out like hidden states unless rng is None.
    """
    with jax.named_scope("product"):
        word = params["encoder"]["embeddings"]["word"]
        x = encoded.hidden * lookup(word, batch["complete_given"])
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
    """Make the head; its parameters are the masked LM's, params["mlm"].

    gold: the right entity's probability in the target. top: the most entities in an
    answer. product: multiply by the given entity instead of the transform; the head
    then has only a norm and a bias. answers: per query, in batches that are made up
    (task.answers). candidates: which tokens are entities (tasks/types/complete.py);
    None: all that are not special. Raises UserError for a gold outside (0, 1] and a top
    below 1; init raises UserError for a product if embeddings are not as wide as hidden
    states.
    """
    parts = (init_product, read_product) if product else (heads.init_mlm, read_hidden)
    own = partial(labels, answers=answers)
    return make_candidate_head("complete", own, gold, top, candidates, *parts)


def tokens_of(candidates: Any, cfg: EncoderConfig) -> tuple[int, int]:
    """Return the first token of the candidates and their number.

    candidates: None for all tokens that are not special.
    """
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
    """Make a head that chooses among candidate tokens at `<name>_positions` i32 [B, S].

    A batch with known answers has `<name>_ids` i32 and `<name>_weights` f32 [B, S]; if
    queries have further right answers, `<name>_more` i32 [B, S, A - 1], -1 for none; if
    answers are ranked, known_entities i32 [B, S, F]. init makes the head's parameters;
    read returns the head's input, like read_hidden. Raises UserError for a gold outside
    (0, 1] and a top below 1.
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
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        if ids_name not in batch:  # rows to answer, without known answers
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

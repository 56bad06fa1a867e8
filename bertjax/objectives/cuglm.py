# SPDX-License-Identifier: Apache-2.0
"""CugLM: predict masked names of code and their types, next tokens, and next segments.

Liu et al. 2020 (Multi-task learning based pre-trained language model for code
completion, ASE, doi 10.1145/3324884.3416591). In the authors' code (LiuFang816/CugLM)
the causal mask lets every token see the whole text from the second layer on, and the
causal part has a separate encoder without positions. Here one encoder reads both copies
of a row (data/features/cuglm.py), and in the causal copy no token sees later ones.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import head_flops
from bertjax.models.layers import Params, Rng
from bertjax.models.typed_head import (
    init_typed,
    typed_flops,
    typed_logits,
    typed_shardings,
)
from bertjax.objectives import nsp as next_segment
from bertjax.objectives.base import NO_TOKENIZER, Batch, Head, Objective, Sum, TokenIds
from bertjax.objectives.combine import combine
from bertjax.objectives.losses import logits_of
from bertjax.objectives.metrics import loss_and_accuracy
from bertjax.objectives.token_head import PARAMS, score_tokens, sum_in_chunks

NAME = "cuglm"
STREAM = "type"
# Ids up to this one are not types: 0 is not a name, 1 a type outside the vocabulary.
UNKNOWN_TYPE = 1
MADE_UP = 7  # the number of types if the text has no such stream
TOP = 1, 5


def make_objective(
    cfg: EncoderConfig,
    tokens: TokenIds = NO_TOKENIZER,
    causal: bool = False,
    nsp: bool = True,
    stages: int = 2,
    types: float = 1.0,
    gold: bool = False,
) -> tuple[Objective, EncoderConfig]:
    """Build the sum of four losses: `mlm_loss` of masked names, `type_loss` of their
    types, `lm_loss` of the next token in a causal copy of the text, and `nsp_loss`,
    whether the second segment of code follows the first.

    causal: the masked copy is causal too, and there is no nsp_loss, as in finetuning
    (section 3.4). nsp: whether there is an nsp_loss otherwise. stages: with 2 the head
    of names also reads the likeliest type; with 1 it reads only what the head of types
    reads.
    types: the factor of type_loss. gold: in training, use the true type instead of the
    likeliest one. Raises UserError for a decoder, and for options that contradict each
    other.
    """
    if cfg.is_decoder:
        raise UserError(
            "model.is_decoder=True: cuglm says itself which tokens see those behind "
            "them: set model.is_decoder=False"
        )
    if stages not in (1, 2) or types < 0 or (stages == 2 and not types):
        raise UserError(
            f"objective: cuglm's stages={stages} must be 1 or 2, and types={types} 0 or"
            " more, in two stages above 0"
        )
    if gold and stages == 1:
        raise UserError("objective: cuglm's gold=1 has no effect with stages=1")
    needs = frozenset({f"{NAME}:causal={int(causal)}"})
    size = dict(tokens.streams).get(STREAM, MADE_UP)
    own = [
        make_names_head(needs, tokens.unk_id, size, stages == 2, types, gold),
        make_next_head(needs, tokens.unk_id),
    ]
    follows = nsp and not causal
    if follows:
        own.append(next_segment.make_head())
    cfg = dataclasses.replace(cfg, pooler=follows)
    return combine(own, cfg), cfg


def make_names_head(
    needs: frozenset[str],
    unk_id: int,
    size: int,
    by_type: bool = True,
    weight: float = 1.0,
    gold: bool = False,
) -> Head:
    """Make the head of masked names and their types.

    size: the number of types. by_type: stages=2 of `make_objective`; weight: the factor
    of type_loss. Unknown tokens, and types outside the vocabulary, are not trained on.
    Evaluations report `masked_name_top1` and the like: see `completions`.
    """

    def weigh(batch: Batch) -> tuple[jax.Array, jax.Array]:
        weights = batch["mlm_weights"]
        known = batch["mlm_types"] > UNKNOWN_TYPE
        return weights * (batch["mlm_ids"] != unk_id), weights * known

    def weights(batch: Batch) -> dict[str, jax.Array]:
        sums = map(jnp.sum, weigh(batch))
        terms = dict(zip(("mlm_loss", "type_loss"), sums, strict=True))
        return terms if weight else {"mlm_loss": terms["mlm_loss"]}

    def score(
        params: Params,
        cfg: EncoderConfig,
        is_training: bool,
        first: jax.Array | None,
        *arrays: jax.Array,
    ) -> tuple[dict[str, Sum], jax.Array]:
        hidden, ids, types, of_ids, of_types = arrays
        word = params["encoder"]["embeddings"]["word"]
        given = types if gold and is_training else None
        type_logits, logits = typed_logits(params[NAME], word, cfg, hidden, given)
        terms = loss_and_accuracy("mlm", logits, ids, of_ids)
        if weight:
            terms |= loss_and_accuracy("type", type_logits, types, of_types)
        return terms, ranks(logits, ids)

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        run = functools.partial(score, params, cfg, rng is not None)
        arrays = encoded.hidden, batch["mlm_ids"], batch["mlm_types"], *weigh(batch)
        terms, rank = sum_in_chunks(run, cfg, arrays)
        if rng is None:
            terms |= name_completions("masked_name", rank, batch, "mlm", unk_id)
        return terms

    return Head(
        NAME,
        lambda rng, cfg: init_typed(rng, cfg, size, by_type),
        weights,
        sums,
        reads="mlm_positions",
        needs=needs,
        coefficients={"type_loss": weight} if weight else {},
        shardings=typed_shardings(NAME),
        flops=lambda cfg, length, p: typed_flops(cfg, size, by_type, length, p),
    )


def make_next_head(needs: frozenset[str], unk_id: int) -> Head:
    """Make the head of next tokens; its parameters are params["mlm"] (token_head.py).

    Unknown tokens are not trained on. Evaluations report `token_top1` and the like for
    all tokens and `name_top1` and the like for whole names: see `completions`.
    """

    def weigh(batch: Batch) -> jax.Array:
        return batch["lm_weights"] * (batch["lm_ids"] != unk_id)

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        def score(first: jax.Array | None, *arrays: jax.Array) -> tuple[Any, jax.Array]:
            terms, logits = score_tokens(params, cfg, *arrays, "lm")
            return terms, ranks(logits, arrays[1])

        arrays = encoded.hidden, batch["lm_ids"], weigh(batch)
        terms, rank = sum_in_chunks(score, cfg, arrays)
        if rng is None:
            weights = batch["lm_weights"]
            unknown = batch["lm_ids"] == unk_id
            terms |= completions("token", rank, weights, unknown)
            terms |= name_completions("name", rank, batch, "lm", unk_id)
        return terms

    return Head(
        "lm",
        heads.init_mlm,
        lambda batch: {"lm_loss": jnp.sum(weigh(batch))},
        sums,
        reads="lm_positions",
        needs=needs,
        params=PARAMS,
        flops=head_flops,
    )


def ranks(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Count the tokens that are likelier than the true one, i32 [B, P].

    logits f32 [B, P, V], ids i32 [B, P]. Ties do not count. NaN logits do, so that a
    broken model does not seem to be right.
    """
    true = logits_of(logits, ids)[..., None]
    return jnp.sum(~(logits <= true), axis=-1, dtype=jnp.int32)


def completions(
    what: str, rank: jax.Array, weights: jax.Array, unknown: jax.Array
) -> dict[str, Sum]:
    """Count how often the true token or name is among the 1 and the 5 likeliest.

    rank i32, weights f32, unknown bool, all of the same shape. Returns `<what>_top1`,
    `<what>_top5`: of all, and unknown ones are always wrong because an unknown token
    cannot be completed; `<what>_top1_known`, `<what>_top5_known`: of known ones only.
    """
    known = weights * ~unknown
    terms = {}
    for most in TOP:
        right = jnp.sum(known * (rank < most))
        terms[f"{what}_top{most}"] = Sum(right, jnp.sum(weights))
        terms[f"{what}_top{most}_known"] = Sum(right, jnp.sum(known))
    return terms


def name_completions(
    what: str, rank: jax.Array, batch: Batch, stream: str, unk_id: int
) -> dict[str, Sum]:
    """Count whole names: a name is among the k likeliest if each of its tokens is,
    given the true tokens before it. For k = 1 these are the names that a greedy
    completion writes; for k = 5 they are at least those that 5 beams would offer.

    The batch has `<stream>_names` i32 [B, P], the number of each token's name, from 1
    to P at most, 0 for none; `<stream>_ids` and `<stream>_weights`.
    """
    names, ids = batch[f"{stream}_names"], batch[f"{stream}_ids"]
    weights = batch[f"{stream}_weights"]
    rows = jnp.arange(len(names))[:, None]
    zeros = jnp.zeros((len(names), names.shape[1] + 1), rank.dtype)
    worst = zeros.at[rows, names].max(rank)[:, 1:]
    unknown = zeros.at[rows, names].max((ids == unk_id).astype(rank.dtype))[:, 1:] > 0
    weights = zeros.astype(weights.dtype).at[rows, names].max(weights)[:, 1:]
    return completions(what, worst, weights, unknown)

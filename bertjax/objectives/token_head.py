# SPDX-License-Identifier: Apache-2.0
"""The head of every objective that predicts token ids.

The hidden state at a position predicts an id, and the prediction has a weight. The host
chooses positions, ids and weights (data/features): a masked LM predicts the original
token at the position, a causal LM the next token, and a diffusion model weights
predictions by the mask rate of the row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import head_flops
from bertjax.models.layers import Params, Rng
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy, z_loss_of
from bertjax.objectives.metrics import accuracy
from bertjax.objectives.piecewise_gradient import add_pieces, cut
from bertjax.objectives.sampled_vocab import check_size, restrict
from bertjax.parallel.sharding import size_along

PARAMS = "mlm"  # the parameters of the head over the vocabulary; token heads share them


def make_token_head(
    name: str,
    needs: frozenset[str],
    *,
    everywhere: bool = False,
    z_loss: float = 0.0,
    never: int | None = None,
    causal: bool = False,
    sampled_vocab: int = 0,
) -> Head:
    """Make a head that predicts `<name>_ids` i32 [B, P] with params["mlm"].

    It reads the hidden states at `<name>_positions` i32 [B, P]; with everywhere, at all
    positions, without that array and with P = L. `<name>_weights` f32 [B, P] are the
    weights of the predictions. The loss is the weighted sum divided by the sum of
    `<name>_norm` f32 [B], if the batch has it, otherwise by the sum of the weights.
    With a norm the weights do not count predictions, so the accuracy then counts each
    prediction of nonzero weight once.

    z_loss: the factor of the term `<name>_z_loss`, the mean squared logsumexp of the
    logits. never: an id that gets probability 0. causal: see Head. sampled_vocab: the
    number of ids that training computes logits of, drawn for each batch
    (sampled_vocab.py); 0: all. Evaluations always compute all.
    Raises UserError for a z_loss or sampled_vocab below 0; its `init` for a
    sampled_vocab that does not fit the model.
    """
    for option, value in {"z_loss": z_loss, "sampled_vocab": sampled_vocab}.items():
        if value < 0:
            raise UserError(f"objective: {name}'s {option}={value} must be 0 or more")

    def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
        if sampled_vocab:
            check_size(sampled_vocab, cfg)
        return heads.init_mlm(rng, cfg)

    def weights(batch: Batch) -> dict[str, jax.Array]:
        norm = f"{name}_norm"
        total = jnp.sum(batch[norm if norm in batch else f"{name}_weights"])
        return dict.fromkeys([f"{name}_loss", *z_terms], total)

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        ids = batch[f"{name}_ids"]
        if encoded.hidden.shape[:2] != ids.shape:
            raise ValueError(
                f"hidden has shape {encoded.hidden.shape}, {name}_ids {ids.shape}: the "
                f'head needs reads="{reads}"'
            )

        drawn = ids, batch[f"{name}_weights"]
        if sampled_vocab and rng is not None:
            params, cfg, *drawn = restrict(params, cfg, *drawn, sampled_vocab, rng)
        how = name, z_loss, never, f"{name}_norm" in batch
        return score_in_chunks(params, cfg, (encoded.hidden, *drawn), *how)

    def flops(cfg: EncoderConfig, length: int, predictions: int) -> float:
        if sampled_vocab:
            cfg = dataclasses.replace(cfg, vocab_size=sampled_vocab, pieces=0)
        return head_flops(cfg, length, predictions)

    z_terms = [f"{name}_z_loss"] if z_loss else []
    reads = EVERYWHERE if everywhere else f"{name}_positions"
    return Head(
        name,
        init,
        weights,
        sums,
        reads,
        needs,
        params=PARAMS,
        coefficients=dict.fromkeys(z_terms, z_loss),
        flops=flops,
        causal=causal,
    )


def score_tokens(
    params: Params,
    cfg: EncoderConfig,
    hidden: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    name: str = "mlm",
    z_loss: float = 0.0,
    never: int | None = None,
    evenly: bool = False,
) -> tuple[dict[str, Sum], jax.Array]:
    """Predict ids [B, P] from hidden [B, P, D]: return the terms and the f32 logits.

    The terms are the loss, the accuracy and, if it has a factor, the z_loss. evenly:
    the accuracy counts each prediction of positive weight once.
    """
    logits = heads.token_logits(params, cfg, hidden)
    if never is not None:
        is_never = jnp.arange(logits.shape[-1]) == never
        logits = jnp.where(is_never, heads.NEG_INF, logits)
    with jax.named_scope(f"{name}_loss"):
        terms = {f"{name}_loss": cross_entropy(logits, ids, weights)}
        if z_loss:
            terms[f"{name}_z_loss"] = z_loss_of(logits, weights)
        counted = (weights > 0).astype(weights.dtype) if evenly else weights
        terms[f"{name}_accuracy"] = accuracy(logits, ids, counted)
    return terms, logits


def score_in_chunks(
    params: Params,
    cfg: EncoderConfig,
    arrays: Sequence[jax.Array],
    name: str = "mlm",
    z_loss: float = 0.0,
    never: int | None = None,
    evenly: bool = False,
) -> dict[str, Sum]:
    """Return the terms of `score_tokens`, computing the logits in pieces.

    arrays: hidden [B, P, D], ids and weights [B, P]; the others: see `score_tokens`.
    With more than one piece the forward pass computes the gradient as well
    (piecewise_gradient.py). The z_loss gets its gradient together with the loss then:
    the term has a value, but no gradient of its own.
    """
    pieces = count_chunks(cfg, *arrays[1].shape)
    how = name, z_loss, never, evenly
    if pieces == 1:
        return score_tokens(params, cfg, *arrays, *how)[0]

    def score(params: Params, _: Any, *piece: jax.Array) -> tuple[jax.Array, Any]:
        terms, _ = score_tokens(params, cfg, *piece, *how)
        value = terms[f"{name}_loss"].value
        if z_loss:
            value += z_loss * terms[f"{name}_z_loss"].value
        return value, terms

    word = {"embeddings": {"word": params["encoder"]["embeddings"]["word"]}}
    own = {PARAMS: params.get(PARAMS, {}), "encoder": word}
    value, terms = add_pieces(score, pieces, own, None, arrays)
    loss = terms[f"{name}_loss"]
    with_gradient = loss.value + (value - jax.lax.stop_gradient(value))
    return terms | {f"{name}_loss": Sum(with_gradient, loss.weight)}


def log_likelihoods_in_chunks(
    params: Params,
    cfg: EncoderConfig,
    hidden: jax.Array,
    ids: jax.Array,
    never: int | None = None,
) -> jax.Array:
    """Return ln p of ids i32 [B, P] given hidden [B, P, D], in pieces: f32 [B, P].

    never: an id that gets probability 0.
    """
    head, word = params.get(PARAMS, {}), params["encoder"]["embeddings"]["word"]

    def score(first: Any, hidden: jax.Array, ids: jax.Array) -> tuple[Any, jax.Array]:
        x = hidden.reshape(-1, hidden.shape[-1])
        each = heads.log_likelihoods(head, word, cfg, x, ids.reshape(-1), never)
        return (), each.reshape(ids.shape)

    return sum_in_chunks(score, cfg, (hidden, ids))[1]


def sum_in_chunks(
    score: Callable[..., tuple[Any, Any]],
    cfg: EncoderConfig,
    arrays: Sequence[jax.Array],
) -> tuple[Any, Any]:
    """Run score(first, *arrays) in pieces of the P slots that fit cfg.max_logits_mb.

    arrays [B, P, ...], padded with zeros to whole pieces; first: the number of a
    piece's first slot, None if there is only one piece. score returns (sums, values per
    slot [B, w, ...]); sum_in_chunks returns the sums added up over pieces, and the
    values of all slots, [B, P, ...]. The backward pass recomputes the logits.
    """
    b, p = arrays[0].shape[:2]
    pieces = count_chunks(cfg, b, p)
    if pieces == 1:
        return score(None, *arrays)
    wide = -(-p // pieces)
    firsts = jnp.arange(0, pieces * wide, wide)
    parts = firsts, *(cut(x, pieces, wide) for x in arrays)

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        terms, each = jax.checkpoint(score)(*part)
        return jax.tree.map(jnp.add, total, terms), each

    one = jax.eval_shape(score, *(x[0] for x in parts))[0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), one)
    total, each = jax.lax.scan(add, zeros, parts)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(b, pieces * wide, *x.shape[3:])[:, :p]

    return total, jax.tree.map(join, each)


def count_chunks(cfg: EncoderConfig, rows: int, predictions: int) -> int:
    """Return the number of pieces in which f32 logits [rows, P, V] are computed, to
    stay within cfg.max_logits_mb on each device."""
    if not cfg.max_logits_mb:
        return 1
    own = -(-rows // size_along("batch"))
    size = 4 * own * predictions * cfg.vocab_size
    return min(predictions, -(-size // (cfg.max_logits_mb * 2**20)))

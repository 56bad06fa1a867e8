# SPDX-License-Identifier: Apache-2.0
"""RAG: generate texts from retrieved passages (retrieval-augmented generation).

    RAG-Sequence  p(y | x) = sum over z of p(z | x) product over i of p(y_i | x, z, y<i)
    RAG-Token     p(y | x) = product over i of sum over z of p(z | x) p(y_i | x, z, y<i)

(Lewis et al. 2020, section 2.1.) x is the question, z are the k passages of a row, and
the loss is -ln p(y | x) per token. The generator is that of objective=seq2seq, with or
without a decoder; it reads the question with each passage as one row. p(z | x) is a
softmax over scores. Either the rows contain the passages and scores of a frozen
retriever, or the generator's encoder finds passages in a table of passage vectors
(section 2.4; find_passages.py), so that retriever and generator are trained together.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import decoder, encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import without_pooler
from bertjax.models.layers import Params, Rng
from bertjax.objectives import find_passages, seq2seq
from bertjax.objectives.base import Batch, Objective, Sum, Term
from bertjax.objectives.find_passages import Finder
from bertjax.objectives.read import passage_log_probs
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import log_likelihoods_in_chunks
from bertjax.parallel.sharding import gather_params, gather_rows

NAME = "rag"
MARGINALS = "sequence", "token"
# Arrays per question; the others are per question and passage.
ROW = ("passage_scores", "passage_weights", "lm_ids", "lm_weights")
FOUND = "passage_numbers", "passage_scores"


def sequence_log_probs(
    likely: jax.Array, passages: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return RAG-Sequence's ln p(y | x), f32 [B].

    likely: the result of `read_targets`, f32 [B, k, T]; passages: ln p(z | x), f32
    [B, k]; weights: 1 for the tokens of a target, f32 [B, T].
    """
    whole = jnp.sum(likely * weights[:, None], axis=2)
    return jax.nn.logsumexp(passages + whole, axis=1)


def token_log_probs(
    likely: jax.Array, passages: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return RAG-Token's ln p(y | x), f32 [B]; arguments as in `sequence_log_probs`."""
    each = jax.nn.logsumexp(passages[..., None] + likely, axis=1)
    return jnp.sum(each * weights, axis=1)


def marginal_log_probs(logits: jax.Array, passages: jax.Array) -> jax.Array:
    """Return ln p of each next token, f32 [B, ..., V].

    logits f32 [B, k, ..., V]; passages: ln p(z | x), f32 [B, k].
    """
    likely = jax.nn.log_softmax(logits, axis=-1)
    own = passages.reshape(*passages.shape, *(1,) * (logits.ndim - 2))
    return jax.nn.logsumexp(likely + own, axis=1)


def by_passage(batch: Batch) -> dict[str, jax.Array]:
    """Return the generator's input, one row per question and passage.

    [B, k, ...] -> [B k, ...]. The first token of a missing passage's row stays visible,
    because attention needs at least one visible key.
    """
    rows = {
        name: values.reshape(-1, *values.shape[2:])
        for name, values in batch.items()
        if name not in ROW and values.ndim == 3
    }
    rows["attention_mask"] = rows["attention_mask"].at[:, 0].set(1)
    return rows


def read_targets(
    params: Params, cfg: EncoderConfig, batch: Batch, rng: Rng
) -> jax.Array:
    """Return ln p(y_i | x, z, y<i), f32 [B, k, T]; params: gathered."""
    rows, (b, k) = by_passage(batch), batch["passage_scores"].shape
    if cfg.num_decoder_layers:
        memory = decoder.encode(params, cfg, rows, rng)
        hidden = decoder.apply(params, cfg, rows, memory, rng)
    else:
        at = rows["lm_positions"]
        hidden = encoder.apply(params["encoder"], cfg, rows, rng, at=at).hidden
    ids = jnp.repeat(batch["lm_ids"], k, axis=0)
    return log_likelihoods_in_chunks(params, cfg, hidden, ids).reshape(b, k, -1)


def make_objective(
    cfg: EncoderConfig,
    target_length: int = 64,
    passages: int = 5,
    marginal: str = "sequence",
    temperature: float = 0.05,
    cls: bool = False,
    normalize: bool = True,
    candidates: Any = None,
) -> tuple[Objective, EncoderConfig]:
    """Predict targets from passages: `rag_loss`, per token.

    A batch has the arrays of objective=seq2seq for each question with each passage,
    [B, k, ...]; passage_scores, passage_weights f32 [B, k]; lm_ids i32, lm_weights f32
    [B, T]. target_length, passages: for batches that are made up. marginal: one of
    MARGINALS. Scores are divided by the temperature.

    candidates: None, or, if passages are found in tables, their number, the width of
    their vectors and their most tokens (tasks/types/rag.py). A batch then has the
    arrays that `find_passages.find` reads, and `passages` is k; cls, normalize: how
    vectors are made. Raises UserError for an unknown marginal, and for candidates with
    a causal encoder.
    """
    if marginal not in MARGINALS:
        raise UserError(f"task.marginal={marginal} must be {' or '.join(MARGINALS)}")
    cfg, finder = without_pooler(cfg), None
    if candidates is not None:
        if cfg.is_decoder:
            raise UserError(
                "task.index: retrieval needs an encoder for the questions: give a "
                "model with model.is_decoder=False"
            )
        finder = Finder(passages, *candidates, cls, normalize)
    whole = seq2seq.of_decoder(cfg) if cfg.num_decoder_layers else seq2seq.of_rows(cfg)
    own_weights = functools.partial(weights_of, "lm_weights")
    join = token_log_probs if marginal == "token" else sequence_log_probs

    def find(params: Params, batch: Batch, rng: Rng = None) -> Batch:
        """Return the batch with passages; params: gathered."""
        if finder is None:
            return batch
        return find_passages.find(params, cfg, batch, finder, rng)

    def log_probs(params: Params, batch: Batch, rng: Rng) -> jax.Array:
        known = passage_log_probs(batch["passage_scores"], batch, temperature)
        likely = read_targets(params, cfg, batch, rng)
        return join(likely, known, own_weights(batch))

    def sums(params: Params, batch: Batch, rng: Rng) -> dict[str, Term]:
        params = gather_params(params, cfg.dtype, whole.shardings)
        nats = -jnp.sum(log_probs(params, find(params, batch, rng), rng))
        return {f"{NAME}_loss": Sum(nats, jnp.sum(own_weights(batch)))}

    def evaluate(params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        params = gather_params(params, cfg.dtype, whole.shardings)
        batch = find(params, batch)
        own = {k: batch[k] for k in FOUND if k in batch and finder}
        if "lm_ids" not in batch:  # rows to answer, without targets
            return {}, gather_rows(own)
        each = -log_probs(params, batch, None)
        found = Sum(jnp.sum(each), jnp.sum(own_weights(batch)))
        return {f"{NAME}_loss": found}, gather_rows(own | {"nats": each})

    objective = dataclasses.replace(
        whole,
        weights=lambda batch: {f"{NAME}_loss": jnp.sum(own_weights(batch))},
        sums=sums,
        evaluate=evaluate,
        labels=functools.partial(labels, cfg, target_length, passages),
        task_type=NAME,
        flops=None if finder else whole.flops,
        tables=finder.tables if finder else {},
        find=find if finder else None,
    )
    return objective, cfg


def labels(
    cfg: EncoderConfig, target_length: int, passages: int, rows: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch with `passages` passages per row."""

    def wide(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, passages, *sizes), dtype)

    own = seq2seq.labels(cfg, target_length, rows, length)
    found = {
        name: one if name in ROW else wide(one.dtype, *one.shape[1:])
        for name, one in own.items()
    }
    for name in ("input_ids", "attention_mask"):
        found[name] = wide(jnp.int32, length)
    for name in ("passage_scores", "passage_weights"):
        found[name] = wide(jnp.float32)
    return found

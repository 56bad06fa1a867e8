# SPDX-License-Identifier: Apache-2.0
"""Answers of questions by spans of passages that were found: open-domain reading.

    p(answer | x) = sum over passages z of p(z | x), times the sum over the spans s of z
    that are an answer of p(s | x, z)

(Guu et al. 2020, REALM, equations 1 and 2; Lee et al. 2019, ORQA, section 3.) The loss
is its -ln, so that what finds passages and what reads them learn together. p(s | x, z)
is that of a start times that of an end (objective=span), each a softmax over the tokens
of one passage; p(z | x) is a softmax over the passages of the row.

A row has 1 + k sequences of L tokens: the question alone, and with each passage. The
score of a passage is either given (passage_scores), and the retriever frozen, or with
`trained` the inner product of the question's vector, which the same encoder makes, with
passage_vectors of an index, which is not trained: Lewis et al. 2020, RAG, section 2.4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.encoder import Encoded
from bertjax.models.pooling import text_vectors
from bertjax.objectives.base import EVERYWHERE, SEQUENCES, Batch, Head, Sum
from bertjax.objectives.ranking import PRECISE
from bertjax.objectives.task_head import row_weights

NAME = "read"
HIDDEN = -1e9  # the logit of a token, or the score of a passage, that is not there


def question_vectors(
    encoded: Encoded, batch: Batch, cls: bool, normalize: bool
) -> jax.Array:
    """Return the vector of each row's question, its first sequence: f32 [B, D]."""
    rows, sequences, length = batch["input_ids"].shape
    hidden = encoded.hidden.reshape(rows, sequences, length, -1)[:, 0]
    own = {"attention_mask": batch["attention_mask"][:, 0]}
    return text_vectors(hidden, own, "cls" if cls else "mean", normalize)


def passage_log_probs(scores: jax.Array, batch: Batch, temperature: float) -> jax.Array:
    """Return ln p(z | x), f32 [B, k], of scores f32 [B, k].

    passage_weights f32 [B, k]: 0 where a row has less passages, which have no
    probability.
    """
    scores = jnp.where(batch["passage_weights"] > 0, scores / temperature, HIDDEN)
    return jax.nn.log_softmax(scores, axis=-1)


def place_log_probs(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return ln p of each token as a start, and as an end: f32 [B, k, L] each.

    logits: f32 [B, k, L, 2]. Tokens from passage_begins up to passage_ends, i32 [B, k],
    are a passage's.
    """
    begins, ends = (batch[f"passage_{x}"][..., None] for x in ("begins", "ends"))
    place = jnp.arange(logits.shape[2])
    inside = (begins <= place) & (place < ends)
    logits = jnp.where(inside[..., None], logits, HIDDEN)
    starts, ends = jnp.moveaxis(jax.nn.log_softmax(logits, axis=2), -1, 0)
    return starts, ends


def answer_log_probs(
    passages: jax.Array, starts: jax.Array, ends: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return ln p(answer | x), f32 [B], and 1 for rows that have an answer, f32 [B].

    passages f32 [B, k]; starts, ends f32 [B, k, L]: ln p of each. span_starts,
    span_ends i32 [B, k, S]: first and last token of spans that are an answer, -1 for
    none.
    """
    first, last = batch["span_starts"], batch["span_ends"]
    is_span = first >= 0
    take = functools.partial(jnp.take_along_axis, axis=2)
    spans = take(starts, jnp.maximum(first, 0)) + take(ends, jnp.maximum(last, 0))
    spans = jnp.where(is_span, spans + passages[..., None], HIDDEN)
    has_answer = jnp.any(is_span, axis=(1, 2))
    whole = jax.nn.logsumexp(spans, axis=(1, 2))
    return jnp.where(has_answer, whole, 0.0), has_answer.astype(jnp.float32)


def labels(choices: int, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name what a batch of so many sequences a row holds, without an index."""
    k = choices - 1
    each: dict[str, Any] = dict.fromkeys(SEQUENCES, ((choices, length), jnp.int32))
    each |= dict.fromkeys(("passage_begins", "passage_ends"), ((k,), jnp.int32))
    each |= dict.fromkeys(("passage_weights", "passage_scores"), ((k,), jnp.float32))
    each |= dict.fromkeys(("span_starts", "span_ends"), ((k, 1), jnp.int32))
    return {x: jax.ShapeDtypeStruct((rows, *n), kind) for x, (n, kind) in each.items()}


def make_head(
    choices: int = 6,
    trained: bool = False,
    temperature: float = 0.05,
    cls: bool = False,
    normalize: bool = True,
) -> Head:
    """Make the head: a start and an end of each token, as objective=span has them.

    choices: sequences of a row, where batches are made up. trained: whether passages
    are scored by the question's vector, of `cls` and `normalize` as objective=retrieve
    has it. Scores are divided by the temperature.
    """

    def log_probs(params, cfg, encoded, batch):
        rows, sequences, length = batch["input_ids"].shape
        scores = batch["passage_scores"]
        if trained and "passage_vectors" in batch:
            question = question_vectors(encoded, batch, cls, normalize)
            known = jax.lax.stop_gradient(batch["passage_vectors"])
            scores = jnp.einsum("bd,bkd->bk", question, known, precision=PRECISE)
        logits = heads.task_logits(params[NAME], cfg, encoded.hidden)
        logits = logits.reshape(rows, sequences, length, 2)[:, 1:]
        passages = passage_log_probs(scores, batch, temperature)
        return passages, *place_log_probs(logits, batch)

    def weights(batch):
        if "span_starts" not in batch:
            return {}
        has_answer = jnp.any(batch["span_starts"] >= 0, axis=(1, 2))
        return {f"{NAME}_loss": jnp.sum(row_weights(batch) * has_answer)}

    def sums(params, cfg, encoded, batch, rng):
        if "span_starts" not in batch:
            return {}
        each = log_probs(params, cfg, encoded, batch)
        likely, has_answer = answer_log_probs(*each, batch)
        own = row_weights(batch) * has_answer
        loss = Sum(-jnp.sum(own * likely), jnp.sum(own))
        # How much of p(z | x) is of passages that hold an answer.
        holds = jnp.any(batch["span_starts"] >= 0, axis=2)
        found = jnp.sum(jnp.exp(each[0]) * holds, axis=1)
        return {
            f"{NAME}_loss": loss,
            f"{NAME}_retrieved": Sum(jnp.sum(own * found), jnp.sum(own)),
        }

    def outputs(params, cfg, encoded, batch):
        passages, starts, ends = log_probs(params, cfg, encoded, batch)
        scores = {"passage_scores": passages}
        return scores | {"start_logits": starts, "end_logits": ends}

    return Head(
        NAME,
        functools.partial(heads.init_task, classes=2),
        weights,
        sums,
        reads=EVERYWHERE,
        outputs=outputs,
        labels=functools.partial(labels, choices),
        task_type=NAME,
    )

# SPDX-License-Identifier: Apache-2.0
"""Open-domain reading: answer questions by spans of retrieved passages.

    p(answer | x) = sum over passages z of p(z | x) sum over spans s of p(s | x, z),

where s runs over the spans of z that are an answer (Guu et al. 2020, REALM, equations 1
and 2; Lee et al. 2019, ORQA, section 3). The loss is -ln p(answer | x), so that
retriever and reader are trained together. p(s | x, z) is the probability of the start
times that of the end (objective=span), each a softmax over the tokens of one passage;
p(z | x) is a softmax over the passages of the row.

A row has 1 + k sequences of L tokens: the question alone, and the question with each
passage. Either the rows give the scores of the passages (passage_scores) and the
retriever is frozen; or, with `trained`, the score is the inner product of the
question's vector, made by the same encoder, with the passage's vector from an index
that is not trained (passage_vectors; Lewis et al. 2020, RAG, section 2.4).
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
HIDDEN = -1e9  # the logit of a token outside passages, the score of a missing passage


def question_vectors(
    encoded: Encoded, batch: Batch, cls: bool, normalize: bool
) -> jax.Array:
    """Return the vector of each row's question, its first sequence: f32 [B, D]."""
    rows, sequences, length = batch["input_ids"].shape
    hidden = encoded.hidden.reshape(rows, sequences, length, -1)[:, 0]
    own = {"attention_mask": batch["attention_mask"][:, 0]}
    return text_vectors(hidden, own, "cls" if cls else "mean", normalize)


def passage_log_probs(scores: jax.Array, batch: Batch, temperature: float) -> jax.Array:
    """Return ln p(z | x), f32 [B, k], from scores f32 [B, k].

    The batch has passage_weights f32 [B, k], 0 for missing passages, which get
    probability 0.
    """
    scores = jnp.where(batch["passage_weights"] > 0, scores / temperature, HIDDEN)
    return jax.nn.log_softmax(scores, axis=-1)


def place_log_probs(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return ln p of each token as the start and as the end: f32 [B, k, L] each.

    logits: f32 [B, k, L, 2]. A passage's tokens are those in [passage_begins,
    passage_ends), i32 [B, k].
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

    passages f32 [B, k], starts and ends f32 [B, k, L] are log probabilities. The batch
    has span_starts, span_ends i32 [B, k, S]: the first and last tokens of the spans
    that are an answer, -1 for none.
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
    """Describe the arrays of a batch without an index; choices: sequences per row."""
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
    """Make the head: start and end logits of each token, as in objective=span.

    choices: sequences per row, in batches that are made up. trained: whether passages
    are scored by the question's vector, which is made with `cls` and `normalize` as in
    objective=retrieve. Scores are divided by the temperature.
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
        # The probability p(z | x) of passages that contain an answer.
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

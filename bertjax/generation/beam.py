# SPDX-License-Identifier: Apache-2.0
"""Beam search as in transformers (GenerationMixin._beam_search of version 5).

Each row has `num_beams` open texts. A step scores all next tokens of all of them, and
selects the best (1 + number of end tokens) num_beams candidates by the sum of ln p, so
that at least num_beams of them continue. Those of the best num_beams candidates that
end are compared with the finished texts, by that sum divided by length **
length_penalty; the best num_beams stay. A row is done when its best open text cannot
become better than its worst finished one. Rows do not depend on each other.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.generation.decode import (
    ENDLESS,
    Batch,
    Ends,
    Generated,
    find_seen,
    nothing_written,
    start_width,
    take_rows,
)
from bertjax.generation.pick import NEG_INF, is_end, mark_seen, penalize
from bertjax.models.incremental import Decoder
from bertjax.models.layers import take_at

LOST = -1e9  # transformers' score of candidates that must not be selected


class Beams(NamedTuple):
    """The settings of a beam search.

    length_penalty: above 0 long texts are preferred, below 0 short ones.
    early_stopping: "true" ends a row when num_beams texts are finished; "false" when
    the best open text at its present length is worse than the worst finished one;
    "never" when it is worse at the length, present or greatest, at which it would score
    best. repetition_penalty: as in Pick, applied to ln p.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: str = "false"
    repetition_penalty: float = 1.0


class Texts(NamedTuple):
    """Texts [B, K], best first; score: f32 [B, K], by which they are compared."""

    score: jax.Array
    written: Generated
    seen: jax.Array | None = None

    def take(self, which: jax.Array) -> "Texts":
        """Return the texts of each row at `which`, i32 [B, k]."""
        return jax.tree.map(lambda x: take_at(x, which), self)


class Loop(NamedTuple):
    """The state of the loop over steps.

    step: tokens so far. cache: of the open texts of the last step. parents: i32 [B, K],
    which of these texts each open text continues. finished: bool [B, K], which entries
    of `done` are finished texts. hopeful: bool [B], whether an open text may still
    become better.
    """

    step: jax.Array
    cache: Any
    open: Texts
    parents: jax.Array
    done: Texts
    finished: jax.Array
    hopeful: jax.Array


def beam_search(
    decoder: Decoder,
    params: Any,
    batch: Batch,
    *,
    max_new_tokens: int,
    beams: Beams,
    ends: Ends = ENDLESS,
    forced: Any = 0,
    samples: int = 1,
) -> Generated:
    """Continue each row of a batch, which is one for decoder.prefill.

    forced: i32 [B], how many of a row's last tokens the length penalty counts as
    generated. samples: texts per row, at most num_beams. They are consecutive rows of
    the result, best first.
    """
    static = decoder, max_new_tokens, beams, ends, samples
    forced = np.broadcast_to(np.float32(forced), len(batch["input_ids"]))
    return _beam_search(*static, params, batch, forced)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _beam_search(
    decoder: Decoder,
    max_new_tokens: int,
    beams: Beams,
    ends: Ends,
    samples: int,
    params: Any,
    batch: Batch,
    forced: jax.Array,
) -> Generated:
    k, most = beams.num_beams, max_new_tokens
    cache, logits = decoder.prefill(params, batch, start_width(batch) + most)
    b, pieces = logits.shape
    every = jnp.arange(b)[:, None] * k
    logits = jnp.repeat(logits, k, axis=0)
    choose = functools.partial(choose_beams, beams, ends, most, forced)

    def go_on(loop: Loop) -> jax.Array:
        enough = beams.early_stopping == "true"
        waiting = ~jnp.all(loop.finished) if enough else True
        return (loop.step < most) & jnp.any(loop.hopeful) & waiting

    def advance(loop: Loop) -> Loop:
        cache = take_rows(loop.cache, (every + loop.parents).ravel())
        last = jax.lax.dynamic_index_in_dim(
            loop.open.written.ids, loop.step - 1, axis=2, keepdims=False
        )
        cache, logits = decoder.extend(params, cache, last.reshape(b * k, 1))
        return choose(loop._replace(cache=cache), logits[:, 0])

    seen = None
    if beams.repetition_penalty != 1:
        seen = jnp.repeat(find_seen(batch, pieces)[:, None], k, axis=1)
    nothing = nothing_written((b, k), most, ends.pad_id)
    # At first only the first text counts, because all are the same.
    first = jnp.broadcast_to(jnp.where(jnp.arange(k) == 0, 0.0, LOST), (b, k))
    lost = jnp.full((b, k), LOST, jnp.float32)
    start = Loop(
        jnp.int32(0),
        take_rows(cache, jnp.repeat(jnp.arange(b), k)),
        Texts(first, nothing, seen),
        jnp.zeros((b, k), jnp.int32),
        Texts(lost, nothing),
        jnp.zeros((b, k), bool),
        jnp.ones(b, bool),
    )
    done = jax.lax.while_loop(go_on, advance, choose(start, logits)).done
    best = jax.tree.map(lambda x: x[:, :samples], done.written)
    return jax.tree.map(lambda x: x.reshape(b * samples, *x.shape[2:]), best)


def choose_beams(
    beams: Beams,
    ends: Ends,
    most: int,
    forced: jax.Array,
    loop: Loop,
    logits: jax.Array,
) -> Loop:
    """Do one step; logits: f32 [B K, V] of the tokens after the open texts."""
    b, k = loop.open.score.shape
    step = loop.step
    likely = jax.nn.log_softmax(logits, axis=-1).reshape(b, k, -1)
    scores = likely
    if loop.open.seen is not None:
        scores = penalize(scores, loop.open.seen, beams.repetition_penalty)
    if ends.forced is not None:
        only = jnp.where(jnp.arange(likely.shape[2]) == ends.forced, 0.0, NEG_INF)
        scores = jnp.where(step == most - 1, only, scores)
    scores = (scores + loop.open.score[:, :, None]).reshape(b, -1)
    width = min(max(2, 1 + len(ends.ends)) * k, scores.shape[1])
    best, at = jax.lax.top_k(scores, width)
    parents, tokens = at // likely.shape[2], (at % likely.shape[2]).astype(jnp.int32)
    own = jnp.take_along_axis(likely.reshape(b, -1), at, axis=1)
    if ends.forced is not None:
        own = jnp.where(step == most - 1, 0.0, own)
    found = append(loop.open.take(parents)._replace(score=best), step, tokens, own)
    ending = is_end(tokens, ends.ends) | (step + 1 == most)

    # Separate the texts that continue from those that are finished.
    going = found.score + ending * LOST
    going, which = jax.lax.top_k(going, k)
    parents = jnp.take_along_axis(parents, which, axis=1)
    still_open = found.take(which)._replace(score=going)
    length = (step + 1 + forced[:, None]) ** beams.length_penalty
    ended = ending & (jnp.arange(width) < k)
    closed = ~loop.hopeful[:, None]
    if beams.early_stopping == "true":
        closed = closed | jnp.all(loop.finished, axis=1, keepdims=True)
    ranked = found.score / length + closed * LOST + ~ended * LOST
    found = Texts(ranked, found.written)
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), loop.done, found)
    _, which = jax.lax.top_k(both.score, k)
    finished = jnp.concatenate([loop.finished, ended], axis=1)
    finished = jnp.take_along_axis(finished, which, axis=1)
    done = both.take(which)

    # Find out whether the best open text may still beat the worst finished one.
    if beams.early_stopping == "never" and beams.length_penalty > 0:
        length = (most + forced[:, None]) ** beams.length_penalty
    worst = jnp.where(finished, done.score.min(axis=1, keepdims=True), LOST)
    better = jnp.any(still_open.score[:, :1] / length > worst, axis=1)
    hopeful = loop.hopeful & better
    return Loop(step + 1, loop.cache, still_open, parents, done, finished, hopeful)


def append(
    texts: Texts, step: jax.Array, tokens: jax.Array, log_probs: jax.Array
) -> Texts:
    """Append a token to each text: tokens i32 and log_probs f32 [B, K]."""
    ids, lengths, before = texts.written
    written = Generated(
        ids.at[:, :, step].set(tokens),
        lengths + 1,
        before.at[:, :, step].set(log_probs),
    )
    seen = texts.seen
    if seen is not None:
        b, k, v = seen.shape
        seen = mark_seen(seen.reshape(b * k, v), tokens.reshape(b * k, 1))
        seen = seen.reshape(b, k, v)
    return Texts(texts.score, written, seen)

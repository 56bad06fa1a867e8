# SPDX-License-Identifier: Apache-2.0
"""Passages found within a step, in a table of their vectors that is not trained.

    d(z) q(x)   the inner product of a passage's vector, a row of params["tables"]
                ["index"] f32 [N, D], and of the question's, which the encoder makes

The k rows of the largest products are the passages, whose tokens lie beside it, i32
[N, P], -1 behind their ends: maximum inner product search, exact (Guu et al. 2020,
REALM, section 3.3; Lewis et al. 2020, RAG, section 2.2). The gradient goes through the
k products into the encoder; which rows they are, and their vectors, have none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, fold_in
from bertjax.models.nearest import nearest
from bertjax.models.pooling import text_vectors
from bertjax.objectives.base import Batch
from bertjax.objectives.ranking import PRECISE
from bertjax.parallel.sharding import TABLES, constrain

# Folded into a key, so that questions are dropped out by themselves.
OWN_KEYS = 2**31 - 2
INDEX, PASSAGES = "index", "passages"  # tables
PARTS = (  # of a batch, what rows are made of
    *("input_ids", "attention_mask"),
    *("question_ids", "question_mask"),
    *("end_ids", "end_mask"),
)


class Finder(NamedTuple):
    """How passages are found: k of n, by vectors of `cls` and `normalize` as
    objective=retrieve makes them, whose numbers are `width`; length: P."""

    k: int
    n: int
    width: int
    length: int
    cls: bool
    normalize: bool

    @property
    def tables(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the tables that are searched."""
        return {
            INDEX: jax.ShapeDtypeStruct((self.n, self.width), jnp.float32),
            PASSAGES: jax.ShapeDtypeStruct((self.n, self.length), jnp.int32),
        }


def question_vectors(
    params: Params, cfg: EncoderConfig, batch: Batch, finder: Finder, rng: Any
) -> jax.Array:
    """Return the vectors of a batch's questions, f32 [B, D]; params: the whole tree."""
    mask = batch["question_mask"]
    own = {"input_ids": batch["question_ids"], "attention_mask": mask}
    key = fold_in(rng, OWN_KEYS)
    hidden = encoder.apply(params["encoder"], cfg, own, key).hidden
    pooling = "cls" if finder.cls else "mean"
    return text_vectors(hidden, own, pooling, finder.normalize)


def find(
    params: Params, cfg: EncoderConfig, batch: Batch, finder: Finder, rng: Any
) -> dict[str, jax.Array]:
    """Return the rows of a batch's questions, each with the passages found for it.

    batch: input_ids i32 [B, Q], what stands before a passage, question_ids i32 [B, R],
    the question as the encoder reads it alone, end_ids i32 [B, W], what follows a
    passage, and a mask of each; lm_ids, lm_weights [B, T], and of a decoder
    decoder_input_ids, decoder_attention_mask i32 [B, T]. Without a target neither lm_*
    nor more than one end_ids.

    Returns arrays of objective=rag, L = Q + P + W: [B, k, ...]; passage_numbers i32,
    passage_scores f32 and passage_weights f32 [B, k]; and the others as they are.
    """
    with jax.named_scope("find_passages"):
        question = question_vectors(params, cfg, batch, finder, rng)
        index, passages = (params[TABLES][name] for name in (INDEX, PASSAGES))
        numbers, _ = nearest(index, question, finder.n, finder.k)
        known = jnp.take(index, numbers, axis=0, mode="clip")
        known = jax.lax.stop_gradient(known)
        scores = jnp.einsum("bd,bkd->bk", question, known, precision=PRECISE)
        is_there = numbers < finder.n
        tokens = jnp.take(passages, numbers, axis=0, mode="clip")
        tokens = jnp.where(is_there[..., None], tokens, -1)
        rows = join_rows(batch, constrain(tokens, "batch _ _"))
    found = {name: values for name, values in batch.items() if name not in PARTS}
    if cfg.num_decoder_layers:
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            found[name] = jnp.repeat(batch[name][:, None], finder.k, axis=1)
        del rows["attention_steps"], rows["lm_positions"]
    elif "lm_ids" not in batch:
        del rows["lm_positions"]
    found |= {"passage_numbers": numbers, "passage_scores": scores}
    return found | rows | {"passage_weights": is_there.astype(jnp.float32)}


def join_rows(batch: Batch, passages: jax.Array) -> dict[str, jax.Array]:
    """Join what stands before passages i32 [B, k, P], these, and what follows them.

    Returns input_ids, attention_mask and attention_steps i32 [B, k, L], the steps as of
    objective=seq2seq, and lm_positions i32 [B, k, W - 1 or 1], where each token behind
    the first of what follows is predicted. Before 1 7 2, passages 8 9 and 6, after them
    2 5 2 (end of the text, and a target):

        input_ids        1 7 2 8 9 2 5 2    attention_steps  0 0 0 0 0 0 1 2
                         1 7 2 6 2 5 2 0                     0 0 0 0 0 1 2 0
        lm_positions     5 6, 4 5
    """
    before, after = batch["input_ids"], batch["end_ids"]
    (_, k, p), q, w = passages.shape, before.shape[1], after.shape[1]
    first = jnp.sum(batch["attention_mask"], axis=1)[:, None, None]
    second = first + jnp.sum(passages >= 0, axis=2, keepdims=True)
    last = second + jnp.sum(batch["end_mask"], axis=1)[:, None, None]
    at = jnp.arange(q + p + w, dtype=jnp.int32)
    place = jnp.where(at < second, q + at - first, q + p + at - second)
    place = jnp.clip(jnp.where(at < first, at, place), 0, len(at) - 1)
    whole = [jnp.repeat(x[:, None], k, axis=1) for x in (before, after)]
    whole.insert(1, passages)
    ids = jnp.take_along_axis(jnp.concatenate(whole, axis=2), place, axis=2)
    real = at < last
    positions = second + jnp.arange(max(1, w - 1), dtype=jnp.int32)
    return {
        "input_ids": jnp.where(real, ids, 0),
        "attention_mask": real.astype(jnp.int32),
        "attention_steps": jnp.where(real & (at > second), at - second, 0),
        "lm_positions": jnp.minimum(positions, len(at) - 1),
    }

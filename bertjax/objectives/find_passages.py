# SPDX-License-Identifier: Apache-2.0
"""Find passages within a step, in a table of passage vectors that is not trained.

The score of a passage z for a question x is the inner product d(z) q(x), where d(z) is
a row of params["tables"]["index"], f32 [N, D], and the encoder computes q(x). The k
passages with the largest scores are found by exact maximum inner product search (Guu et
al. 2020, REALM, section 3.3; Lewis et al. 2020, RAG, section 2.2). Their tokens are in
params["tables"]["passages"], i32 [N, P], padded with -1. The gradient flows through the
k scores into the encoder, not through the choice of the passages or their vectors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, Rng, fold_in
from bertjax.models.nearest import nearest
from bertjax.models.pooling import text_vectors
from bertjax.objectives.base import Batch
from bertjax.objectives.ranking import PRECISE
from bertjax.parallel.sharding import TABLES, constrain

# Folded into the dropout key, so that questions have their own dropout.
OWN_KEYS = 2**31 - 2
INDEX, PASSAGES = "index", "passages"  # names of the tables
PARTS = (  # arrays of a batch that the rows are made from
    *("input_ids", "attention_mask"),
    *("question_ids", "question_mask"),
    *("end_ids", "end_mask"),
)


class Finder(NamedTuple):
    """How passages are found: k of n, by their vectors.

    width: D; length: P, the most tokens of a passage; cls, normalize: how vectors are
    made, as in objective=retrieve.
    """

    k: int
    n: int
    width: int
    length: int
    cls: bool
    normalize: bool

    @property
    def tables(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the tables."""
        return {
            INDEX: jax.ShapeDtypeStruct((self.n, self.width), jnp.float32),
            PASSAGES: jax.ShapeDtypeStruct((self.n, self.length), jnp.int32),
        }


def question_vectors(
    params: Params, cfg: EncoderConfig, batch: Batch, finder: Finder, rng: Rng
) -> jax.Array:
    """Encode a batch's questions: vectors f32 [B, D]; params: the whole tree."""
    mask = batch["question_mask"]
    own = {"input_ids": batch["question_ids"], "attention_mask": mask}
    key = fold_in(rng, OWN_KEYS)
    hidden = encoder.apply(params["encoder"], cfg, own, key).hidden
    pooling = "cls" if finder.cls else "mean"
    return text_vectors(hidden, own, pooling, finder.normalize)


def find(
    params: Params, cfg: EncoderConfig, batch: Batch, finder: Finder, rng: Rng
) -> dict[str, jax.Array]:
    """Find k passages for each question, and join each with its question to a row.

    batch: input_ids i32 [B, Q], the tokens before a passage; end_ids i32 [B, W], the
    tokens after it; question_ids i32 [B, R], the question to search by; attention_mask,
    end_mask and question_mask, their masks; lm_ids, lm_weights [B, T]; with a decoder
    decoder_input_ids, decoder_attention_mask i32 [B, T]. Without a target there are no
    lm_* arrays, and W is 1.

    Returns the arrays of objective=rag, [B, k, ...] with L = Q + P + W; passage_numbers
    i32, passage_scores f32, passage_weights f32 [B, k]; and all other arrays unchanged.
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
    """Join the tokens before passages, the passages i32 [B, k, P], and those after.

    Returns input_ids, attention_mask and attention_steps i32 [B, k, L], with the steps
    of objective=seq2seq, and lm_positions i32 [B, k, max(1, W - 1)], from which the
    tokens after the passage, except the first, are predicted. Before 1 7 2, passages
    8 9 and 6, after them 2 5 2 (the end of the text, and a target):

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

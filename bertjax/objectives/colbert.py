# SPDX-License-Identifier: Apache-2.0
"""ColBERT: one vector per token, compared by late interaction.

Each token's hidden state is projected and normalized. The score of a passage for a
query is MaxSim: the sum over the query's tokens of the largest inner product with a
token of the passage (Khattab and Zaharia 2020, arXiv 2004.12832, equation 3). The
losses are those of ranking.py. All tokens count, special tokens and punctuation
included, and queries are not padded with [MASK]; these are also the defaults of
sentence-transformers' MultiVectorEncoder.
"""

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.row_chunks import count_row_chunks, map_rows
from bertjax.objectives import ranking
from bertjax.objectives.base import EVERYWHERE, Head
from bertjax.objectives.ranking import HIDDEN, PRECISE, Ranking
from bertjax.parallel.sharding import gather_rows

NAME = "colbert"
MOST_MB = 256  # limit for the token products of one chunk, in MiB per device


def max_sim(
    queries: jax.Array,
    is_query: jax.Array,
    passages: jax.Array,
    is_passage: jax.Array,
    megabytes: int = MOST_MB,
) -> jax.Array:
    """Return the MaxSim scores of queries and passages, f32 [B, C S].

    queries f32 [B, Q, E], is_query bool [B, Q]; passages f32 [C, L, E], rows of up to S
    passages each; is_passage bool [C, S, L]: which tokens belong to which passage. A
    passage without tokens scores about HIDDEN times the number of query tokens.
    """
    rows, words, _ = queries.shape

    def score(part, number):
        queries, is_query = part
        how = dict(precision=PRECISE, preferred_element_type=jnp.float32)
        products = jnp.einsum("bqe,cle->bqcl", queries, passages, **how)
        slots = []
        for slot in range(is_passage.shape[1]):
            mine = is_passage[:, slot]
            best = jnp.max(jnp.where(mine, products, HIDDEN), axis=-1)
            slots.append(jnp.sum(jnp.where(is_query[..., None], best, 0), axis=1))
        return jnp.stack(slots, axis=-1).reshape(len(queries), -1)

    floats = words * passages.shape[0] * passages.shape[1]
    chunks = count_row_chunks(rows, floats, megabytes)
    with jax.named_scope("scores"):
        return map_rows(score, chunks, (queries, is_query))


def make_head(
    embedding_size: int = 128,
    temperature: float = 1.0,
    margin_weight: float = 0.0,
    chunks: int = 1,
) -> Head:
    """Make the head: a projection [D, embedding_size] without a bias.

    A task sets the options from task.* of its config. Batches have query_positions i32
    [B, Q]: the positions of the row's first Q tokens, which hold its query. The outputs
    are the `tokens`, f32 [B, L, embedding_size].
    """
    losses = Ranking([NAME], margin_weight)

    def init(rng, cfg):
        kernel = heads.init_classes(rng, cfg, embedding_size)["kernel"]
        return {"kernel": kernel}

    def reduce(params, cfg, encoded, batch):
        return heads.token_vectors(params[NAME], encoded.hidden)

    def sums(params, cfg, tokens, batch, rng):
        if not ranking.has_losses(batch):
            return {}
        words = batch["query_positions"].shape[1]
        segments, slots = batch["segment_ids"], batch["cls_positions"].shape[1]
        numbers = jnp.arange(2, slots + 1)
        is_passage = segments[:, None, :] == numbers[:, None]
        everyone = gather_rows(tokens), gather_rows(is_passage)
        scores = max_sim(tokens[:, :words], segments[:, :words] == 1, *everyone)
        return losses.sums({NAME: scores / temperature}, batch)

    def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        places = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        return losses.labels(rows, length) | {"query_positions": places}

    return Head(
        NAME,
        init,
        losses.weights,
        sums,
        reads=EVERYWHERE,
        task_type=NAME,
        whole_batch=0,
        outputs=lambda params, cfg, tokens, batch: {"tokens": tokens},
        labels=labels,
        coefficients=losses.coefficients,
        flops=lambda cfg, length, _: 6.0 * cfg.hidden_size * embedding_size,
        reduce=reduce,
        chunks=chunks,
    )

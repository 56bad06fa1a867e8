# SPDX-License-Identifier: Apache-2.0
"""Generation from several passages at once: a decoder for RAG-Token.

Each prompt has k rows, one per passage. A token's probability is the mean over these,
weighted by p(z | x) (Lewis et al. 2020, section 2.5, RAG-Token). decode.py and beam.py
use this decoder like any other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.incremental import Decoder
from bertjax.objectives.rag import marginal_log_probs

PASSAGES = "passage_log_probs"


def marginal_decoder(decoder: Decoder) -> Decoder:
    """Return the decoder for prompts with passages.

    A batch has arrays [B, L, k] for those that `decoder` accepts as [B k, L], and
    passage_log_probs f32 [B, k].
    """

    def prefill(params: Any, batch: Any, room: int) -> tuple[Any, jax.Array]:
        passages = batch[PASSAGES]
        b, k = passages.shape
        rows = {
            name: values.swapaxes(1, 2).reshape(b * k, -1)
            for name, values in batch.items()
            if name != PASSAGES
        }
        cache, logits = decoder.prefill(params, rows, room)
        cache = jax.tree.map(lambda x: x.reshape(b, k, *x.shape[1:]), cache)
        marginal = marginal_log_probs(logits.reshape(b, k, -1), passages)
        return (cache, passages), marginal

    def extend(params: Any, cache: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        own, passages = cache
        b, k = passages.shape
        flat = jax.tree.map(lambda x: x.reshape(b * k, *x.shape[2:]), own)
        flat, logits = decoder.extend(params, flat, jnp.repeat(ids, k, axis=0))
        own = jax.tree.map(lambda x: x.reshape(b, k, *x.shape[1:]), flat)
        logits = logits.reshape(b, k, *logits.shape[1:])
        return (own, passages), marginal_log_probs(logits, passages)

    return Decoder(prefill, extend)

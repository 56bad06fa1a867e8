# SPDX-License-Identifier: Apache-2.0
"""Writing out of several passages at once: a decoder whose next token is RAG-Token's.

Each prompt has k rows, one a passage; a token's probability is the mean over these,
weighed by p(z | x) (Lewis et al. 2020, section 2.5, RAG-Token). Whatever writes with a
decoder (decode.py, beam.py) writes with this one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.incremental import Decoder
from bertjax.objectives.rag import marginal_log_probs

PASSAGES = "passage_log_probs"


def marginal_decoder(decoder: Decoder) -> Decoder:
    """Make the decoder of prompts with passages.

    A batch has arrays [B, L, k] of what `decoder` takes [B k, L], and passage_log_probs
    f32 [B, k].
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

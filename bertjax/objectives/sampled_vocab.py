# SPDX-License-Identifier: Apache-2.0
"""The loss over a part of the vocabulary, drawn anew for each batch (sampled softmax).

The ids that a batch predicts are all in the sample. The rest of it is drawn from the
other ids, without replacement and with equal probability. Each of these stands for
several ids, so its logit is raised by the log of their number. Thus the expected sum of
exponentials over the sample is that over the whole vocabulary, for given ids to
predict. (Jean et al. 2015, arXiv 1412.2007, section 3, with another way to draw.)

In a small model the product with the vocabulary's matrix and the softmax are most of
the work.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, lookup, random_bits


class Sample(NamedTuple):
    """A part of the vocabulary.

    ids: i32 [K]; raised: f32 [K], what is added to their logits; place: i32 [V], where
    each id is in the sample, -1 for an id that is not.
    """

    ids: jax.Array
    raised: jax.Array
    place: jax.Array


def check_size(size: int, cfg: EncoderConfig) -> None:
    """Refuse a sample as large as the vocabulary, and capped logits.

    The cap would apply to logits after they are raised. Raises UserError.
    """
    pieces = cfg.pieces or cfg.vocab_size
    if size >= pieces:
        raise UserError(
            f"objective: sampled_vocab={size} is not less than the vocabulary, "
            f"{pieces} pieces: leave it out"
        )
    if cfg.final_logit_softcapping:
        raise UserError(
            "objective: sampled_vocab raises logits, which "
            f"model.final_logit_softcapping={cfg.final_logit_softcapping} would cap: "
            "leave one of them out"
        )


def draw_sample(
    key: jax.Array, predicted: jax.Array, size: int, vocab: int, pieces: int
) -> Sample:
    """Draw `size` of the ids below `pieces`, all that are predicted first.

    key: of jax.random; predicted: bool [vocab], which ids the batch predicts. If these
    are more than `size`, some of them are left out.
    """
    bits = random_bits(jax.random.key_data(key).reshape(-1)[-2:], (vocab,))
    order = (bits >> 2).astype(jnp.int32) + jnp.where(predicted, 1 << 30, 0)
    order = jnp.where(jnp.arange(vocab) < pieces, order, -1)
    _, ids = jax.lax.top_k(order, size)
    known = jnp.sum(predicted)
    stands_for = (pieces - known) / jnp.maximum(size - known, 1)
    raised = jnp.where(predicted[ids], 0.0, jnp.log(stands_for))
    place = jnp.full(vocab, -1, jnp.int32).at[ids].set(jnp.arange(size))
    return Sample(ids, raised.astype(jnp.float32), place)


def restrict(
    params: Params,
    cfg: EncoderConfig,
    ids: jax.Array,
    weights: jax.Array,
    size: int,
    key: jax.Array,
) -> tuple[Params, EncoderConfig, jax.Array, jax.Array]:
    """Return what predicts ids [B, P] among a sample of `size` of the vocabulary.

    The result is parameters and config of a masked LM's head whose vocabulary is the
    sample, the ids as places in it, and the weights, 0 for an id that is not in it.
    """
    pieces = cfg.pieces or cfg.vocab_size
    with jax.named_scope("sampled_vocab"):
        flags = jnp.zeros(cfg.vocab_size, bool).at[ids].max(weights != 0)
        sample = draw_sample(key, flags, size, cfg.vocab_size, pieces)
        head = params.get("mlm", {})
        word = params["encoder"]["embeddings"]["word"]
        rows = lookup(head.get("decoder", word), sample.ids).astype(word.dtype)
        bias = sample.raised
        if "bias" in head:
            bias = bias + lookup(head["bias"][:, None], sample.ids)[:, 0]
        own = {name: leaf for name, leaf in head.items() if name != "decoder"}
        places = sample.place[ids]
    return (
        {"mlm": {**own, "bias": bias}, "encoder": {"embeddings": {"word": rows}}},
        dataclasses.replace(cfg, vocab_size=size, pieces=0),
        jnp.maximum(places, 0),
        jnp.where(places < 0, 0.0, weights),
    )

# SPDX-License-Identifier: Apache-2.0
"""SPLADE: sparse vectors over the vocabulary, from the masked LM's head.

The weight of a vocabulary piece in a text is ln(1 + relu(its largest logit over the
text's tokens)) (Formal et al. 2021, SPLADE v2, arXiv 2109.10086, equation 6). Scores
are inner products, with the losses of ranking.py. In addition, the FLOPS regularizer
makes weights 0: the sum over the vocabulary of the squared mean weight (Paria et al.
2020, arXiv 2004.05665, section 3), for queries and for passages. Means are over the
global batch, on any number of devices.
"""

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.flops import head_flops
from bertjax.models.pooling import members_of
from bertjax.objectives import ranking
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.ranking import Ranking
from bertjax.objectives.retrieve import product_scores
from bertjax.objectives.task_head import weights_of
from bertjax.objectives.token_head import PARAMS

NAME = "splade"


def flops_penalty(weights: jax.Array, counts: jax.Array) -> Sum:
    """Sum the squares of the mean weights; weights f32 [n, V], counts f32 [n].

    counts: 1 for a text, 0 for padding.
    """
    mean = jnp.einsum("n,nv->v", counts, weights) / jnp.maximum(jnp.sum(counts), 1)
    return Sum(jnp.sum(jnp.square(mean)), jnp.float32(1))


def make_head(
    temperature: float = 1.0,
    query_flops: float = 5e-5,
    passage_flops: float = 3e-5,
    active: int = 256,
    margin_weight: float = 0.0,
    chunks: int = 1,
) -> Head:
    """Make the head; its parameters are the masked LM's, params["mlm"].

    A task sets the options from task.* of its config. query_flops, passage_flops: the
    factors of the regularizers. active: the number of weights per text in the outputs:
    the largest `weights` f32 and their `terms` i32, [B, S, active]. Raises UserError
    for factors below 0.
    """
    factors = {"query_flops": query_flops, "passage_flops": passage_flops}
    for name, factor in factors.items():
        if factor < 0:
            raise UserError(f"task.{name}={factor} must be 0 or more")
    losses = Ranking([NAME], margin_weight)
    penalties = {f"{NAME}_{name}": factor for name, factor in factors.items() if factor}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        out = losses.weights(batch)
        return out and out | dict.fromkeys(penalties, jnp.float32(1))

    def reduce(params, cfg, encoded, batch):
        word = params["encoder"]["embeddings"]["word"]
        how = params.get(PARAMS, {}), word, cfg, encoded.hidden, members_of(batch)
        return heads.term_weights(*how)

    def sums(params, cfg, texts, batch, rng):
        if not ranking.has_losses(batch):
            return {}
        found = losses.sums({NAME: product_scores(texts, temperature)}, batch)
        is_text = weights_of("cls_weights", batch)
        vocab = texts.shape[-1]
        for name, slots in (("query", slice(1)), ("passage", slice(1, None))):
            flat = texts[:, slots].reshape(-1, vocab), is_text[:, slots].reshape(-1)
            found[f"{NAME}_{name}_flops"] = flops_penalty(*flat)
            active = jnp.sum(jnp.count_nonzero(flat[0], axis=1) * flat[1])
            found[f"{NAME}_{name}_active"] = Sum(active, jnp.sum(flat[1]))
        return found

    def outputs(params, cfg, texts, batch):
        weights, terms = jax.lax.top_k(texts, min(active, texts.shape[-1]))
        return {"weights": weights, "terms": terms}

    def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        own = losses.labels(rows, length)
        shape = own["cls_positions"].shape
        return own | {"cls_weights": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def flops(cfg, length, predictions):
        return head_flops(cfg, length, length)

    return Head(
        NAME,
        heads.init_mlm,
        weights,
        sums,
        reads=EVERYWHERE,
        task_type=NAME,
        params=PARAMS,
        whole_batch=0,
        outputs=outputs,
        labels=labels,
        coefficients=losses.coefficients | penalties,
        flops=flops,
        reduce=reduce,
        chunks=chunks,
    )

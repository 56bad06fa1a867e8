# SPDX-License-Identifier: Apache-2.0
"""An objective from outside the package that masks tokens itself, on the devices.

It needs the id of [MASK], the ids of the pieces that are never masked, and, in
evaluations, which have no rng, a key per row.
"""

import jax
import jax.numpy as jnp

from bertjax.models import encoder, heads
from bertjax.objectives.base import Objective, row_keys
from bertjax.objectives.losses import cross_entropy
from bertjax.parallel.sharding import gather_params

SHARE = 0.5


def hide(batch, tokens, rng):
    """Return (input_ids with [MASK] i32 [B, L], weights of the masked f32 [B, L])."""
    ids = batch["input_ids"]
    keys = row_keys(batch, "input_ids")
    if rng is not None:
        keys = jax.random.split(rng, len(ids))
    drawn = jax.vmap(lambda key: jax.random.uniform(key, ids.shape[1:]))(keys)
    special = jnp.isin(ids, jnp.array(tokens.special_ids))
    hidden = (drawn < SHARE) & ~special & (batch["attention_mask"] > 0)
    rows = batch.get("example_weights", jnp.ones(len(ids)))
    return jnp.where(hidden, tokens.mask_id, ids), hidden * rows[:, None]


def make_objective(cfg, tokens):
    cfg = encoder.without_pooler(cfg)

    def init(rng):
        one, two = jax.random.split(rng)
        return {"encoder": encoder.init(one, cfg), "mlm": heads.init_mlm(two, cfg)}

    def weights(batch):
        rows = batch.get("example_weights", jnp.ones(len(batch["input_ids"])))
        return {"blanks": jnp.sum(batch["attention_mask"] * rows[:, None])}

    def sums(params, batch, rng):
        params = gather_params(params, cfg.dtype)
        ids, hidden = hide(batch, tokens, rng)
        x = encoder.apply(params["encoder"], cfg, {**batch, "input_ids": ids}, rng)
        word = params["encoder"]["embeddings"]["word"]
        logits = heads.mlm_logits(params["mlm"], word, cfg, x.hidden)
        return {"blanks": cross_entropy(logits, batch["input_ids"], hidden)}

    return Objective(init, weights, sums, frozenset(), {}), cfg

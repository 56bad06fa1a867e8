# SPDX-License-Identifier: Apache-2.0
"""A loss whose Sum has a weight other than `weights` returns: 1 / length per row."""

import jax.numpy as jnp

from bertjax.models.layers import draw, linear, linear_specs
from bertjax.objectives.base import Head, Sum


def row_weights(batch):
    return batch.get("example_weights", jnp.ones(len(batch["input_ids"])))


def init(rng, cfg):
    return draw(rng, linear_specs(into=(cfg.hidden_size,), out=(1,)), 0.02)


def weights(batch):
    return {"weighted": jnp.sum(row_weights(batch))}


def sums(params, cfg, encoded, batch, rng):
    length = linear(params["weighted"], encoded.pooled)[:, 0].astype(jnp.float32)
    real = jnp.sum(batch["attention_mask"], axis=1)
    each = row_weights(batch) / real
    value = jnp.sum(each * jnp.square(length - real))
    return {
        "weighted": Sum(value, jnp.sum(each)),
        "mean_length": Sum(jnp.sum(each * real), jnp.sum(each)),
    }


def make_head():
    rows = (("weighted/kernel", "embed classes"), ("weighted/bias", "classes"))
    how = dict(pooled=True, shardings=rows)
    return Head("weighted", init, weights, sums, "nowhere", **how)

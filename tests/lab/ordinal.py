# SPDX-License-Identifier: Apache-2.0
"""A head for ordered levels: one binary output per level but the last, "is it above?"

Level k is k times yes (Li and Lin 2007, ordinal regression by extended binary
classification). It trains on the rows of lab.levels, also from outside the package.
"""

import functools

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.objectives.base import Head, Sum


def row_weights(batch):
    return batch.get("example_weights", jnp.ones(len(batch["input_ids"])))


def weights(batch):
    return {"ordinal": jnp.sum(row_weights(batch))}


def logits(params, cfg, encoded):
    return heads.task_logits(params["ordinal"], cfg, encoded.pooled)


def sums(params, cfg, encoded, batch, rng):
    sign = 2.0 * batch["above"] - 1
    losses = jax.nn.softplus(-sign * logits(params, cfg, encoded)).sum(axis=-1)
    value = jnp.sum(losses * row_weights(batch))
    return {"ordinal": Sum(value, weights(batch)["ordinal"])}


def outputs(params, cfg, encoded, batch):
    return {"above": jax.nn.sigmoid(logits(params, cfg, encoded))}


def make_head(levels=2):
    return Head(
        "ordinal",
        functools.partial(heads.init_task, classes=int(levels) - 1),
        weights,
        sums,
        pooled=True,
        reads="nowhere",
        outputs=outputs,
        task_type="lab.levels",
    )

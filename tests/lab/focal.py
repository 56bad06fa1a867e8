# SPDX-License-Identifier: Apache-2.0
"""A head from outside: classification with the focal loss (Lin et al. 2017, eq. 4)."""

import functools

import jax
import jax.numpy as jnp

from bertjax.models.layers import draw, linear, linear_specs
from bertjax.objectives.base import Head, Sum


def init(classes, rng, cfg):
    specs = linear_specs(into=(cfg.hidden_size,), out=(classes,))
    return draw(rng, specs, cfg.initializer_range)


def row_weights(batch):
    return batch.get("example_weights", jnp.ones(len(batch["input_ids"])))


def weights(batch):
    return {"focal": jnp.sum(row_weights(batch))}


def outputs(params, cfg, encoded, batch):
    return {"scores": linear(params["focal"], encoded.pooled).astype(jnp.float32)}


def sums(gamma, params, cfg, encoded, batch, rng):
    scores = outputs(params, cfg, encoded, batch)["scores"]
    likely = jax.nn.log_softmax(scores)
    true = jnp.take_along_axis(likely, batch["labels"][:, None], axis=1)[:, 0]
    loss = -((1 - jnp.exp(true)) ** gamma) * true
    return {"focal": Sum(jnp.sum(loss * row_weights(batch)), weights(batch)["focal"])}


def make_head(classes=2, gamma=2.0):
    return Head(
        "focal",
        functools.partial(init, int(classes)),
        weights,
        functools.partial(sums, gamma),
        reads="nowhere",
        pooled=True,
        outputs=outputs,
        shardings=(("focal/kernel", "embed classes"), ("focal/bias", "classes")),
        task_type="classify",
    )

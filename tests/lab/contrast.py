# SPDX-License-Identifier: Apache-2.0
"""An objective from outside whose loss is called `contrast`, without the word loss.

The two halves of a row must be more similar to each other than to the halves of other
rows; the temperature is learned (as in CLIP; Radford et al. 2021, section 2.3).
"""

import jax.numpy as jnp

from bertjax.objectives.base import Head
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy


def row_weights(batch):
    return batch.get("example_weights", jnp.ones(len(batch["input_ids"])))


def init(rng, cfg):
    return {"temperature": jnp.zeros(())}


def weights(batch):
    return {"contrast": jnp.sum(row_weights(batch))}


def sums(params, cfg, encoded, batch, rng):
    x = encoded.hidden.astype(jnp.float32)
    half = x.shape[1] // 2
    one, two = jnp.mean(x[:, :half], axis=1), jnp.mean(x[:, half:], axis=1)
    scores = one @ two.T * jnp.exp(-params["contrast"]["temperature"])
    scores = jnp.where(row_weights(batch)[None, :] > 0, scores, -1e9)
    args = scores, jnp.arange(len(scores)), row_weights(batch)
    return {"contrast": cross_entropy(*args), "contrast_hits": accuracy(*args)}


def make_head(whole_batch=8, flops=-1):
    counted = None if flops < 0 else lambda cfg, length, predictions: flops
    return Head(
        "contrast",
        init,
        weights,
        sums,
        reads="everywhere",
        shardings=(("contrast/temperature", ""),),
        flops=counted,
        whole_batch=int(whole_batch),
    )

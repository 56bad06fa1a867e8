# SPDX-License-Identifier: Apache-2.0
"""Rows of texts and targets for sequence-to-sequence tests, and models for them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conftest import tiny_encoder

from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.tasks.task_rows import Form, Ragged, Targets
from bertjax.tasks.types.seq2seq import Sequences

V, L, T = 40, 16, 5
CFG = tiny_encoder(V, L, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
PLACES = {
    "prefix": {},
    "causal": dict(is_decoder=True),
    "decoder": dict(num_decoder_layers=2),
}


class Specials:
    pad_id, cls_id, sep_id = 0, 2, 3


def rows(place="prefix", targets=((5, 9, 6, 7), (8, 8), (9,), (5, 6, 7, 8, 9))):
    """Return 4 examples of texts and targets of various lengths (or targets=None)."""
    draw = np.random.default_rng(0)
    texts = Ragged.of([draw.integers(5, V, n).tolist() for n in (3, 8, 5, 1)])
    form = Form(("a",), "b", (), 1, ("perplexity",), targets=Targets(T, place))
    more = {}
    if targets:
        more = dict(targets=Ragged.of(targets), first=np.arange(5))
    return Sequences(form, np.zeros(V, np.int64), (texts,), **more).plan(L)


def batch_of(place="prefix", **changes):
    return rows(place, **changes).gather(np.arange(4), None, Specials)


def config_of(place, cfg=CFG):
    return dataclasses.replace(cfg, **PLACES[place])


class Model(NamedTuple):
    """An objective with its parameters; evaluate(params, batch); log_p(params, batch),
    which returns ln p of every target token, f32 [B, T + 1]."""

    cfg: EncoderConfig
    objective: Any
    params: Any
    evaluate: Any
    log_p: Any


@functools.cache
def model_of(place, cfg=CFG):
    """Make a Model with matrices 4 times their initial size, so that each visible token
    changes the output."""
    objective, cfg = make_objective("seq2seq", config_of(place, cfg))
    params = jax.jit(objective.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)

    def loss(weights, params, batch):
        terms = objective.sums(params, {**batch, "lm_weights": weights}, None)
        return -terms["lm_loss"].value

    by_weights = jax.jit(jax.grad(loss))  # the loss is a sum of weights times ln p

    def log_p(params, batch):
        ones = jnp.ones_like(batch["lm_weights"])
        return np.asarray(by_weights(ones, params, batch))

    return Model(cfg, objective, params, jax.jit(objective.evaluate), log_p)

# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step`: FlaxBertForMaskedLM and optax.adamw.

Needs transformers 4.57 and JAX 0.10 (Python 3.11). Started by --peer; the protocol is
in bertjax/measuring/alternate.py.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax_update import make_update
from serve_peer import serve
from transformers import BertConfig, FlaxBertForMaskedLM

shape = json.loads(sys.argv[1])
rows, length, predictions = (
    shape.pop(k) for k in ("batch_size", "length", "predictions")
)
lr, wd, dtype = (shape.pop(k) for k in ("lr", "wd", "dtype"))
model = FlaxBertForMaskedLM(BertConfig(**shape), dtype=jnp.dtype(dtype))
tx = optax.adamw(lr, weight_decay=wd)
params = model.params
model._params = None  # frees the model's own copy, which training does not need
opt_state = jax.jit(tx.init)(params)
draws = np.random.default_rng(0).random((rows, length))
ids = (4 + (shape["vocab_size"] - 4) ** draws).astype(np.int32)
labels = np.full_like(ids, -100)
at = np.linspace(1, length - 2, predictions).astype(np.int32)
labels[:, at] = ids[:, at]
batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
batch = jax.device_put(batch)
dropout = shape["hidden_dropout_prob"] + shape["attention_probs_dropout_prob"] > 0
update = make_update(model, tx, dropout)
key = jax.random.PRNGKey(0)


def run(steps):
    global params, opt_state, key
    for _ in range(steps):
        params, opt_state, key, loss = update(params, opt_state, key, batch)
    jax.block_until_ready((params, loss))


serve(run, rows * length)

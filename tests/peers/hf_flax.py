# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step`: FlaxBertForMaskedLM and optax.adamw.

Needs transformers 4.57 and JAX 0.10 (Python 3.11). Started by --peer; the protocol is
in bertjax/measuring/alternate.py.
"""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax_update import make_update
from transformers import BertConfig, FlaxBertForMaskedLM

shape = json.loads(sys.argv[1])
rows, length, predictions = (
    shape.pop(k) for k in ("batch_size", "length", "predictions")
)
lr, wd, dtype = (shape.pop(k) for k in ("lr", "wd", "dtype"))
model = FlaxBertForMaskedLM(BertConfig(**shape), dtype=jnp.dtype(dtype))
tx = optax.adamw(lr, weight_decay=wd)
params = model.params
model._params = None  # the class keeps a copy, which a trainer has no use for
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
begun = time.perf_counter()
params, opt_state, key, loss = jax.block_until_ready(
    update(params, opt_state, key, batch)
)
facts = {"tokens": rows * length, "compile_seconds": time.perf_counter() - begun}
print(json.dumps(facts), flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    for _ in range(int(line)):
        params, opt_state, key, loss = update(params, opt_state, key, batch)
    jax.block_until_ready((params, loss))
    seconds = (time.perf_counter() - begun) / int(line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": {"step": seconds}, "peak_rss_mb": peak}), flush=True)

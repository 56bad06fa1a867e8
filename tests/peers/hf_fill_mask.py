# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=fill_mask`: transformers' masked LM.

FlaxBertForMaskedLM if available (transformers 4.57, JAX 0.10, Python 3.11), otherwise
BertForMaskedLM on torch with one thread. It does what the fill-mask pipeline does from
ids to guesses. The protocol is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
from serve_peer import serve
from transformers import BertConfig

shape = json.loads(sys.argv[1])
for key in ("batch_size", "length", "predictions", "lr", "wd", "dtype"):
    del shape[key]
config = BertConfig(**shape)
ids = 2 + np.arange(128)[None] % (config.vocab_size - 2)
ids[0, 0] = 1

try:
    import jax
    from transformers import FlaxBertForMaskedLM

    model = FlaxBertForMaskedLM(config)

    @jax.jit
    def guess(params, ids):
        logits = model(ids, params=params).logits[0, 0]
        return jax.lax.top_k(jax.nn.softmax(logits), 5)

    def fill():
        return jax.device_get(guess(model.params, ids))

except ImportError:
    import torch
    from transformers import BertForMaskedLM

    torch.set_num_threads(1)
    model = BertForMaskedLM(config).eval()

    @torch.inference_mode()
    def fill():
        logits = model(torch.from_numpy(ids)).logits[0, 0]
        return logits.softmax(-1).topk(5)


def run(steps):
    for _ in range(steps):
        fill()


serve(run, 128, "latency_128")

# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with t5.py: torch, eager.

transformers' T5ForConditionalGeneration with AdamW and clipping, bfloat16 by autocast
if bertjax computes in bfloat16; the rows of both sides have no padding. Started by
--peer; the protocol is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
from transformers import T5Config, T5ForConditionalGeneration

shape = json.loads(sys.argv[1])
half = shape["dtype"] == "bfloat16"
rows, length, targets = (shape[k] for k in ("batch_size", "length", "targets"))
heads, width = shape["num_attention_heads"], shape["hidden_size"]
config = T5Config(
    vocab_size=shape["vocab_size"],
    d_model=width,
    d_kv=width // heads,
    d_ff=shape["intermediate_size"],
    num_layers=shape["num_hidden_layers"],
    num_decoder_layers=shape["num_decoder_layers"],
    num_heads=heads,
    dropout_rate=shape["hidden_dropout_prob"],
    feed_forward_proj="gated-gelu" if shape["mlp_type"] == "glu" else "relu",
    tie_word_embeddings=shape["mlp_type"] != "glu",
    decoder_start_token_id=0,
)
torch.set_num_threads(1)
torch.manual_seed(0)
model = T5ForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=shape["lr"], weight_decay=shape["wd"], fused=True
)
draws = np.random.default_rng(0)


def draw(size):
    ids = 5 + (shape["vocab_size"] - 6) ** draws.random((rows, size))
    return torch.from_numpy(ids.astype(np.int64))


ids, labels = draw(length), draw(targets)
mask = torch.ones_like(ids)


def run(steps):
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()


serve(
    run,
    rows * length,
    more=lambda: {"parameters": sum(p.numel() for p in model.parameters())},
)

# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=generate`: transformers' generate in torch.

GPT2LMHeadModel, or T5ForConditionalGeneration if the config has a decoder: greedy, with
the cache, as many new tokens as the prompt has, in the same dtype. Started by --peer;
the protocol is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

shape = json.loads(sys.argv[1])
rows, new = shape["batch_size"], shape["length"] // 2
heads, width = shape["num_attention_heads"], shape["hidden_size"]
torch.set_num_threads(1)
torch.manual_seed(0)
if "num_decoder_layers" in shape:
    config = T5Config(
        vocab_size=shape["vocab_size"],
        d_model=width,
        d_kv=width // heads,
        d_ff=shape["intermediate_size"],
        num_layers=shape["num_hidden_layers"],
        num_decoder_layers=shape["num_decoder_layers"],
        num_heads=heads,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
else:
    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_embd=width,
        n_layer=shape["num_hidden_layers"],
        n_head=heads,
        n_inner=shape["intermediate_size"],
        n_positions=shape["max_position_embeddings"],
    )
    model = GPT2LMHeadModel(config).eval()
model = model.to(getattr(torch, shape["dtype"]))
drawn = np.random.default_rng(0).integers(5, shape["vocab_size"], (rows, new))
ids = torch.from_numpy(drawn)
how = dict(
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    min_new_tokens=new,
    max_new_tokens=new,
    pad_token_id=0,
)


def run(steps):
    for _ in range(steps):
        with torch.inference_mode():
            found = model.generate(ids, **how)
        begun = 1 if "num_decoder_layers" in shape else new
        assert found.shape == (rows, begun + new), found.shape


serve(run, rows * new)

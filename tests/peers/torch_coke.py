# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with coke.py: torch, eager.

torch.nn.TransformerEncoder over triples of three tokens, as many as bertjax packs into
its rows; the softmax over the vocabulary is at the masked entity alone. AdamW and
clipping, bfloat16 by autocast if bertjax computes in bfloat16. Started by --peer; the
protocol is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
from torch import nn

shape = json.loads(sys.argv[1])
half = shape["dtype"] == "bfloat16"
width, rate = shape["hidden_size"], shape["hidden_dropout_prob"]
triples = shape["batch_size"] * shape["length"] // 3


class Coke(nn.Module):
    """An encoder of h, r, t with one of the entities masked (arXiv 1911.02168)."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(shape["vocab_size"], width)
        self.positions = nn.Embedding(3, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(rate)
        layer = nn.TransformerEncoderLayer(
            width,
            shape["num_attention_heads"],
            shape["intermediate_size"],
            rate,
            activation="gelu",
            layer_norm_eps=1e-12,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, shape["num_hidden_layers"])
        self.transform = nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(shape["vocab_size"]))

    def forward(self, ids, at):
        x = self.words(ids) + self.positions.weight
        x = self.encoder(self.dropout(self.norm(x)))
        x = x[torch.arange(len(ids)), at]
        x = self.head_norm(nn.functional.gelu(self.transform(x)))
        return nn.functional.linear(x, self.words.weight, self.bias)


torch.set_num_threads(1)
torch.manual_seed(0)
model = Coke().train()
nn.init.normal_(model.words.weight, std=0.02)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=shape["lr"], weight_decay=shape["wd"], fused=True
)
draws = np.random.default_rng(0)
ids = torch.from_numpy(draws.integers(5, shape["vocab_size"], (triples, 3)))
at = torch.from_numpy(2 * draws.integers(0, 2, triples))  # the head or the tail
labels = ids[torch.arange(triples), at].clone()
ids[torch.arange(triples), at] = 4


def run(steps):
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(ids, at)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()


serve(
    run,
    triples * 3,
    more=lambda: {"parameters": sum(p.numel() for p in model.parameters())},
)

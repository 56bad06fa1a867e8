# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with finetune/classify.py: torch.

transformers' BertForSequenceClassification with AdamW and clipping, eager, float32.
Started by --peer; the protocol is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
from transformers import BertConfig, BertForSequenceClassification

shape = json.loads(sys.argv[1])
rows, length, _ = (shape.pop(k) for k in ("batch_size", "length", "predictions"))
lr, wd, dtype = (shape.pop(k) for k in ("lr", "wd", "dtype"))
assert dtype == "float32", dtype
torch.set_num_threads(1)
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(**shape)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=wd)
draws = np.random.default_rng(0).random((rows, length))
ids = torch.from_numpy((4 + (shape["vocab_size"] - 4) ** draws).astype(np.int64))
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
labels = torch.zeros(rows, dtype=torch.int64)


def run(steps):
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()


serve(run, rows * length)

# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with finetune/classify.py: torch.

transformers' BertForSequenceClassification with AdamW and clipping, eager, float32.
Started by --peer; the protocol is in bertjax/measuring/alternate.py.
"""

import json
import resource
import sys
import time

import numpy as np
import torch
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


def update():
    loss = model(**batch, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


begun = time.perf_counter()
update()
facts = {"tokens": rows * length, "compile_seconds": time.perf_counter() - begun}
print(json.dumps(facts), flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    for _ in range(int(line)):
        update()
    seconds = (time.perf_counter() - begun) / int(line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": {"step": seconds}, "peak_rss_mb": peak}), flush=True)

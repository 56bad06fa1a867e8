# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with objective=mlm: torch.

transformers' BertForMaskedLM with its own choice of attention, fused AdamW, clipping,
bfloat16 by autocast where ours computes in it; on a GPU if torch sees one. Eager, or
with --compile by torch.compile. As transformers has it, every position is scored.
Started by --peer='tests/peers/hf_mlm.py [--compile]'; the protocol is in
bertjax/measuring/alternate.py.
"""

import json
import resource
import sys
import time

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

shape = json.loads(sys.argv[1])
rows, length, asked = (shape.pop(k) for k in ("batch_size", "length", "predictions"))
lr, wd, dtype = (shape.pop(k) for k in ("lr", "wd", "dtype"))
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_float32_matmul_precision("highest")
model = BertForMaskedLM(BertConfig(**shape)).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=wd, fused=True)
draws = np.random.default_rng(0).random((rows, length))
ids = torch.from_numpy((4 + (shape["vocab_size"] - 4) ** draws).astype(np.int64))
labels = torch.full_like(ids, -100)
at = np.linspace(1, length - 2, asked).astype(int)
labels[:, at] = ids[:, at]
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
batch = {name: array.to(device) for name, array in batch.items()}


def compute_loss():
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(**batch).loss


if "--compile" in sys.argv[2:]:
    compute_loss = torch.compile(compute_loss)


def run(steps):
    for _ in range(steps):
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()  # waits for the device


begun = time.perf_counter()
run(1)
facts = {"tokens": rows * length, "compile_seconds": time.perf_counter() - begun}
facts["device_kind"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
if device == "cuda":
    facts["device_peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
print(json.dumps(facts), flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    run(int(line))
    seconds = (time.perf_counter() - begun) / int(line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": {"step": seconds}, "peak_rss_mb": peak}), flush=True)

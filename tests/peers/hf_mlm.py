# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=step` with objective=mlm: torch.

transformers' BertForMaskedLM with its default attention, fused AdamW, clipping, and
bfloat16 by autocast if bertjax computes in bfloat16; on a GPU if torch finds one. Eager
unless --compile requests torch.compile. Logits are computed at every position, as
transformers does. Started by --peer='tests/peers/hf_mlm.py [--compile]'; the protocol
is in bertjax/measuring/alternate.py.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
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
    loss.item()  # waits for the device


def more():
    if device == "cpu":
        return {"device_kind": device}
    peak = torch.cuda.max_memory_allocated() / 1e6
    return {"device_kind": torch.cuda.get_device_name(), "device_peak_mb": peak}


serve(run, rows * length, more=more)

# SPDX-License-Identifier: Apache-2.0
"""Latency of one text: onnxruntime on convert's files, torch eager, and bertjax.

    taskset -c 0 python tests/peers/served_latency.py HF_DIR ONNX_DIR INT8_DIR [ROUNDS]

The text has 32 or 128 tokens, one of them [MASK]. torch and onnxruntime compute the
logits of all tokens; bertjax computes those at [MASK] and `fill_mask`'s guesses. For
embedding models all three compute the pooled vector. Prints medians of CPU time, which
other processes on the core lengthen less than wall time, and ratios of medians.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from bertjax.assembly import models
from bertjax.inference import embed_texts, fill_blanks

folder, *served = sys.argv[1:4]
rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 30
card = json.loads((Path(served[0]) / "card.json").read_text())
is_mlm = card["task"] == "fill-mask"
torch.set_num_threads(1)
peer = (AutoModelForMaskedLM if is_mlm else AutoModel).from_pretrained(folder).eval()
opened = models.open_model(folder, "--model")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
sessions = [
    onnxruntime.InferenceSession(
        f"{path}/onnx/model.onnx", options, providers=["CPUExecutionProvider"]
    )
    for path in served
]
output = "logits" if is_mlm else "sentence_embedding"
if is_mlm:
    params = opened.read_params("mlm")
    own = fill_blanks.make_filler(opened.cfg, params, opened.tokenizer, 5)
else:
    model = embed_texts.make_embedder(opened, folder)

    def own(row):
        batch = {"input_ids": np.array([row], np.int32)}
        return np.asarray(model.encode({**batch, "sizes": np.array([len(row)])}))


def run_torch(row):
    ids = torch.tensor([row])
    with torch.inference_mode():
        found = peer(input_ids=ids, attention_mask=torch.ones_like(ids))
    return found.logits if is_mlm else found.last_hidden_state.mean(1)


def run_onnx(session, row):
    ids = np.array([row])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    given = {**given, "token_type_ids": 0 * ids}
    names = {given.name for given in session.get_inputs()}
    given = {name: x for name, x in given.items() if name in names}
    return session.run([output], given)[0]


ways = {
    "torch": run_torch,
    "bertjax": own,
    "onnx": lambda row: run_onnx(sessions[0], row),
    "int8": lambda row: run_onnx(sessions[1], row),
}
for length in (32, 128):
    row = (1000 + np.arange(length) * 7).tolist()
    row[0], row[5], row[-1] = 101, opened.tokenizer.mask_id, 102
    spent = {name: [] for name in ways}
    for _ in range(rounds + 3):
        for name, way in ways.items():
            begin = time.process_time()
            way(row)
            spent[name].append(1e3 * (time.process_time() - begin))
    middle = {name: statistics.median(times[3:]) for name, times in spent.items()}
    print(
        f"{length} tokens, ms: "
        + ", ".join(f"{name} {ms:.2f}" for name, ms in middle.items())
        + f"; torch/int8 {middle['torch'] / middle['int8']:.2f}, "
        f"bertjax/int8 {middle['bertjax'] / middle['int8']:.2f}, "
        f"torch/onnx {middle['torch'] / middle['onnx']:.2f}"
    )

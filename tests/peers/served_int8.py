# SPDX-License-Identifier: Apache-2.0
"""Compare 8-bit files of convert and onnxruntime.quantization on sentence pairs.

    taskset -c 0 python tests/peers/served_int8.py HF_DIR ONNX_DIR INT8_DIR STS.csv

STS.csv has the columns first sentence, second sentence, score. Prints for each file its
size in bytes, the mean cosine of its vectors with the float32 file's, and Spearman's
correlation of the pairs' cosines with the scores. Texts run in batches of eight.
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from onnxruntime.quantization import QuantType, quantize_dynamic

from bertjax.assembly import models
from bertjax.inference.embed_texts import tokenize
from bertjax.serving import write_onnx
from bertjax.serving.differences import make_batch
from bertjax.serving.served_model import make_served
from bertjax.tasks.metrics import spearman

folder, whole, small, table = sys.argv[1:]
with open(table, newline="") as file:
    pairs = list(csv.reader(file))
model = models.open_model(folder, "--model")
served = make_served(model, folder, vectors=True)
texts = [row[i] for i in (0, 1) for row in pairs]
rows, _ = tokenize(model.tokenizer, texts, served.longest)
batches = []
for begin in range(0, len(rows), 8):
    part = rows[begin : begin + 8]
    shape = len(part), max(map(len, part))
    batch = make_batch(served, part, model.tokenizer.pad_id, shape)
    batches.append({**batch, "token_type_ids": np.zeros(shape, np.int64)})
theirs = Path(tempfile.mkdtemp()) / "model.onnx"
float32 = Path(whole) / write_onnx.FILE
quantize_dynamic(float32, theirs, weight_type=QuantType.QInt8, per_channel=True)
first = None
for name, path in {
    "float32": float32,
    "convert's": Path(small) / write_onnx.FILE,
    "onnxruntime's": theirs,
}.items():
    predict = write_onnx.open_session(path, threads=1)
    found = [predict(batch)["sentence_embedding"] for batch in batches]
    vectors = np.concatenate(found)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    first = vectors if first is None else first
    a, b = np.split(vectors, 2)
    right = np.array([float(row[2]) for row in pairs])
    print(
        f"{name}: {path.stat().st_size:,} bytes, cosine "
        f"{(vectors * first).sum(axis=1).mean():.4f}, Spearman "
        f"{spearman((a * b).sum(axis=1), right):.4f}"
    )

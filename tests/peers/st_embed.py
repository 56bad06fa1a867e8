# SPDX-License-Identifier: Apache-2.0
"""Texts per second of CPU time: `embed` and sentence-transformers, in turns.

  taskset -c 0 python tests/peers/st_embed.py HF_DIR TEXTS [ROUNDS] [LENGTH] [DTYPE]

TEXTS has one text per line. Both compute in DTYPE (float32), truncate at LENGTH (128)
tokens and batch 32 texts of similar length. Both embed the texts once before they are
timed.
"""

import sys
import time

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import bertjax
from bertjax.parallel.host_memory import keep_freed_memory

given, defaults = sys.argv[1:], ("5", "128", "float32")
path, file, rounds, length, dtype = (*given, *defaults[len(given) - 2 :])
keep_freed_memory()
torch.set_num_threads(1)
with open(file) as lines:
    texts = lines.read().splitlines()
model = bertjax.load(path, dtype=dtype)
peer = SentenceTransformer(path, device="cpu").to(getattr(torch, dtype))
peer.max_seq_length = int(length)
sides = {
    "bertjax": lambda: model.embed(texts, max_length=int(length)),
    "sentence-transformers": lambda: peer.encode(texts, batch_size=32),
}
seconds = {name: [] for name in sides}
for number in range(int(rounds) + 1):
    vectors = []
    for name, embed in sides.items():
        begun = time.process_time()
        vectors.append(embed())
        if number:
            seconds[name].append(time.process_time() - begun)
print(f"largest difference {np.abs(vectors[0] - vectors[1]).max():.1e}")
for name, each in seconds.items():
    print(f"{name}: {len(texts) / np.median(each):.1f} texts a second")
ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
print(f"{np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")

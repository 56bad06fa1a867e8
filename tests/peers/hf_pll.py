# SPDX-License-Identifier: Apache-2.0
"""Pseudo-log-likelihoods: bertjax.scoring in turns with transformers' BERT on torch.

taskset -c 1 python tests/peers/hf_pll.py VOCAB.txt PAIRS.jsonl.gz [--sentences=N]
    [--rounds=N] [--layers=4] [--hidden=256]

Both score the same sentences with the same random weights, float32, one core; the loop
masks one token a forward, as awslabs/mlm-scoring does at batch size 1. Seconds are the
processor's, which what else runs on the machine disturbs least.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from bertjax import config as c
from bertjax import disk
from bertjax.scoring import pairs, pll
from bertjax.scoring.lines import read_lines

parser = argparse.ArgumentParser()
parser.add_argument("vocab")
parser.add_argument("pairs")
for name, value in dict(sentences=400, rounds=3, layers=4, hidden=256).items():
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
vocab = Path(args.vocab).read_bytes()
shape = BertConfig(
    vocab_size=vocab.count(b"\n"),
    hidden_size=args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=args.hidden // 64,
    intermediate_size=4 * args.hidden,
)
model = BertForMaskedLM(shape).eval()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    (Path(folder) / "vocab.txt").write_bytes(vocab)
    config, tokenizer, checkpoint, _ = disk.open_model(folder, "--model")
    params = disk.read_params(checkpoint, "mlm")
config.dtype = "float32"
cfg = c.encoder_config(config, tokenizer.vocab_size)
read, _ = pairs.read_pairs(read_lines(args.pairs))
step = max(1, 2 * len(read) // args.sentences)
texts = [text for pair in read for text in (pair.good, pair.bad)][::step]
texts = tokenizer.encode_batch(texts[: args.sentences])
score = pll.make_scorer(cfg, params, tokenizer, "original")


@torch.inference_mode()
def loop(texts):
    totals = []
    for ids in texts:
        row = torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]])
        total = 0.0
        for i, true in enumerate(ids, 1):
            masked = row.clone()
            masked[0, i] = tokenizer.mask_id
            logits = model(input_ids=masked).logits[0, i]
            total += logits.log_softmax(-1)[true].item()
        totals.append(total)
    return totals


begun = time.process_time()
ours = score(texts)
first = time.process_time() - begun
theirs = loop(texts[:20])
np.testing.assert_allclose(ours[:20], theirs, rtol=1e-4)
print(f"{len(texts)} sentences, {sum(map(len, texts)) / len(texts):.1f} tokens each")
print(f"ours, first time, programs compiled: {first:.1f} s")
ratios = []
for _ in range(args.rounds):
    begun = time.process_time()
    score(texts)
    a = len(texts) / (time.process_time() - begun)
    begun = time.process_time()
    loop(texts)
    b = len(texts) / (time.process_time() - begun)
    ratios.append(a / b)
    print(f"ours {a:.1f} sentences/s, the loop {b:.2f}: {a / b:.1f}", flush=True)
print(f"median {statistics.median(ratios):.1f}")

# SPDX-License-Identifier: Apache-2.0
"""Pseudo-log-likelihoods by bertjax.scoring and transformers' BERT on torch, in turns.

taskset -c 0 python tests/peers/hf_pll.py VOCAB.txt PAIRS.jsonl.gz [--sentences=N]
    [--loop=N] [--rounds=N] [--layers=4] [--hidden=256]

Both score sentences with the same random weights in float32, on one core, in one
process. The peer is a loop with one masked token per forward pass. In a round bertjax
scores all sentences and the peer some (--loop) of them. Prints sentences per second of
wall time and of processor time, which other processes disturb less.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from bertjax.assembly import models, resolve
from bertjax.scoring import pairs, pll
from bertjax.scoring.lines import read_lines

parser = argparse.ArgumentParser()
parser.add_argument("vocab")
parser.add_argument("pairs")
sizes = dict(sentences=400, loop=40, rounds=5, layers=4, hidden=256)
for name, value in sizes.items():
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
    config, tokenizer, checkpoint, _ = models.open_model(folder, "--model")
    params = models.read_params(checkpoint, "mlm")
config.dtype = "float32"
cfg = resolve.encoder_config(config, tokenizer.vocab_size)
read, _ = pairs.read_pairs(read_lines(args.pairs))
texts = [text for pair in read for text in (pair.good, pair.bad)]
order = np.random.default_rng(0).permutation(len(texts))[: args.sentences]
texts = tokenizer.encode_batch([texts[i] for i in order])
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


def rates(run, texts):
    """Return sentences per second of wall time and of processor time."""
    begun = time.perf_counter(), time.process_time()
    run(texts)
    ended = time.perf_counter(), time.process_time()
    return [len(texts) / (b - a) for a, b in zip(begun, ended, strict=True)]


some = texts[: args.loop]
first = rates(score, texts)
np.testing.assert_allclose(score(texts)[: len(some)], loop(some), rtol=1e-4)
print(f"{len(texts)} sentences of {sum(map(len, texts)) / len(texts):.1f} tokens")
print(f"ours with compilation: {len(texts) / first[0]:.1f} s")
ratios = []
for _ in range(args.rounds):
    (a, cpu_a), (b, cpu_b) = rates(score, texts), rates(loop, some)
    ratios.append((a / b, cpu_a / cpu_b))
    print(
        f"sentences/s, ours {a:.1f} (of CPU time {cpu_a:.1f}), "
        f"the loop {b:.2f} ({cpu_b:.2f}): {a / b:.1f} ({cpu_a / cpu_b:.1f})",
        flush=True,
    )
for name, column in zip(("clock", "CPU time"), zip(*ratios, strict=True), strict=True):
    median = statistics.median(column)
    print(f"by {name}: {median:.2f} ({min(column):.2f} to {max(column):.2f})")

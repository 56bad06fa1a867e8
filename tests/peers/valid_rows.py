# SPDX-License-Identifier: Apache-2.0
"""Write the masked rows that bertjax.train evaluates on as arrays, for hf_trainer.py.

python tests/peers/valid_rows.py ROWS.npz --config=... (the flags of the run)

ROWS.npz: input_ids i32 [N, L], attention_mask i32 [N, L], labels i32 [N, L] with -100
at positions without a prediction.
"""

import sys

import numpy as np

from bertjax.assembly import batches as run_batches
from bertjax.assembly import command_line, prepared_text
from bertjax.config import cli
from bertjax.train import FLAGS

out, *argv = sys.argv[1:]
config = command_line.parse(argv, FLAGS).config
prepared = prepared_text.prepare(config, cli.say)
tokenizer = prepared.tokenizer
tables = run_batches.make_tables(
    config, tokenizer, prepared_text.count_tokens(prepared.parts)
)
((name, store),) = prepared.valid.items()
batches = run_batches.make_eval_batches(
    config, frozenset({"mlm"}), tokenizer, name, store, tables
)
found = {"input_ids": [], "attention_mask": [], "labels": []}
for batch in batches.eval_batches(1, examples=config.eval.examples or None):
    labels = np.full_like(batch["input_ids"], -100)
    chosen = batch["mlm_weights"] > 0
    labels[0, batch["mlm_positions"][chosen]] = batch["mlm_ids"][chosen]
    found["labels"].append(labels)
    for key in ("input_ids", "attention_mask"):
        found[key].append(batch[key])
arrays = {key: np.concatenate(rows) for key, rows in found.items()}
np.savez(out, **arrays)
print(f"{out}: {arrays['labels'].shape}, {(arrays['labels'] >= 0).sum()} predicted")

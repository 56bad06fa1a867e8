# SPDX-License-Identifier: Apache-2.0
"""A peer of `bertjax.benchmark --what=input`: DataCollatorForLanguageModeling.

Needs transformers 4.57 and torch. Started by --peer; the protocol is in
bertjax/measuring/alternate.py. Its rows are lists of ids with their
special_tokens_mask, as run_mlm.py passes them on; it returns torch tensors, its faster
format.
"""

import json
import sys

import numpy as np
import torch
from serve_peer import serve
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

shape = json.loads(sys.argv[1])
torch.set_num_threads(1)
rows, length, size = shape["batch_size"], shape["length"], shape["vocab_size"]
specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
pieces = specials + [f"w{i}" for i in range(size - len(specials))]
vocab = {piece: i for i, piece in enumerate(pieces)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")),
    **dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
            specials,
            strict=True,
        )
    ),
)
collate = DataCollatorForLanguageModeling(
    tokenizer, mlm_probability=0.15, return_tensors="pt"
)
draws = np.random.default_rng(0).random((rows, length))
ids = (4 + (size - 4) ** draws).astype(np.int32)
ids[:, 0], ids[:, -1] = 2, 3
examples = [
    {"input_ids": row.tolist(), "special_tokens_mask": (row < 5).astype(int).tolist()}
    for row in ids
]


def run(steps):
    for _ in range(steps):
        collate([dict(example) for example in examples])


serve(run, rows * length, "masking", lambda: {"compile_seconds": 0.0})

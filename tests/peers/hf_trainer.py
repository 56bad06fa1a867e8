# SPDX-License-Identifier: Apache-2.0
"""Time to quality of the transformers Trainer on the same text, by run_mlm's recipe.

python tests/peers/hf_trainer.py prepare OUT --vocab=vocab.txt --train=GLOB --valid=GLOB
python tests/peers/hf_trainer.py train OUT --rows=ROWS.npz --log=LOG.jsonl ...
python tests/peers/hf_trainer.py score MODEL_DIR --rows=ROWS.npz

Needs torch, transformers 5 and accelerate. `prepare` tokenizes each line of the text
with special tokens, joins the lines and cuts them into rows of 128 tokens (run_mlm.py's
group_texts). It writes OUT/train.npy, and OUT/valid.npz, whose rows are masked once.
`train` masks dynamically; ROWS.npz is written by valid_rows.py (or is OUT/valid.npz).
Each line of LOG has the step, real tokens, held-out loss, wall seconds since the start
of the process, the part of them spent on scoring, and CPU seconds.
"""

import argparse
import glob
import gzip
import json
import os
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from clock import process_seconds
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

LENGTH = 128


def lines(pattern):
    for path in sorted(glob.glob(pattern)):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (line.strip() for line in file if line.strip())


def group_texts(tokenizer, pattern):
    """Return the ids of all lines, with special tokens, as rows: u16 [N, 128]."""
    parts, source = [], lines(pattern)
    while some := list(islice(source, 10_000)):
        encoded = tokenizer(some, return_attention_mask=False)["input_ids"]
        parts += [np.array(ids, np.uint16) for ids in encoded]
    joined = np.concatenate(parts)
    return joined[: len(joined) // LENGTH * LENGTH].reshape(-1, LENGTH)


def make_tokenizer(vocab):
    return BertTokenizerFast(vocab, model_max_length=10**9)


class Rows(torch.utils.data.Dataset):
    """Rows as run_mlm.py passes them on: lists of ids with a special_tokens_mask."""

    def __init__(self, ids, tokenizer):
        self.ids = ids
        self.special = np.zeros(len(tokenizer), np.int64)
        self.special[tokenizer.all_special_ids] = 1

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        row = self.ids[i].astype(np.int64)
        return {
            "input_ids": row.tolist(),
            "attention_mask": [1] * LENGTH,
            "special_tokens_mask": self.special[row].tolist(),
        }


def prepare(args):
    out = Path(args.where)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args.vocab)
    tokenizer.save_pretrained(out)
    np.save(out / "train.npy", group_texts(tokenizer, args.train))
    rows = Rows(group_texts(tokenizer, args.valid), tokenizer)
    chosen = np.random.default_rng(0).permutation(len(rows))[: args.examples]
    torch.manual_seed(0)
    masked = DataCollatorForLanguageModeling(tokenizer)([rows[i] for i in chosen])
    arrays = {k: v.numpy().astype(np.int32) for k, v in masked.items()}
    np.savez(out / "valid.npz", **arrays)
    print(f"{out}: {len(np.load(out / 'train.npy', mmap_mode='r'))} rows")


@torch.no_grad()
def score(model, path, batch=32):
    """Return the mean loss over all predictions of the rows in `path`."""
    rows = {k: torch.from_numpy(v).long() for k, v in np.load(path).items()}
    training, total, weight = model.training, 0.0, 0
    model.eval()
    for low in range(0, len(rows["labels"]), batch):
        part = {k: v[low : low + batch] for k, v in rows.items()}
        labels = part.pop("labels")
        logits = model(**part).logits[labels >= 0]
        chosen = labels[labels >= 0]
        total += torch.nn.functional.cross_entropy(logits, chosen, reduction="sum")
        weight += len(chosen)
    model.train(training)
    return float(total) / weight


class Log(TrainerCallback):
    """Score every args.every steps; end the run after args.minutes without scoring."""

    def __init__(self, args):
        self.args, self.evaluating = args, 0.0
        self.file = open(args.log, "w")  # noqa: SIM115

    def on_step_end(self, args, state, control, model=None, **kwargs):
        begun = process_seconds()
        over = begun - self.evaluating > 60 * self.args.minutes
        if state.global_step % self.args.every and not over:
            return
        loss = score(model, self.args.rows)
        self.evaluating += process_seconds() - begun
        row = {
            "step": state.global_step,
            "tokens": state.global_step * self.args.batch_size * LENGTH,
            "loss": loss,
            "seconds": process_seconds(),
            "evaluating": self.evaluating,
            "cpu_seconds": time.process_time(),
        }
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        control.should_training_stop = over


def train(args):
    torch.set_num_threads(1)
    tokenizer = BertTokenizerFast.from_pretrained(args.where)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    model = BertForMaskedLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    given = TrainingArguments(
        output_dir=args.save,
        use_cpu=True,
        max_steps=1_000_000,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup,
        weight_decay=0.01,  # as in bertjax
        adam_epsilon=1e-6,  # as in bertjax
        max_grad_norm=1.0,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=given,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        train_dataset=Rows(np.load(Path(args.where) / "train.npy"), tokenizer),
        callbacks=[Log(args)],
    )
    trainer.train()
    trainer.save_model(args.save)


def score_model(args):
    model = BertForMaskedLM.from_pretrained(args.where, torch_dtype=torch.float32)
    print(json.dumps({"model": args.where, "loss": score(model, args.rows)}))


parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["prepare", "train", "score"])
parser.add_argument("where")
for name in ("vocab", "train", "valid", "rows", "log"):
    parser.add_argument(f"--{name}")
parser.add_argument("--save", default=os.devnull)
parser.add_argument("--examples", type=int, default=512)
parser.add_argument("--every", type=int, default=50)
parser.add_argument("--minutes", type=float, default=45.0)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=100)
args = parser.parse_args()
{"prepare": prepare, "train": train, "score": score_model}[args.what](args)

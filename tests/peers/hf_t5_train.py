# SPDX-License-Identifier: Apache-2.0
"""Train transformers' torch T5 on exactly the batches of a bertjax config.

python tests/peers/hf_t5_train.py --model=HF_DIR|random:HF_DIR --out=DIR \
    --config=t5.py:tiny|finetune/seq2seq.py [--config.KEY=VALUE ...]

Both sides have the same rows in the same order and the same learning rates. The
optimizer is AdamW, or Adafactor with the given rate and parameter scaling, by
optim.name. `random:HF_DIR` uses only the sizes in HF_DIR (which `bertjax.convert
--format=hf` writes) and initializes the weights at random. The trained weights go to
DIR. With a `seq2seq` config, whose init_from must be a bertjax run with the same
tokenizer, `generate` writes greedy texts for the validation rows, which are scored.
Prints JSON: updates, processor minutes and scores. Needs torch, transformers and
bertjax in the same environment.
"""

import json
import sys
import time

import torch
import transformers as hf

from bertjax.assembly import batches as run_batches
from bertjax.assembly import command_line, prepared_text, resolve, train_step
from bertjax.config import cli
from bertjax.config.flag_help import Flag
from bertjax.objectives.make_objective import make_objective
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks import text_metrics

FLAGS = {"model": Flag(""), "out": Flag("")}


def make_model(where: str) -> hf.T5ForConditionalGeneration:
    plain = where.removeprefix("random:")
    if plain == where:
        return hf.T5ForConditionalGeneration.from_pretrained(where)
    return hf.T5ForConditionalGeneration(hf.AutoConfig.from_pretrained(plain))


def make_optimizer(model, o):
    if o.name == "adafactor":
        return hf.Adafactor(
            model.parameters(), lr=o.lr, relative_step=False, weight_decay=o.wd
        )
    assert o.name == "adamw", o.name
    many = [p for p in model.parameters() if p.ndim > 1]
    few = [p for p in model.parameters() if p.ndim < 2]
    groups = {"params": many, "weight_decay": o.wd}, {"params": few, "weight_decay": 0}
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.b1, o.b2), eps=o.eps)


def tensors(batch, *names):
    return {k: torch.from_numpy(batch[k]).long() for k in names if k in batch}


def loss_of(model, batch):
    fed = tensors(batch, "input_ids", "attention_mask", "decoder_input_ids")
    fed |= tensors(batch, "decoder_attention_mask")
    labels = torch.from_numpy(batch["lm_ids"]).long()
    labels = labels.masked_fill(torch.from_numpy(batch["lm_weights"]) == 0, -100)
    return model(**fed, labels=labels).loss


@torch.no_grad()
def write_texts(model, batches, config, tokenizer):
    """Return a text for each row, as `bertjax.predict` does."""
    texts = []
    for batch in batches.eval_batches(config.batch_size, None):
        real = int(batch.get("example_weights", batch["lm_weights"][:, 0]).sum())
        fed = tensors(batch, "input_ids", "attention_mask")
        written = model.generate(
            **fed,
            do_sample=False,
            max_new_tokens=config.task.target_length + 1,
            eos_token_id=tokenizer.sep_id,
            pad_token_id=tokenizer.pad_id,
            decoder_start_token_id=tokenizer.pad_id,
        )
        for row in written[:real, 1:].tolist():
            if tokenizer.sep_id in row:
                row = row[: row.index(tokenizer.sep_id)]
            ids = [i for i in row if i != tokenizer.pad_id]
            texts.append(tokenizer.decode(ids))
    return texts


def main(argv):
    args = command_line.parse(argv, FLAGS)
    config = args.config
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    prepared = prepared_text.prepare(config, cli.say)
    tokenizer, parts = prepared.tokenizer, prepared.parts
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    task, _ = make_objective(tasks.objective_of(config, parts), cfg)
    tables = run_batches.make_tables(
        config, tokenizer, prepared_text.count_tokens(parts)
    )
    run = run_batches.make_run(config, task.needs, tokenizer, parts, tables)
    warmup, span, decay, _ = train_step.schedule_lengths(config, run.phases, run.total)
    schedule, _ = train_step.make_tx(config, warmup, span, decay)
    model = make_model(args.model).train()
    optimizer = make_optimizer(model, config.optim)
    seconds, told = 0.0, 0.0
    for at in range(run.total):
        batch = run.data.batch(at)
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = float(schedule(at))
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if config.optim.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        told += loss.item()
        seconds += time.process_time() - began
        if (at + 1) % 50 == 0:
            cli.say(f"{at + 1}/{run.total} loss {told / 50:.4f} {seconds / 60:.1f} min")
            told = 0.0
    model.eval()
    model.save_pretrained(args.out)
    found = {"updates": run.total, "minutes": seconds / 60}
    valid = run_batches.make_valid(
        config, task.needs, tokenizer, prepared.valid, tables
    )
    for name, batches in valid.items():
        with torch.no_grad():
            costs = [
                (loss_of(model, b).item(), float(b["lm_weights"].sum()))
                for b in batches.eval_batches(config.batch_size, 4096)
            ]
        weight = sum(w for _, w in costs)
        found[f"{name}/loss"] = sum(c * w for c, w in costs) / weight
        if config.objective == "seq2seq":
            texts = write_texts(model, batches, config, tokenizer)
            right = prepared.valid[name].references
            metrics = [m for m in config.task.metrics.split(",") if m != "perplexity"]
            lower = tokenizer.lower_case
            found |= text_metrics.text_scores(metrics, texts, right, lower)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

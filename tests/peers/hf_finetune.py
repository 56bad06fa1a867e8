# SPDX-License-Identifier: Apache-2.0
"""Finetune transformers' torch models on exactly the rows of bertjax.sweep.

python tests/peers/hf_finetune.py --config=finetune/classify.py --model=HF_DIR \
    --seeds=5 --out=FILE.json [--steps=N] [--config.KEY=VALUE ...]

Weights, head, order of the rows, learning rates, optimizer and metrics are the same as
in bertjax; dropout is torch's own, and so is the head with --head=torch.
`random:HF_DIR` uses only the sizes in HF_DIR. FILE has `runs` and `spread`, as
sweep.json has, and the seconds per step (medians of wall time and CPU time);
finetune_rows.py compares FILE with sweep.json. Needs torch, transformers and bertjax in
the same environment.
"""

import json
import statistics
import sys
import time

import jax
import numpy as np
import torch
import transformers as hf

from bertjax.assembly import batches as run_batches
from bertjax.assembly import command_line, prepared_text, resolve, train_step
from bertjax.config import cli
from bertjax.config.flag_help import Flag
from bertjax.objectives.make_objective import make_objective
from bertjax.sweeps import score_spread
from bertjax.tasks import prepare_task as tasks

CLASSES = {
    "classify": hf.AutoModelForSequenceClassification,
    "regress": hf.AutoModelForSequenceClassification,
    "tag": hf.AutoModelForTokenClassification,
    "span": hf.AutoModelForQuestionAnswering,
}
INPUTS = "input_ids", "attention_mask", "token_type_ids"


FLAGS = {
    "model": Flag(""),
    "out": Flag(""),
    "seeds": Flag("", 5),
    "steps": Flag("of each run; 0: all", 0),
    "head": Flag("ours or torch", "ours"),
    "threads": Flag("", 1),
}


def make_model(where, objective, form, seed):
    torch.manual_seed(seed)
    plain = where.removeprefix("random:")
    given = {}
    if objective in ("classify", "regress", "tag"):
        given["num_labels"] = len(form.labels) or 1
    settings = hf.AutoConfig.from_pretrained(plain, **given)
    if plain != where:
        return CLASSES[objective].from_config(settings)
    return CLASSES[objective].from_pretrained(where, config=settings)


def give_head(model, params):
    """Copy the task layer that bertjax initializes: kernel [D, C] and bias [C]."""
    (made,) = (v for k, v in params.items() if k != "encoder")
    layer = model.qa_outputs if hasattr(model, "qa_outputs") else model.classifier
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.array(made["kernel"]).T))
        layer.bias.copy_(torch.from_numpy(np.array(made["bias"])))


def run_model(model, objective, batch):
    """Return the loss, and the outputs under the names that the task's metrics use."""
    fed = {k: torch.from_numpy(batch[k]).long() for k in INPUTS if k in batch}
    said = model(**fed)
    rows = torch.from_numpy(
        batch.get("example_weights", np.ones(len(fed["input_ids"])))
    )
    losses = torch.nn.functional.cross_entropy

    def one(scores, labels, weights):
        flat = labels.reshape(-1).long(), weights.reshape(-1)
        each = losses(scores.reshape(len(flat[0]), -1), flat[0], reduction="none")
        return (each * flat[1]).sum() / flat[1].sum()

    if objective == "span":
        real = fed["attention_mask"] > 0
        ends = [
            torch.where(real, s, torch.tensor(-1e9))
            for s in (said.start_logits, said.end_logits)
        ]
        names = "start_positions", "end_positions"
        wanted = [torch.from_numpy(batch[k]) for k in names]
        loss = sum(one(s, at, rows) for s, at in zip(ends, wanted, strict=True)) / 2
        return loss, dict(zip(("start_logits", "end_logits"), ends, strict=True))
    labels = torch.from_numpy(batch["labels"])
    if objective == "tag":
        weights = torch.from_numpy(batch["label_weights"]) * rows[:, None]
        return one(said.logits, labels, weights), {"tags": said.logits.argmax(-1)}
    if objective == "regress":
        scores = said.logits[:, 0]
        return ((scores - labels) ** 2 * rows).sum() / rows.sum(), {"scores": scores}
    return one(said.logits, labels, rows), {"scores": said.logits}


@torch.no_grad()
def score(model, objective, batches, size):
    model.eval()
    told = []
    for batch in batches.eval_batches(size, None):
        _, outputs = run_model(model, objective, batch)
        told.append({k: v.numpy() for k, v in outputs.items()})
    model.train()
    return batches.score(told, None)


def main(argv):
    args = command_line.parse(argv, FLAGS)
    config, objective = args.config, args.config.objective
    torch.set_num_threads(args.threads)
    form = tasks.make_form(config)
    prepared = prepared_text.prepare(config, cli.say)
    tokenizer, parts = prepared.tokenizer, prepared.parts
    form = next(iter(parts.values())).form
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    task, _ = make_objective(tasks.objective_of(config, parts), cfg)
    needs = task.needs
    tables = run_batches.make_tables(
        config, tokenizer, prepared_text.count_tokens(parts)
    )
    valid = run_batches.make_valid(config, needs, tokenizer, prepared.valid, tables)
    rows, walls, cpus, losses = [], [], [], {}
    for seed in range(config.seed, config.seed + args.seeds):
        own = config.copy_and_resolve_references()
        own.seed = seed
        run = run_batches.make_run(own, needs, tokenizer, parts, tables)
        warmup, span, decay, _ = train_step.schedule_lengths(
            config, run.phases, run.total
        )
        schedule, _ = train_step.make_tx(config, warmup, span, decay)
        model = make_model(args.model, objective, form, seed)
        if args.head == "ours":
            give_head(model, task.init(jax.random.key(seed)))
        model.train()
        plain, decayed = [], []
        for _, p in model.named_parameters():
            (plain if p.ndim < 2 else decayed).append(p)
        o = config.optim
        groups = [
            {"params": decayed, "weight_decay": o.wd},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(o.b1, o.b2), eps=o.eps)
        for at in range(args.steps or run.total):
            batch = run.data.batch(at)
            wall, cpu = time.monotonic(), time.process_time()
            for group in optimizer.param_groups:
                group["lr"] = float(schedule(at))
            loss, _ = run_model(model, objective, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
            optimizer.step()
            losses.setdefault(seed, []).append(loss.item())
            walls.append(time.monotonic() - wall)
            cpus.append(time.process_time() - cpu)
            if at % 50 == 0:
                cli.say(f"seed {seed} step {at}/{run.total} loss {loss.item():.4f}")
        for name, batches in valid.items():
            found = score(model, objective, batches, config.batch_size)
            row = {"step": run.total, "seed": seed, "lr": o.lr, "valid": name}
            rows.append(row | {"skipped": 0} | found)
            cli.say(f"seed {seed}: {found}")
    metric = form.metrics[0]
    runs = [(row["seed"], row["lr"]) for row in rows]
    metric = f"eval/{next(iter(valid))}/{metric}"
    standings = score_spread.SweepScores(runs, metric, at_best=False, patience=None)
    standings.add(rows)
    found = standings.summarize() | {"step_seconds": statistics.median(walls)}
    found |= {"step_cpu_seconds": statistics.median(cpus), "losses": losses}
    if args.out:
        with open(args.out, "w") as file:
            json.dump(found, file, indent=1)
    print("\n".join(score_spread.describe(found)))


if __name__ == "__main__":
    main(sys.argv[1:])

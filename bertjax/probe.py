# SPDX-License-Identifier: Apache-2.0
"""Probe what each layer of a frozen encoder knows about labeled texts, words or spans.

python -m bertjax.probe --model=DIR --train=FILES --valid=FILES
    --text=COLUMN [--text_pair=COLUMN] --label=COLUMN   texts: tables, a row per text
    | [--text=1] --tag=-1       words: FILE.bio, .conll, .jsonl, tfds:, a tag per word
    | [--text=text] --targets=COLUMN    spans, or pairs of them: FILE.jsonl

With --treated, a model that has unlearned a concept of texts, it measures the
effect of the concept on the label: TReATE beside the conditional expectation, and
how well each model predicts concept and control. With --swap, a file of pairs
such as "he she", it measures how much the probabilities of labels differ between
texts and their counterfactuals.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from bertjax import UserError, registry
from bertjax.assembly import command_line
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.probing import labelled_examples, probe_table
from bertjax.probing.labelled_examples import KINDS, TEXT_COLUMNS
from bertjax.storage import atomic
from bertjax.storage.paths import expand
from bertjax.tasks import metrics
from bertjax.tasks.task_type import POOLINGS

FLAGS = {
    **shared("model"),
    "train": Flag("labelled files to train the probes on"),
    "valid": Flag("labelled files to score the probes on"),
    "out": Flag("write this .json, which bertjax.report reads"),
    "png": Flag("write this picture"),
    "text": Flag("column of the text or the words", ""),
    "text_pair": Flag("column of a second text", ""),
    "label": Flag("texts: column of the label", ""),
    "tag": Flag("words: column of the tags", ""),
    "targets": Flag("spans: column of the targets", ""),
    "labels": Flag("labels to score, separated by commas; default: all", ""),
    "pooling": Flag("texts: mean, cls or last; spans: mean or first", "mean"),
    "metric": Flag("accuracy, f1, macro_f1 or matthews", "accuracy"),
    "treated": Flag("effects: the model that has unlearned --concept", ""),
    "concept": Flag("effects: column that says whether a text has the concept", ""),
    "control": Flag(
        "effects: column of the control, which both models should know", ""
    ),
    "swap": Flag("gaps: file of word pairs, two words per line", ""),
    **shared("dtype", "weights"),
    "max_words": Flag(
        "maximum number of words to train on, and to score", 20_000, least=2
    ),
    "seeds": Flag("seeds per probe", 3, least=1),
    "seed": Flag("the first seed", 0, least=0),
    "steps": Flag("updates per probe", 300, least=1),
    **shared("batch_size"),
    "lr": Flag("learning rate of the probes", 0.01, least=0.0),
    "weight_decay": Flag("weight decay of the probes", 1.0, least=0.0),
    "probes": Flag("linear, mlp, separated by commas", ["linear"]),
    "random_encoder": Flag("also probe an untrained encoder of the same size", True),
    **shared("json"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    kind = check(args)
    if args.treated or args.swap:
        check_effects(args, kind)
        from bertjax.probing import run_effects

        results, say = run_effects.run_effects(args), run_effects.describe
    else:
        from bertjax.probing.run_probes import run_probes

        results, say = run_probes(args, kind), probe_table.describe
    text = json.dumps(results)
    if args.out:
        out = expand(args.out, "--out")
        atomic.write_file(out, f"{text}\n", f"--out={args.out}")
    if args.png:
        draw = functools.partial(probe_table.plot, results)
        atomic.write_file(expand(args.png, "--png"), draw, f"--png={args.png}")
    print(text if args.json else say(results))
    return 0


# Flags of layer probes that effects do not use.
OF_LAYERS = ("png", "metric", "max_words", "seeds", "random_encoder", "labels")


def check_effects(args: Any, kind: str) -> None:
    """Refuse flags that do not go with --treated or --swap."""
    mode = "--treated" if args.treated else "--swap"
    if kind != "label":
        raise UserError(f"{mode} is about texts and their --label, not --{kind}")
    if args.treated and not args.concept:
        raise UserError(
            "--treated needs --concept, the column of the unlearned concept"
        )
    for name in OF_LAYERS:
        if args[name].present:
            raise UserError(f"--{name} has no effect with {mode}: leave it out")
    if len(args.probes) > 1:
        raise UserError(f"--probes={','.join(args.probes)}: {mode} takes one of them")


def check(args: Any) -> str:
    """Return the kind of examples, of KINDS; refuse flags that do not go together."""
    from bertjax.probing.probes import PROBES

    for name in ("model", "train", "valid"):
        if not args[name].value:
            raise UserError(f"--{name} is missing: see --help")
    kinds = [name for name in KINDS if args[name].value]
    if not kinds:
        raise UserError("--label is missing, or --tag, or --targets: see --help")
    if len(kinds) > 1:
        raise UserError(f"--{' and --'.join(kinds)}: give one of them")
    (kind,) = kinds
    if not (args.text or kind in TEXT_COLUMNS):
        raise UserError("--text is missing: see --help")
    if not (args.treated or args.swap):
        for name in ("concept", "control"):
            if args[name].value:
                raise UserError(f"--{name} needs --treated, or --swap: see --help")
    unused = "max_words" if kind == "label" else "text_pair"
    if args[unused].present:
        raise UserError(f"--{unused} has no effect with --{kind}: leave it out")
    labels = args.labels.split(",")
    if args.labels and len({*filter(None, labels)}) < 2:
        why = "one class alone tells nothing"
        raise UserError(f"--labels={args.labels}: give two or more: {why}")
    poolings = POOLINGS if kind == "label" else labelled_examples.POOLINGS
    registry.pick("--pooling", args.pooling, poolings)
    for name in args.probes:
        registry.pick("--probes", name, PROBES)
    registry.pick("--metric", args.metric, metrics.OF_CLASSES)
    if not args.probes:
        raise UserError("--probes is empty: linear, mlp, or both")
    if args.out:
        for name in ("train", "valid", "swap"):
            atomic.check_out(args.out, "--out", source=(f"--{name}", args[name].value))
    if args.png:
        atomic.check_out(args.png, "--png", ".png")
        probe_table.check_plot()
    return kind


if __name__ == "__main__":
    cli.command(main)

# SPDX-License-Identifier: Apache-2.0
"""What each layer of a frozen encoder knows of labelled texts, words or spans.

python -m bertjax.probe --model=DIR --train=FILES --valid=FILES
    --text=COLUMN [--text_pair=COLUMN] --label=COLUMN   texts: tables, a row a text
    | [--text=1] --tag=-1       words: FILE.bio, .conll, .jsonl, tfds:, a tag a word
    | [--text=text] --targets=COLUMN    spans, or pairs of them: FILE.jsonl
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from bertjax import UserError, registry
from bertjax.assembly import command_line
from bertjax.config import cli
from bertjax.probing import labelled_examples, probe_table
from bertjax.probing.labelled_examples import KINDS, TEXT_COLUMNS
from bertjax.storage import atomic
from bertjax.tasks import metrics
from bertjax.tasks.task_type import POOLINGS

STRINGS = {  # flag -> its default, what it is
    "model": (None, ""),
    "train": (None, "labelled files for the probes"),
    "valid": (None, "labelled files for the scores"),
    "out": (None, "a .json to write, which bertjax.report takes"),
    "png": (None, "a picture to write"),
    "text": ("", "the column of the text or the words"),
    "text_pair": ("", "the column of a second text"),
    "label": ("", "of texts: the column of the label"),
    "tag": ("", "of words: the column of the tags"),
    "targets": ("", "of spans: the column of the targets"),
    "labels": ("", "the labels that count, with commas"),
    "pooling": ("mean", "of texts and spans: mean, cls or first"),
    "metric": ("accuracy", "accuracy, f1, macro_f1 or matthews"),
    "dtype": ("float32", ""),
    "weights": ("", ""),
}
NUMBERS = {  # flag -> its default, its least value, what it is
    "max_words": (20_000, 2, "words for the probes, and for the scores, at most"),
    "seeds": (3, 1, "of each probe"),
    "seed": (0, 0, "the first of them"),
    "steps": (300, 1, "updates of a probe"),
    "batch_size": (32, 1, ""),
    "lr": (0.01, 0.0, "learning rate of the probes"),
    "weight_decay": (1.0, 0.0, "of the probes"),
}


def define_flags(values: flags.FlagValues) -> None:
    for name, (default, help) in STRINGS.items():
        flags.DEFINE_string(name, default, help, flag_values=values)
    for name, (default, least, help) in NUMBERS.items():
        whole = isinstance(default, int)
        define = flags.DEFINE_integer if whole else flags.DEFINE_float
        define(name, default, help, lower_bound=least, flag_values=values)
    kinds = "linear, mlp, with commas"
    flags.DEFINE_list("probes", ["linear"], kinds, flag_values=values)
    random = "probe an untrained encoder of the same size too; false leaves it out"
    flags.DEFINE_boolean("random_encoder", True, random, flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False)
    kind = check(args)
    from bertjax.probing.run_probes import run_probes

    results = run_probes(args, kind)
    text = json.dumps(results)
    if args.out:
        out = Path(args.out).expanduser()
        atomic.write_file(out, f"{text}\n", f"--out={args.out}")
    if args.png:
        draw = functools.partial(probe_table.plot, results)
        atomic.write_file(Path(args.png).expanduser(), draw, f"--png={args.png}")
    print(text if args.json else probe_table.describe(results))
    return 0


def check(args: flags.FlagValues) -> str:
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
    unused = "max_words" if kind == "label" else "text_pair"
    if args[unused].present:
        raise UserError(f"--{unused} has no effect with --{kind}: leave it out")
    poolings = POOLINGS if kind == "label" else labelled_examples.POOLINGS
    registry.pick("--pooling", args.pooling, poolings)
    for name in args.probes:
        registry.pick("--probes", name, PROBES)
    registry.pick("--metric", args.metric, metrics.OF_CLASSES)
    if not args.probes:
        raise UserError("--probes is empty: linear, mlp, or both")
    if args.out:
        atomic.check_out(args.out, "--out")
    if args.png:
        atomic.check_out(args.png, "--png", ".png")
        probe_table.check_plot()
    return kind


if __name__ == "__main__":
    cli.command(main)

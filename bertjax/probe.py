# SPDX-License-Identifier: Apache-2.0
"""What each layer of a frozen encoder knows of labelled texts, words or spans.

python -m bertjax.probe --model=DIR --train=FILES --valid=FILES
    --text=COLUMN [--text_pair=COLUMN] --label=COLUMN   texts: tables, a row a text
    | [--text=1] --tag=-1       words: FILE.bio, .conll, .jsonl, tfds:, a tag a word
    | [--text=text] --targets=COLUMN    spans, or pairs of them: FILE.jsonl
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.assembly import command_line, models, resolve
from bertjax.config import cli
from bertjax.probing import labelled_spans, probe_table, targets
from bertjax.storage import atomic
from bertjax.tasks import metrics, tables
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_rows import check_label
from bertjax.tasks.task_type import POOLINGS
from bertjax.tasks.text_rows import Form, Texts, make_texts, read_labels
from bertjax.tasks.types import tag

Examples = Texts | labelled_spans.Spans
PROBE_ROWS = 128  # rows of an update
OTHER = "a probe tells classes, and these look like scores"
KINDS = {"label": "rows", "tag": "words", "targets": "spans"}  # flag -> its examples
TEXTS = {
    "tag": tag.TASK_TYPE.columns["text"],
    "targets": "text",
}  # unless --text says another

HELP = {
    "train": "labelled files for the probes",
    "valid": "labelled files for the scores",
    "out": "a .json to write, which bertjax.report takes",
    "png": "a picture to write",
    "text": "the column of the text or the words",
    "text_pair": "the column of a second text",
    "label": "of texts: the column of the label",
    "tag": "of words: the column of the tags",
    "targets": "of spans: the column of the targets",
    "labels": "the labels that count, with commas",
    "seeds": "of each probe",
    "seed": "the first of them",
    "steps": "updates of a probe",
}


def define_flags(values: flags.FlagValues) -> None:
    for name in ("model", "train", "valid", "out", "png"):
        flags.DEFINE_string(name, None, HELP.get(name, ""), flag_values=values)
    for name in ("text", "text_pair", *KINDS, "labels"):
        flags.DEFINE_string(name, "", HELP[name], flag_values=values)
    flags.DEFINE_integer(
        "max_words",
        20_000,
        "words for the probes, and for the scores, at most",
        lower_bound=2,
        flag_values=values,
    )
    flags.DEFINE_list(
        "probes", ["linear"], "linear, mlp, with commas", flag_values=values
    )
    flags.DEFINE_string(
        "pooling", "mean", "of texts and spans: mean, cls or first", flag_values=values
    )
    flags.DEFINE_string(
        "metric", "accuracy", "accuracy, f1, macro_f1 or matthews", flag_values=values
    )
    for name, value, least in (("seeds", 3, 1), ("seed", 0, 0), ("steps", 300, 1)):
        flags.DEFINE_integer(
            name, value, HELP[name], lower_bound=least, flag_values=values
        )
    flags.DEFINE_float(
        "lr", 0.01, "learning rate of the probes", lower_bound=0, flag_values=values
    )
    flags.DEFINE_float(
        "weight_decay", 1.0, "of the probes", lower_bound=0, flag_values=values
    )
    flags.DEFINE_boolean(
        "random_encoder",
        True,
        "probe an encoder that has learnt nothing too; false leaves it out",
        flag_values=values,
    )
    flags.DEFINE_boolean("json", False, "", flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "", lower_bound=1, flag_values=values)
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_string("weights", "", "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False)
    for name in ("model", "train", "valid"):
        if not args[name].value:
            raise UserError(f"--{name} is missing: see --help")
    check(args)
    found = probe(args)
    text = json.dumps(found)
    if args.out:
        out = Path(args.out).expanduser()
        atomic.write_file(out, f"{text}\n", f"--out={args.out}")
    if args.png:
        from io import BytesIO

        picture = BytesIO()
        probe_table.plot(found, picture)
        out = Path(args.png).expanduser()
        atomic.write_file(out, picture.getvalue(), f"--png={args.png}")
    if args.json:
        print(text)
        return 0
    rows, metric = found["rows"], found["metric"]
    print(
        f"{rows['train']:,} {found['of']} for the probes, {rows['valid']:,} for the "
        f"{metric}; "
        f"{probe_table.tell_majority(found)}; uniform code: "
        f"{found['uniform_bits']:,.0f} bits, by frequency: "
        f"{found['frequency_bits']:,.0f} bits"
    )
    seeds = counted(found["seeds"], "seed")
    for kind, result in found["probes"].items():
        print(f"\n{kind} probes, {seeds}, {found['pooling']} pooling")
        print(probe_table.make_table(result["layers"], metric))
        print(probe_table.tell_mix(result["mix"], metric))
    return 0


def check(args: flags.FlagValues) -> None:
    """Refuse what can be seen before anything is read."""
    from bertjax.probing.probes import PROBES

    kind = kind_of(args)
    if not (args.text or kind in TEXTS):
        raise UserError("--text is missing: see --help")
    idle = "max_words" if kind == "label" else "text_pair"
    if args[idle].present:
        raise UserError(f"--{idle} says nothing to --{kind}")
    poolings = POOLINGS if kind == "label" else labelled_spans.POOLINGS
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


def kind_of(args: flags.FlagValues) -> str:
    """Return the one of KINDS that the flags ask for. Raises UserError."""
    asked = [name for name in KINDS if args[name].value]
    if not asked:
        raise UserError("--label is missing, or --tag, or --targets: see --help")
    if len(asked) > 1:
        raise UserError(f"--{' and --'.join(asked)}: give one of them")
    return asked[0]


def probe(args: flags.FlagValues) -> dict[str, Any]:
    """Read model and examples, train all probes, and return what was found."""
    import jax

    from bertjax.models import encoder
    from bertjax.probing import layer_features, layer_scores, mdl, probes

    config, tokenizer, checkpoint, _ = models.open_model(args.model, "--model")
    config.dtype = args.dtype
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    kind, longest = kind_of(args), cfg.max_length
    train, valid = read_examples(args, config, tokenizer, longest)
    if args.pooling == "first":
        train, valid = (replace(part, first=True) for part in (train, valid))
    labels, known, gold = train.form.labels, train.labels, valid.labels
    depth, n, m = cfg.num_hidden_layers + 1, len(known), len(gold)
    width, metric = cfg.hidden_size, metrics.OF_CLASSES[args.metric]
    if kind == "targets":
        width *= train.spans.shape[1]
    if kind == "tag" and args.metric == "f1":
        metric = labelled_spans.entity_f1(valid.words)
    cli.say(f"features: {layer_features.check_memory(n + m, depth, width)}")
    order = np.random.default_rng(args.seed).permutation(n)
    params = models.read_params(checkpoint, weights=args.weights)["encoder"]
    types = mdl.text_types([ids for part in (train, valid) for ids in ids_of(part)])
    types[:n] = types[:n][order]
    known = known[order]
    control = np.stack(
        [mdl.control_labels(types, known, args.seed, s) for s in range(args.seeds)]
    )
    settings = probes.Settings(args.steps, PROBE_ROWS, args.lr, args.weight_decay)

    def read(params: Any) -> layer_scores.Data:
        pooling = args.pooling if kind == "label" else "spans"
        reader = layer_features.make_reader(cfg, params, pooling)
        read_all = (
            layer_features.read_texts if kind == "label" else layer_features.read_spans
        )
        sizes = (depth, cfg.hidden_size, args.batch_size, longest)
        made = [read_all(reader, part, tokenizer, *sizes) for part in (train, valid)]
        for one in made[0]:  # a depth at a time, so that there is no copy of all
            one[:] = one[order]
        probes.standardise(*made)
        return layer_scores.Data(made[0], known, made[1], gold)

    results = {}
    data = read(params)
    for name in args.probes:
        told = (metric, args.seed, settings)
        rows = layer_scores.probe_layers(name, data, len(labels), control, *told)
        mix = layer_scores.probe_mix(
            name, data, len(labels), metric, args.seeds, args.seed, settings
        )
        results[name] = {"layers": rows, "mix": mix}
    if args.random_encoder:
        del data  # before the others are there
        small = encoder.without_pooler(cfg)
        data = read(encoder.init(jax.random.key(args.seed), small))
        for name in args.probes:
            told = (metric, args.seed, settings)
            rows = layer_scores.probe_layers(
                name, data, len(labels), control[:, :0], *told
            )
            for row, there in zip(results[name]["layers"], rows, strict=True):
                row |= {"random": there["score"], "random_bits": there["bits"]}
    common = np.bincount(known).argmax()
    return {
        "model": args.model,
        "metric": args.metric,
        "pooling": args.pooling,
        "labels": list(labels),
        "of": KINDS[kind],
        "rows": {"train": n, "valid": m},
        "seed": args.seed,
        "seeds": args.seeds,
        "settings": settings._asdict(),
        "majority": metric(np.full(m, common), gold),
        "majority_accuracy": float(np.mean(gold == common)),
        "uniform_bits": mdl.uniform_bits(n, len(labels)),
        "frequency_bits": mdl.frequency_bits(known),
        "probes": results,
    }


def read_examples(
    args: flags.FlagValues, config: ConfigDict, tokenizer: Any, longest: int
) -> Sequence[Examples]:
    """Read and encode --train and --valid. Raises UserError."""
    kind = kind_of(args)
    columns = {"text": args.text or TEXTS[kind], "text_pair": args.text_pair}
    columns = {name: column for name, column in columns.items() if column}
    form = Form(
        columns=tuple(columns.values()),
        label=args[kind].value,
        labels=tuple(filter(None, args.labels.split(","))),
        separators=tasks.separators(config),
        metrics=(args.metric,),
    )
    asked = {f"--{name}": column for name, column in columns.items()}
    asked[f"--{kind}"] = form.label
    check_label(asked)
    values = {f"--{name}": args[name].value for name in ("train", "valid")}
    few = (args.max_words, args.seed, cli.say)
    if kind == "label":
        made = read_tables(values, asked, form, tokenizer)
    elif kind == "tag":
        made = labelled_spans.read_words(values, asked, form, tokenizer, *few)
    else:
        made = targets.read_spans(values, asked, form, tokenizer, *few, OTHER)
    for flag, part in zip(values, made, strict=True):
        words = isinstance(part, labelled_spans.Spans)
        for note in part.notes(longest) if words else part.plan(longest).notes():
            cli.say(f"{flag}: {note}")
    return made


def read_tables(
    values: Mapping[str, str], asked: Mapping[str, str], form: Form, tokenizer: Any
) -> list[Texts]:
    """Read texts out of tables: {flag: files}, the training rows' first."""
    rows = [tables.read_rows(v, flag, asked, cli.say) for flag, v in values.items()]
    if not form.labels:
        found = read_labels(rows[0], form.label, OTHER, "--label")
        form = form._replace(labels=found)
    return [
        make_texts(part, form, tokenizer, True, cli.say, "--labels") for part in rows
    ]


def ids_of(part: Examples) -> Iterator[np.ndarray]:
    """Yield the ids of each example, -1 behind each text or span: its type."""
    words = isinstance(part, labelled_spans.Spans)
    for i in range(len(part.labels)):
        texts = part.pieces(i) if words else [text[i] for text in part.texts]
        yield np.concatenate([x for ids in texts for x in (ids, [-1])])


if __name__ == "__main__":
    cli.command(main)

# SPDX-License-Identifier: Apache-2.0
"""What each layer of a frozen encoder knows of labelled texts.

python -m bertjax.probe --model=DIR --train=TABLE --valid=TABLE
    --text=COLUMN [--text_pair=COLUMN] --label=COLUMN [--labels=A,B]
    [--probes=linear,mlp] [--pooling=mean|cls] [--metric=accuracy|f1|macro_f1|matthews]
    [--seeds=3] [--seed=0] [--steps=300] [--lr=0.01] [--weight_decay=1]
    [--random_encoder=True] [--out=FILE.json] [--png=FILE.png] [--json]
    [--batch_size=32] [--dtype=float32] [--weights=raw|ema]
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, disk, registry
from bertjax import config as c
from bertjax.probing import showing
from bertjax.tasks import metrics, tables
from bertjax.tasks import prepare as tasks
from bertjax.tasks.rows import check_label
from bertjax.tasks.texts import Form, Texts, make_texts, read_labels

PROBE_ROWS = 128  # rows of an update
OTHER = "a probe tells classes, and these look like scores"


def define_flags(values: flags.FlagValues) -> None:
    for name in ("model", "train", "valid", "text", "label", "out", "png"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_string("text_pair", "", "", flag_values=values)
    flags.DEFINE_string("labels", "", "", flag_values=values)
    flags.DEFINE_list("probes", ["linear"], "", flag_values=values)
    flags.DEFINE_string("pooling", "mean", "", flag_values=values)
    flags.DEFINE_string("metric", "accuracy", "", flag_values=values)
    for name, value, least in (("seeds", 3, 1), ("seed", 0, 0), ("steps", 300, 1)):
        flags.DEFINE_integer(name, value, "", lower_bound=least, flag_values=values)
    flags.DEFINE_float("lr", 0.01, "", lower_bound=0, flag_values=values)
    flags.DEFINE_float("weight_decay", 1.0, "", lower_bound=0, flag_values=values)
    flags.DEFINE_boolean("random_encoder", True, "", flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "", lower_bound=1, flag_values=values)
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_string("weights", "", "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags, needs_config=False)
    for name in ("model", "train", "valid", "text", "label"):
        if not args[name].value:
            raise UserError(f"--{name} is missing: see --help")
    check(args)
    found = probe(args)
    text = json.dumps(found)
    if args.out:
        out = Path(args.out).expanduser()
        disk.write_whole(out, f"{text}\n".encode(), f"--out={args.out}")
    if args.png:
        from io import BytesIO

        picture = BytesIO()
        showing.plot(found, picture)
        out = Path(args.png).expanduser()
        disk.write_whole(out, picture.getvalue(), f"--png={args.png}")
    if args.json:
        print(text)
        return 0
    rows, metric = found["rows"], found["metric"]
    print(
        f"{rows['train']:,} rows for the probes, {rows['valid']:,} for the {metric}; "
        f"largest class: {found['majority']:.3f}; uniform code: "
        f"{found['uniform_bits']:,.0f} bits"
    )
    for kind, result in found["probes"].items():
        print(f"\n{kind} probes, {found['seeds']} seeds, {found['pooling']} pooling")
        print(showing.make_table(result["layers"], metric))
        print(showing.tell_mix(result["mix"], metric))
    return 0


def check(args: flags.FlagValues) -> None:
    """Refuse what can be seen before anything is read."""
    from bertjax.probing.probes import PROBES

    for kind in args.probes:
        registry.pick("--probes", kind, PROBES)
    registry.pick("--pooling", args.pooling, tasks.POOLINGS)
    registry.pick("--metric", args.metric, metrics.OF_CLASSES)
    if not args.probes:
        raise UserError("--probes is empty: linear, mlp, or both")
    if args.out:
        disk.check_out(args.out, "--out")
    if args.png:
        disk.check_out(args.png, "--png", ".png")
        showing.check_plot()


def probe(args: flags.FlagValues) -> dict[str, Any]:
    """Read model and tables, train all probes, and return everything that was found."""
    import jax

    from bertjax.models import encoder
    from bertjax.probing import features, layers, mdl, probes

    config, tokenizer, checkpoint, _ = disk.open_model(args.model, "--model")
    config.dtype = args.dtype
    cfg = c.encoder_config(config, tokenizer.vocab_size)
    train, valid = read_tables(args, config, tokenizer)
    labels, longest = train.form.labels, cfg.max_length
    depth, n, m = cfg.num_hidden_layers + 1, train.n, valid.n
    c.say(f"features: {features.check_memory(n + m, depth, cfg.hidden_size)}")
    order = np.random.default_rng(args.seed).permutation(n)
    params = disk.read_params(checkpoint, weights=args.weights)["encoder"]
    types = mdl.text_types([texts_of(t, i) for t in (train, valid) for i in range(t.n)])
    types[:n] = types[:n][order]
    known = train.labels[order]
    control = np.stack(
        [mdl.control_labels(types, known, args.seed, s) for s in range(args.seeds)]
    )
    settings = probes.Settings(args.steps, PROBE_ROWS, args.lr, args.weight_decay)
    metric = metrics.OF_CLASSES[args.metric]

    def read(params: Any) -> layers.Data:
        reader = features.make_reader(cfg, params, args.pooling)
        made = [
            features.read_texts(
                reader, t, tokenizer, depth, cfg.hidden_size, args.batch_size, longest
            )
            for t in (train, valid)
        ]
        for one in made[0]:  # a depth at a time, so that there is no copy of all
            one[:] = one[order]
        probes.standardise(*made)
        return layers.Data(made[0], known, made[1], valid.labels)

    results = {}
    data = read(params)
    for kind in args.probes:
        told = (metric, args.seed, settings)
        rows = layers.probe_layers(kind, data, len(labels), control, *told)
        mix = layers.probe_mix(
            kind, data, len(labels), metric, args.seeds, args.seed, settings
        )
        results[kind] = {"layers": rows, "mix": mix}
    if args.random_encoder:
        del data  # before the others are there
        small = encoder.without_pooler(cfg)
        data = read(encoder.init(jax.random.key(args.seed), small))
        for kind in args.probes:
            told = (metric, args.seed, settings)
            rows = layers.probe_layers(kind, data, len(labels), control[:, :0], *told)
            for row, there in zip(results[kind]["layers"], rows, strict=True):
                row |= {"random": there["score"], "random_bits": there["bits"]}
    common = np.bincount(known).argmax()
    return {
        "model": args.model,
        "metric": args.metric,
        "pooling": args.pooling,
        "labels": list(labels),
        "rows": {"train": n, "valid": m},
        "seed": args.seed,
        "seeds": args.seeds,
        "settings": settings._asdict(),
        "majority": metric(np.full(m, common), valid.labels),
        "uniform_bits": mdl.uniform_bits(n, len(labels)),
        "probes": results,
    }


def read_tables(
    args: flags.FlagValues, config: c.ConfigDict, tokenizer: Any
) -> tuple[Texts, Texts]:
    """Read and encode the rows of --train and --valid. Raises UserError."""
    columns = {"--text": args.text, "--text_pair": args.text_pair}
    columns = {k: v for k, v in columns.items() if v}
    form = Form(
        columns=tuple(columns.values()),
        label=args.label,
        labels=tuple(filter(None, args.labels.split(","))),
        separators=2 if config.model.family in tasks.TWO_SEPARATORS else 1,
        metrics=(args.metric,),
    )
    columns["--label"] = args.label
    check_label(columns)
    rows = [
        tables.read_rows(args[name].value, f"--{name}", columns, c.say)
        for name in ("train", "valid")
    ]
    if not form.labels:
        found = read_labels(rows[0], args.label, OTHER, "--label")
        form = form._replace(labels=found)
    made = [make_texts(part, form, tokenizer, True, c.say, "--labels") for part in rows]
    longest = c.encoder_config(config, tokenizer.vocab_size).max_length
    for name, texts in zip(("train", "valid"), made, strict=True):
        cut = int((texts.plan(longest).truncated(np.arange(texts.n)) > 0).sum())
        if cut:
            c.say(f"--{name}: {cut:,} of {texts.n:,} rows are cut at {longest} tokens")
    return made[0], made[1]


def texts_of(texts: Texts, row: int) -> np.ndarray:
    """Return the ids of a row's texts, one after the other with -1 between."""
    return np.concatenate([x for t in texts.texts for x in (t[row], [-1])])


if __name__ == "__main__":
    c.command(main)

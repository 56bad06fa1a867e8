# SPDX-License-Identifier: Apache-2.0
"""The effects of a concept, for the flags of bertjax.probe --treated or --swap."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from bertjax import UserError, counted
from bertjax.assembly import models
from bertjax.config import cli
from bertjax.data.tokenizers.word_pairs import Pairs, read_pairs, swap_text
from bertjax.probing import effects, layer_features, probes
from bertjax.probing.labelled_examples import SCORES, files_of
from bertjax.probing.run_probes import PROBE_ROWS
from bertjax.tasks import prepare_task, tables
from bertjax.tasks.tables import Row
from bertjax.tasks.task_rows import Asking, Form, check_label
from bertjax.tasks.text_rows import label_of, make_texts, read_labels, text_of

KINDS = ("label", "concept", "control")  # flags that name a column of classes


class Classes(NamedTuple):
    """The names of classes, and the classes of the training and other texts, i32."""

    names: tuple[str, ...]
    train: np.ndarray
    valid: np.ndarray

    @property
    def majority(self) -> float:
        """The accuracy on `valid` of always predicting the largest class of `train`."""
        return float(np.mean(self.valid == np.bincount(self.train).argmax()))


def run_effects(args: flags.FlagValues) -> dict[str, Any]:
    """Read models and texts, train the probes, and return what --json prints.

    Raises UserError.
    """
    pairs = read_pairs(args.swap, "--swap") if args.swap else None
    columns = {"--text": args.text}
    if args.text_pair:
        columns["--text_pair"] = args.text_pair
    texts = tuple(columns.values())
    columns |= {f"--{kind}": args[kind].value for kind in KINDS if args[kind].value}
    check_label({"--text": args.text, "--label": args.label})
    parts = [
        tables.read_rows(value, flag, columns, cli.say)
        for flag, value in files_of(args).items()
    ]
    classes = {
        kind: read_classes(parts, args[kind].value, f"--{kind}")
        for kind in KINDS
        if args[kind].value
    }
    if "concept" in classes and len(classes["concept"].names) != 2:
        names = ", ".join(classes["concept"].names[:5])
        raise UserError(f"--concept={args.concept}: has not two values but {names}")
    parts += [swapped_rows(parts[1], texts, pairs)] if pairs else []
    named = {"factual": args.model} | (
        {"treated": args.treated} if args.treated else {}
    )
    flags_of = {"factual": "--model", "treated": "--treated"}
    opened = {n: models.open_model(path, flags_of[n]) for n, path in named.items()}
    found = {
        name: read_model(args, model, parts, texts, classes)
        for name, model in opened.items()
    }
    results: dict[str, Any] = {
        **{f: args[f].value for f in ("model", "treated", "swap") if args[f].value},
        "pooling": args.pooling,
        "rows": {"train": len(parts[0]), "valid": len(parts[1])},
        "probes": describe_probes(found, classes),
    }
    if args.treated:
        results |= effects_of(found, classes)
    if pairs:
        results["swap_gap"] = gaps_of(found, parts, texts, classes)
    return results


def read_classes(parts: Sequence[Sequence[Row]], column: str, flag: str) -> Classes:
    """Read a column of classes in the training and the other rows. Raises UserError."""
    names = read_labels(parts[0], column, SCORES, Asking(flag, ""))
    form = Form((), column, names, 0, ())
    numbers = [
        form.class_numbers(((label_of(r, column), r.place) for r in rows), flag)
        for rows in parts
    ]
    return Classes(names, *numbers)


def swapped_rows(
    rows: Sequence[Row], columns: Sequence[str], pairs: Pairs
) -> list[Row]:
    """Return rows with counterfactual texts: the words of pairs are swapped."""
    return [
        row._replace(
            cells={
                **row.cells,
                **{c: swap_text(text_of(row, c), pairs) for c in columns},
            }
        )
        for row in rows
    ]


def read_model(
    args: Any,
    model: models.LoadedModel,
    parts: Sequence[Sequence[Row]],
    columns: tuple[str, ...],
    classes: Mapping[str, Classes],
) -> dict[str, np.ndarray]:
    """Train probes on a model's last layer; return what they predict.

    The result is {kind: probabilities f64 [n, C]} for the texts of all parts but the
    first, on which the probes are trained, in order.
    """
    model.config.dtype = args.dtype
    cfg, tokenizer = model.cfg, model.tokenizer
    separators = prepare_task.separators(model.config)
    form = Form(columns, "", (), separators, (), Asking("--label", "--labels", ""))
    n, depth = sum(map(len, parts)), cfg.num_hidden_layers + 1
    cli.say(f"features: {layer_features.check_memory(n, depth, cfg.hidden_size)}")
    params = model.read_params(weights=args.weights)["encoder"]
    reader = layer_features.make_reader(cfg, params, args.pooling)
    features = []
    for rows in parts:
        texts = make_texts(rows, form, tokenizer, False, cli.say)
        read = layer_features.read_texts
        features.append(read(reader, texts, tokenizer, cfg, args.batch_size)[-1])
    order = np.random.default_rng(args.seed).permutation(len(parts[0]))
    train, others = features[0][order], np.concatenate(features[1:])
    probes.standardize(train[None], others[None])
    settings = probes.Settings(args.steps, PROBE_ROWS, args.lr, args.weight_decay)
    init, key = probes.PROBES[args.probes[0]], jax.random.key(args.seed)
    return {
        kind: np.asarray(
            learn(init, len(own.names), train, own.train[order], others, key, settings),
            np.float64,
        )
        for kind, own in classes.items()
    }


@functools.partial(jax.jit, static_argnames=("init", "classes", "settings"))
def learn(
    init: Any,
    classes: int,
    train: jax.Array,
    labels: jax.Array,
    others: jax.Array,
    key: jax.Array,
    settings: probes.Settings,
) -> jax.Array:
    """Train a probe on rows f32 [n, D], which are in random order.

    Returns the probabilities of the classes for other rows: f32 [m, C].
    """
    start = init(key, train.shape[-1], classes)
    count = jax.numpy.int32(len(labels))
    params = probes.fit(start, train, labels, count, key, settings)
    return jax.nn.softmax(probes.logits(params, others))


def describe_probes(
    found: Mapping[str, Mapping[str, np.ndarray]], classes: Mapping[str, Classes]
) -> dict[str, Any]:
    """Return the accuracy of the probes of each model, and of the largest class.

    For the concept also return the accuracy of predicting it from the control alone.
    """
    scores: dict[str, Any] = {}
    for kind, own in classes.items():
        m = len(own.valid)
        scores[kind] = {
            name: effects.estimate((logits[kind][:m].argmax(1) == own.valid) * 1.0)
            for name, logits in found.items()
        } | {"majority": own.majority}
    if {"concept", "control"} <= classes.keys():
        concept, control = classes["concept"], classes["control"]
        best = effects.most_likely(control.train, concept.train, control.valid)
        scores["concept"]["by_control"] = float(np.mean(best == concept.valid))
    return scores


def outcomes(names: Sequence[str], estimates: Sequence[Any]) -> dict[str, Any]:
    """Return {outcome: estimate}.

    Of two outcomes only the second is included, because the first has its negative.
    """
    pairs = list(zip(names, estimates, strict=True))
    return dict(pairs[1:] if len(pairs) == 2 else pairs)


def effects_of(
    found: Mapping[str, Mapping[str, np.ndarray]], classes: Mapping[str, Classes]
) -> dict[str, Any]:
    """Return TReATE, the effect and CONEXP of the concept on each outcome."""
    m, names = len(classes["label"].valid), classes["label"].names
    outputs = effects.Outputs(
        found["factual"]["label"][:m],
        found["treated"]["label"][:m],
        found["treated"]["concept"][:m, 1],
        classes["concept"].valid,
    )
    found_of = {
        "effect": effects.effect(outputs),
        "conexp": effects.conditional_expectation(outputs),
    }
    return {
        "concept": " against ".join(reversed(classes["concept"].names)),
        "treate": effects.treate(outputs),
        **{k: one and outcomes(names, one) for k, one in found_of.items()},
    }


def gaps_of(
    found: Mapping[str, Mapping[str, np.ndarray]],
    parts: Sequence[Sequence[Row]],
    columns: Sequence[str],
    classes: Mapping[str, Classes],
) -> dict[str, Any]:
    """Return how much outcomes differ between texts and their counterfactuals.

    Only texts that have a counterfactual count. The result has the gap of each model
    and, with a concept, the effect of each model according to the pairs.
    """
    pairs = list(zip(parts[1], parts[2], strict=True))
    other = [any(text_of(a, c) != text_of(b, c) for c in columns) for a, b in pairs]
    where, m = np.flatnonzero(other), len(pairs)
    if len(where) < 2:
        raise UserError(
            f"--swap: the words of the pairs are in {counted(len(where), 'text')}"
        )
    gaps: dict[str, Any] = {"texts": len(where)}
    for name, logits in found.items():
        a, b = logits["label"][where], logits["label"][m + where]
        gaps[name] = effects.estimate(effects.total_variation(a, b))
        if "concept" in classes:
            sign = 2 * classes["concept"].valid[where] - 1
            each = [effects.estimate(d) for d in ((a - b) * sign[:, None]).T]
            gaps[f"{name}_effect"] = outcomes(classes["label"].names, each)
    return gaps


def describe(results: Mapping[str, Any]) -> str:
    """Return the results of run_effects as readable text."""
    rows = results["rows"]
    texts = counted(rows["train"], "text")
    lines = [f"{texts} for the probes, {rows['valid']:,} for the rest"]
    lines.append("accuracy of probes on the last layer:")
    for kind, scores in results["probes"].items():
        each = (f"{name} {_format(score)}" for name, score in scores.items())
        lines.append(f"  {kind:10} {', '.join(each)}")
    if "treate" in results:
        lines.append(f"{results['concept']}:")
        lines.append(f"  {'TReATE':10} {_format(results['treate'])}")
        for name in ("effect", "conexp"):
            title = {"conexp": "CONEXP"}.get(name, name)
            for outcome, one in (results[name] or {"": "not told"}).items():
                lines.append(f"  {title:10} {outcome} {_format(one)}")
    if gaps := results.get("swap_gap"):
        lines.append(f"{gaps['texts']:,} texts and their counterfactuals:")
        for name, one in gaps.items():
            if name.endswith("_effect"):
                lines += [f"  {name:16} {k} {_format(v)}" for k, v in one.items()]
            elif name != "texts":
                lines.append(f"  {name + ' gap':16} {_format(one)}")
    return "\n".join(lines)


def _format(one: Any) -> str:
    if not isinstance(one, dict):
        return one if isinstance(one, str) else f"{one:.3f}"
    width = "" if one["ci95"] is None else f" ± {one['ci95']:.3f}"
    return f"{one['value']:.3f}{width}"

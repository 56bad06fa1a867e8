# SPDX-License-Identifier: Apache-2.0
"""The probing of all layers, for the flags of bertjax.probe."""

from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import numpy as np
from absl import flags

from bertjax.assembly import models
from bertjax.config import cli
from bertjax.models import encoder
from bertjax.probing import labelled_examples, layer_features, layer_scores, probes
from bertjax.tasks import metrics, prepare_task

PROBE_ROWS = 128  # rows per update


def run_probes(args: flags.FlagValues, kind: str) -> dict[str, Any]:
    """Read model and examples, train all probes, and return what --json prints.

    kind: a key of labelled_examples.KINDS. Raises UserError.
    """
    model = models.open_model(args.model, "--model")
    model.config.dtype = args.dtype
    cfg, tokenizer = model.cfg, model.tokenizer
    train, valid = labelled_examples.read_examples(
        args, kind, prepare_task.separators(model.config), tokenizer, cfg.max_length
    )
    if args.pooling == "first":
        train, valid = (replace(part, first=True) for part in (train, valid))
    n, gold, classes = len(train.labels), valid.labels, len(train.form.labels)
    depth = cfg.num_hidden_layers + 1
    width = cfg.hidden_size * (train.spans.shape[1] if kind == "targets" else 1)
    cli.say(f"features: {layer_features.check_memory(n + len(gold), depth, width)}")
    metric = metrics.OF_CLASSES[args.metric]
    if kind == "tag" and args.metric == "f1":
        metric = labelled_examples.entity_f1(valid.words)
    params = model.read_params(weights=args.weights)["encoder"]
    order = np.random.default_rng(args.seed).permutation(n)
    labels = train.labels[order]
    control = make_control(train, valid, order, args.seed, args.seeds)
    settings = probes.Settings(args.steps, PROBE_ROWS, args.lr, args.weight_decay)
    is_text = kind == "label"
    pooling = args.pooling if is_text else "spans"
    read_all = layer_features.read_texts if is_text else layer_features.read_spans

    def read(params: Any) -> layer_scores.Data:
        reader = layer_features.make_reader(cfg, params, pooling)
        x, other = (
            read_all(reader, part, tokenizer, cfg, args.batch_size)
            for part in (train, valid)
        )
        for layer in x:  # one after the other, so that only one layer is copied
            layer[:] = layer[order]
        probes.standardize(x, other)
        return layer_scores.Data(x, labels, other, gold, classes, metric)

    data = read(params)
    probe = (args.seed, settings)
    results = {
        name: {
            "layers": layer_scores.probe_layers(name, data, control, *probe),
            "mix": layer_scores.probe_mix(name, data, args.seeds, *probe),
        }
        for name in args.probes
    }
    if args.random_encoder:
        del data  # memory may not hold both
        small = encoder.without_pooler(cfg)
        data = read(encoder.init(jax.random.key(args.seed), small))
        none = control[:, :0]
        for name, result in results.items():
            rows = layer_scores.probe_layers(name, data, none, *probe)
            for row, random in zip(result["layers"], rows, strict=True):
                row |= {"random": random["score"], "random_bits": random["bits"]}
    largest = np.bincount(labels).argmax()
    return {
        "model": args.model,
        "metric": args.metric,
        "pooling": args.pooling,
        "labels": list(train.form.labels),
        "of": labelled_examples.KINDS[kind],
        "rows": {"train": n, "valid": len(gold)},
        "seed": args.seed,
        "seeds": args.seeds,
        "settings": settings._asdict(),
        "majority": metric(np.full(len(gold), largest), gold),
        "majority_accuracy": float(np.mean(gold == largest)),
        "uniform_bits": layer_scores.uniform_bits(n, classes),
        "frequency_bits": layer_scores.frequency_bits(labels),
        "probes": results,
    }


def make_control(
    train: Any, valid: Any, order: np.ndarray, seed: int, seeds: int
) -> np.ndarray:
    """Draw one control task per seed: labels i32 [seeds, n + m].

    The labels of the training examples, in the order i64 [n], come before those of the
    others.
    """
    ids = map(labelled_examples.example_ids, (train, valid))
    types, labels = layer_scores.text_types([*chain(*ids)]), train.labels[order]
    types[: len(order)] = types[order]
    draws = range(seeds)
    return np.stack(
        [layer_scores.control_labels(types, labels, seed, d) for d in draws]
    )

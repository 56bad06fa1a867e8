# SPDX-License-Identifier: Apache-2.0
"""What probes on every depth say together: scores, controls, code lengths, the mix."""

from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax.probing import mdl, probes
from bertjax.probing.probes import Settings
from bertjax.tasks.metrics import Metric


class Data(NamedTuple):
    """Features f32 [N + 1, n, D] and classes i32 [n] of training and other rows, how
    many classes there are, and what scores the classes that a probe gives."""

    train: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    gold: np.ndarray
    classes: int
    metric: Metric


def probe_layers(
    kind: str, data: Data, control: np.ndarray, seed: int, settings: Settings
) -> list[dict[str, Any]]:
    """Probe every depth: a row each, means over seeds.

    control: labels that mean nothing, of the training rows and then of the others, i32
    [seeds, n + m]; with [seeds, 0] there is no control task. Rows have "score" and its
    deviation "sd" (None where one probe is all there is), "bits" and "compression"
    (Voita and Titov 2020), and with a control task "control", "selectivity" (score less
    control: Hewitt and Liang 2019), "control_bits", and "memorised": the share of the
    training rows whose meaningless label the probe gives.
    """
    n, probe = len(data.labels), probes.PROBES[kind]
    counts = mdl.portions(n)
    seeds = len(control) if kind in probes.DRAWN else 1
    tasks = np.broadcast_to(data.labels, (seeds, 1, n))
    if control.size:  # one a seed; without seeds all of them
        tasks = np.concatenate([tasks, control[:, :n].reshape(seeds, -1, n)], axis=1)
    key, classes, metric = jax.random.key(seed), data.classes, data.metric
    bits, fitted, predicted, _ = probes.run(
        probe, classes, 0, data.train, data.valid, tasks, counts, seeds, key, settings
    )
    bits = mdl.online_bits(np.asarray(bits), counts, classes)  # [seeds, tasks, depths]
    fitted, predicted = np.asarray(fitted)[-1], np.asarray(predicted)[-1]
    others = predicted[:, 1:].reshape(-1, *predicted.shape[2:])
    rows = []
    for layer in range(len(data.train)):
        scores = [metric(p, data.gold) for p in predicted[:, 0, layer]]
        row = {
            "layer": layer,
            "score": float(np.mean(scores)),
            "sd": deviation(scores),
            "bits": float(bits[:, 0, layer].mean()),
        }
        row["compression"] = mdl.uniform_bits(n, classes) / row["bits"]
        if control.size:
            pairs = zip(others[:, layer], control[:, n:], strict=True)
            row["control"] = float(np.mean([metric(p, gold) for p, gold in pairs]))
            row["selectivity"] = row["score"] - row["control"]
            row["control_bits"] = float(bits[:, 1:, layer].mean())
            row["memorised"] = float(fitted[:, 1:, layer].mean())
        rows.append(row)
    return rows


def probe_mix(
    kind: str, data: Data, seeds: int, seed: int, settings: Settings
) -> dict[str, Any]:
    """Probe scalar mixes of the depths 0 to l, for every l.

    "weights" are those of the mix of all depths, and "centre_of_gravity" their mean
    depth; "cumulative" the score of each mix, and "expected_layer" the mean depth at
    which it rises, None where it does not rise (Tenney, Das and Pavlick 2019, BERT
    Rediscovers the Classical NLP Pipeline: the metrics).
    """
    sees = np.tri(len(data.train), dtype=bool)
    probe, n = probes.PROBES[kind], len(data.labels)
    seeds = seeds if kind in probes.DRAWN else 1
    train, valid = (data.train, sees), (data.valid, sees)
    tasks = np.broadcast_to(data.labels, (seeds, 1, n))
    whole, key = mdl.portions(n)[-1:], jax.random.key(seed)
    result = probes.run(
        probe, data.classes, (None, 0), train, valid, tasks, whole, seeds, key, settings
    )
    predicted = np.asarray(result.predicted)[0, :, 0]  # [seeds, mixes, m]
    scores = [[data.metric(p, data.gold) for p in mixes] for mixes in predicted]
    cumulative = np.mean(scores, axis=0)
    mixes = result.params["mix"][0, :, 0, -1]  # of all depths
    weights = jax.vmap(probes.mix_weights, (0, None))(mixes, sees[-1])
    weights = np.asarray(weights, np.float64).mean(0)
    return {
        "score": float(cumulative[-1]),
        "sd": deviation([s[-1] for s in scores]),
        "weights": weights.tolist(),
        "centre_of_gravity": float(np.arange(len(weights)) @ weights),
        "cumulative": cumulative.tolist(),
        "expected_layer": expected_layer(cumulative),
    }


def expected_layer(scores: np.ndarray) -> float | None:
    """Return sum of l d_l / sum of d_l from l = 1, d_l = scores[l] - scores[l - 1].

    None where more layers do not score higher in the end.

    >>> expected_layer(np.array([0.5, 0.5, 0.9, 0.9]))
    2.0
    """
    gains = np.diff(np.asarray(scores, np.float64))
    if gains.sum() <= 1e-9:
        return None
    return float(np.arange(1, len(scores)) @ gains / gains.sum())


def deviation(values: Any) -> float | None:
    """Return the deviation of a sample, None of one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None

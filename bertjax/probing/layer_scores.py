# SPDX-License-Identifier: Apache-2.0
"""Probing results for every depth: scores, controls, code lengths, scalar mixes."""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax.data import counter_rng
from bertjax.probing import probes
from bertjax.probing.probes import Settings
from bertjax.tasks.metrics import Metric

# The shares of the rows on which the probes are trained (Voita and Titov 2020).
SHARES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)


class Data(NamedTuple):
    """The features and classes of the training rows and of the others.

    train, valid: features, f32 [N + 1, n, D]; labels, gold: their classes, i32 [n];
    classes: the number of classes; metric: scores predicted classes.
    """

    train: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    gold: np.ndarray
    classes: int
    metric: Metric


def probe_layers(
    kind: str, data: Data, control: np.ndarray, seed: int, settings: Settings
) -> list[dict[str, Any]]:
    """Probe every depth; return one row per depth, with means over seeds.

    control: random labels of the training rows, followed by those of the others, i32
    [seeds, n + m]; [seeds, 0] without a control task. Rows have "score" and its
    standard deviation "sd" (None with a single probe), "bits" and "compression" (Voita
    and Titov 2020). With a control task they have "control", "selectivity" (score minus
    control: Hewitt and Liang 2019), "control_bits", and "memorised": the share of the
    training rows whose random label the probe predicts.
    """
    n, probe = len(data.labels), probes.PROBES[kind]
    counts = portions(n)
    seeds = len(control) if kind in probes.DRAWN else 1
    tasks = np.broadcast_to(data.labels, (seeds, 1, n))
    # Each seed has its own control task; if the probe does not depend on the seed, all
    # tasks are those of one seed.
    if control.size:
        tasks = np.concatenate([tasks, control[:, :n].reshape(seeds, -1, n)], axis=1)
    key, classes, metric = jax.random.key(seed), data.classes, data.metric
    bits, fitted, predicted, _ = probes.run(
        probe, classes, 0, data.train, data.valid, tasks, counts, seeds, key, settings
    )
    bits = online_bits(np.asarray(bits), counts, classes)  # [seeds, tasks, depths]
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
        row["compression"] = uniform_bits(n, classes) / row["bits"]
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

    "weights" are those of the mix of all depths, and "centre_of_gravity" is their mean
    depth; "cumulative" has the score of each mix, and "expected_layer" is the mean
    depth at which it rises, or None if it does not (the metrics of Tenney, Das and
    Pavlick 2019, BERT Rediscovers the Classical NLP Pipeline).
    """
    sees = np.tri(len(data.train), dtype=bool)
    probe, n = probes.PROBES[kind], len(data.labels)
    seeds = seeds if kind in probes.DRAWN else 1
    train, valid = (data.train, sees), (data.valid, sees)
    tasks = np.broadcast_to(data.labels, (seeds, 1, n))
    whole, key = portions(n)[-1:], jax.random.key(seed)
    result = probes.run(
        probe, data.classes, (None, 0), train, valid, tasks, whole, seeds, key, settings
    )
    predicted = np.asarray(result.predicted)[0, :, 0]  # [seeds, mixes, m]
    scores = [[data.metric(p, data.gold) for p in mixes] for mixes in predicted]
    cumulative = np.mean(scores, axis=0)
    mixes = result.params["mix"][0, :, 0, -1]  # those of the mix of all depths
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

    Returns None if all layers together score no higher than layer 0.

    >>> expected_layer(np.array([0.5, 0.5, 0.9, 0.9]))
    2.0
    """
    gains = np.diff(np.asarray(scores, np.float64))
    if gains.sum() <= 1e-9:
        return None
    return float(np.arange(1, len(scores)) @ gains / gains.sum())


def deviation(values: Any) -> float | None:
    """Return the standard deviation of a sample; None for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# ---------------------------------------------------------------- codes and controls
def portions(n: int) -> np.ndarray:
    """Return (rows to train on, end of the rows to code): i32 [amounts, 2].

    The last entry trains on all n rows and codes none. Shares that are the same number
    of rows are merged.

    >>> portions(40).tolist()
    [[1, 3], [3, 5], [5, 10], [10, 20], [20, 40], [40, 40]]
    """
    ends = sorted({max(1, round(share * n)) for share in SHARES})
    return np.array(list(zip(ends, [*ends[1:], n], strict=True)), np.int32)


def uniform_bits(n: int, classes: int) -> float:
    """Return the code length of n labels if all classes are equally likely."""
    return float(n * np.log2(classes))


def frequency_bits(labels: np.ndarray) -> float:
    """Return the code length of labels i32 [n] if only their frequencies are known.

    >>> frequency_bits(np.array([0, 0, 0, 1, 2, 2, 2, 1]))
    12.490224995673063
    """
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    return float(-counts @ np.log2(counts / counts.sum()))


def online_bits(bits: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Return the length of the online code (Voita and Titov 2020).

    bits: [amounts, ...], the bits of the rows from counts[i, 0] to counts[i, 1] under a
    probe trained on the rows before. The first rows, for which there is no probe, cost
    log2(classes) each.
    """
    first = uniform_bits(int(counts[0, 0]), classes)
    return first + np.asarray(bits, np.float64).sum(0)


def text_types(texts: list[np.ndarray]) -> np.ndarray:
    """Return a type for each row, the same for the same ids: u64 [n].

    texts: the ids of each row, of both its texts.
    """
    return np.array(
        [
            int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
            for ids in texts
        ],
        np.uint64,
    )


def control_labels(
    types: np.ndarray, labels: np.ndarray, seed: int, draw: int
) -> np.ndarray:
    """Draw a control task's labels (Hewitt and Liang 2019): i32 [n].

    A label is random, and depends only on the type of the input. Its distribution is
    that of `labels`.
    """
    keys = counter_rng.fold(seed, "control", draw, types)
    return labels[counter_rng.below(keys, 0, len(labels))]

# SPDX-License-Identifier: Apache-2.0
"""Probes on synthetic features with known results."""

import jax
import numpy as np
import pytest

from bertjax.probing import layer_scores, probe_table, probes
from bertjax.tasks.metrics import accuracy

DEPTHS, N, M, D, KNOWN = 5, 200, 100, 8, 3
SETTINGS = probes.Settings(steps=150, batch_size=64, lr=0.03, weight_decay=0.1)


def make_data(seed=0, from_layer=KNOWN):
    """Make features that have the class from a layer on, and only noise before."""
    draw = np.random.default_rng(seed)
    gold = draw.integers(0, 2, N + M).astype(np.int32)
    x = draw.normal(size=(DEPTHS, N + M, D)).astype(np.float32)
    x[from_layer:, :, 0] += 8 * gold
    train, valid = x[:, :N].copy(), x[:, N:].copy()
    probes.standardize(train, valid)
    return layer_scores.Data(train, gold[:N], valid, gold[N:], 2, accuracy)


DATA = make_data()
CONTROL = np.stack(
    [layer_scores.control_labels(np.arange(N + M), DATA.labels, 0, s) for s in range(2)]
)


def probe(kind="linear", data=DATA, seed=0):
    return layer_scores.probe_layers(kind, data, CONTROL, seed, SETTINGS)


@pytest.fixture(scope="module")
def rows():
    return probe()


def check(rows):
    for row in rows:
        known = row["layer"] >= KNOWN
        assert (row["score"] > 0.97) == known and (row["score"] < 0.7) == (not known)
        assert row["selectivity"] == row["score"] - row["control"]
        assert 0.3 < row["control"] < 0.7  # new rows cannot be known
        # Noise takes about N bits, the class far fewer.
        assert row["bits"] < 60 if known else 0.9 * N < row["bits"] < 1.6 * N
        assert row["compression"] == pytest.approx(N / row["bits"])
        assert 0.9 * N < row["control_bits"] < 1.6 * N
        assert 0.5 < row["memorised"] < 0.8  # 8 numbers cannot memorize 200 labels


def test_linear_probes_find_the_layer(rows):
    check(rows)
    assert all(row["sd"] is None for row in rows)  # one probe, without randomness


def test_seeds_of_a_linear_probe_differ_in_the_control_alone(rows):
    """Two controls at once have the mean of the results of each."""
    each = [
        layer_scores.probe_layers("linear", DATA, one[None], 0, SETTINGS)
        for one in CONTROL
    ]
    for both, first, second in zip(rows, *each, strict=True):
        assert both["score"] == first["score"] == second["score"]
        for key in ("control", "control_bits", "memorised"):
            mean = (first[key] + second[key]) / 2
            assert both[key] == pytest.approx(mean, rel=1e-3)


@pytest.mark.slow  # twenty seconds of training
def test_mlps_find_the_layer_too():
    for row in probe("mlp"):
        known = row["layer"] >= KNOWN
        assert (row["score"] > 0.97) == known and (row["score"] < 0.7) == (not known)
        assert row["memorised"] > 0.7  # more than a linear probe


def test_same_seed_same_numbers(rows):
    assert probe() == rows
    other = probe(seed=1)
    assert other != rows
    check(other)


def test_a_mix_finds_the_layer():
    mix = layer_scores.probe_mix("linear", DATA, 2, 0, SETTINGS)
    assert sum(mix["weights"]) == pytest.approx(1)
    assert min(mix["weights"][KNOWN:]) > 2 * max(mix["weights"][:KNOWN])
    assert 3 < mix["centre_of_gravity"] < 4
    assert mix["centre_of_gravity"] == pytest.approx(
        sum(i * w for i, w in enumerate(mix["weights"]))
    )
    assert mix["expected_layer"] == pytest.approx(KNOWN, abs=0.3)
    assert mix["score"] == mix["cumulative"][-1] > 0.97


def test_what_a_mix_does_not_see_has_no_weight():
    seen = np.array([True, False, True])
    weights = probes.mix_weights(np.array([1.0, 9.0, 1.0]), seen)
    np.testing.assert_array_equal(weights, [0.5, 0, 0.5])


def test_expected_layer():
    """Scores rise by 0.2 at layer 1 and 0.6 at 3: (1 * 0.2 + 3 * 0.6) / 0.8 = 2.5."""
    assert layer_scores.expected_layer(np.array([0.1, 0.3, 0.3, 0.9])) == pytest.approx(
        2.5
    )
    assert layer_scores.expected_layer(np.array([0.5, 0.7, 0.5])) is None


# ---------------------------------------------------------------- the online code
def test_portions_are_the_papers():
    assert [b for b, _ in layer_scores.portions(1000)] == (
        [1, 2, 4, 8, 16, 32, 62, 125, 250, 500, 1000]
    )
    for n in (2, 7, 40, 999):
        counts = layer_scores.portions(n)
        assert counts[0, 0] == 1 and tuple(counts[-1]) == (n, n)
        assert (counts[1:, 0] == counts[:-1, 1]).all()


def test_code_length_by_hand():
    """4 rows take 4 x log2(3) bits, uniformly; the others 5 and 2.5 bits."""
    counts = np.array([[4, 8], [8, 16], [16, 16]])
    found = layer_scores.online_bits(np.array([5, 2.5, 0]), counts, 3)
    assert found == pytest.approx(4 * np.log2(3) + 7.5)
    assert layer_scores.uniform_bits(16, 3) == pytest.approx(16 * np.log2(3))
    known = np.array([0] * 6 + [2] * 2, np.int32)  # 6 x log2(8 / 6) and 2 x 2
    assert layer_scores.frequency_bits(known) == pytest.approx(6 * np.log2(8 / 6) + 4)


def test_bits_are_minus_log_probabilities():
    """An untrained probe codes a row by the class frequencies of earlier rows."""
    still = SETTINGS._replace(steps=1, lr=0.0)
    found = layer_scores.probe_layers("linear", DATA, CONTROL[:, :0], 0, still)
    bits = 1.0  # the first row
    for begin, end in layer_scores.portions(N)[:-1]:
        seen = np.bincount(DATA.labels[:begin], minlength=2) + 1
        bits -= np.log2(seen / seen.sum())[DATA.labels[begin:end]].sum()
    assert [r["bits"] for r in found] == pytest.approx([bits] * DEPTHS, rel=1e-5)
    compression = [N / bits] * DEPTHS
    assert [r["compression"] for r in found] == pytest.approx(compression, rel=1e-5)
    assert not {"control", "selectivity", "memorised"} & set(found[0])


def test_noise_is_coded_as_by_frequency():
    """Features are noise, and nine of ten rows have one of eight classes."""
    draw = np.random.default_rng(0)
    n, m = 2000, 50
    x = draw.normal(size=(1, n + m, 4)).astype(np.float32)
    gold = np.where(draw.random(n + m) < 0.9, 0, draw.integers(1, 8, n + m))
    gold = gold.astype(np.int32)
    data = layer_scores.Data(x[:, :n], gold[:n], x[:, n:], gold[n:], 8, accuracy)
    few = probes.Settings(steps=50, batch_size=128, lr=0.01, weight_decay=1.0)
    (row,) = layer_scores.probe_layers("linear", data, CONTROL[:, :0], 0, few)
    assert row["bits"] < 1.1 * layer_scores.frequency_bits(gold[:n])
    assert row["score"] == np.mean(gold[n:] == 0)


def test_rows_beyond_a_portion_teach_nothing():
    """A probe of the first 10 rows does not depend on the labels of later rows."""
    counts = np.array([[10, 20]], np.int32)
    labels = np.broadcast_to(DATA.labels, (1, 1, N)).copy()
    other = labels.copy()
    other[..., 10:] = 1 - other[..., 10:]

    def bits_and_kernel(labels):
        arguments = (probes.PROBES["linear"], 2, 0, DATA.train, DATA.valid, labels)
        found = probes.run(*arguments, counts, 1, jax.random.key(0), SETTINGS)
        return found.bits, found.params["out"]["kernel"]

    one, two = bits_and_kernel(labels), bits_and_kernel(other)
    np.testing.assert_array_equal(one[1], two[1])
    assert not np.array_equal(one[0], two[0])


# ---------------------------------------------------------------- controls, scales
def test_control_labels_belong_to_types():
    texts = [np.array(ids, np.int32) for ids in ([5, 6], [7], [5, 6], [6, 5])]
    types = layer_scores.text_types(texts)
    assert types[0] == types[2] and len(set(types.tolist())) == 3
    labels = np.array([0, 1, 1, 1], np.int32)
    many = layer_scores.control_labels(np.arange(4000), labels, 7, 0)
    assert 0.72 < many.mean() < 0.78 and many.dtype == np.int32
    np.testing.assert_array_equal(
        many, layer_scores.control_labels(np.arange(4000), labels, 7, 0)
    )
    for other in (
        layer_scores.control_labels(np.arange(4000), labels, *s)
        for s in ((8, 0), (7, 1))
    ):
        assert 0.3 < (other != many).mean() < 0.45
    found = layer_scores.control_labels(types, labels, 0, 0)
    assert found[0] == found[2]


def test_standardising():
    x = np.random.default_rng(0).normal(3, 5, (2, 50, 4)).astype(np.float32)
    x[1] = 100 * x[0]
    x[:, :, 2] = 7  # constant, like the embedding of [CLS]
    train, valid = x[:, :40].copy(), x[:, 40:].copy()
    probes.standardize(train, valid)
    varied = [0, 1, 3]
    np.testing.assert_allclose(train[..., varied].mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(train[..., varied].std(1), 1, atol=1e-4)
    assert not train[..., 2].any() and not valid[..., 2].any()
    np.testing.assert_allclose(valid[0, :, varied], valid[1, :, varied], atol=1e-4)


def test_the_table_has_a_line_a_layer(rows):
    lines = probe_table.make_table(rows, "accuracy").splitlines()
    assert len(lines) == 1 + DEPTHS and len(set(map(len, lines))) == 1
    assert lines[0].split()[:4] == ["layer", "accuracy", "sd", "control"]
    assert len(lines[1].split()) == len(lines[0].split()) - 1  # no sd
    assert "random" not in lines[0]

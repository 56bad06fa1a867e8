# SPDX-License-Identifier: Apache-2.0
"""Pruning: which weights and how many become 0, and how the others compensate."""

from pathlib import Path

import numpy as np
import pytest

from bertjax import UserError
from bertjax.compression import sparse
from bertjax.compression.columns import inverse_factor, sweep
from bertjax.compression.quantize import output_error
from bertjax.compression.sparse import read_pattern

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/compression_golden.npz")
LAYERS = ("blocks", "dead", "wide")
HALF, PAIRS = read_pattern("0.5"), read_pattern("2:4")


def golden(name):
    """Return the weights [in, out] of a layer and the Hessian of its inputs."""
    x = GOLDEN[f"{name}/x"].astype(np.float32)
    return GOLDEN[f"{name}/weights"], x.T @ x / len(x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how, pattern", [("half", HALF), ("pairs", PAIRS)])
def test_sparsegpt_is_the_official_one(name, how, pattern):
    """It equals IST-DASLab/sparsegpt (tests/testdata/make_compression_golden.py)."""
    found, want = sparse.sparsegpt(*golden(name), pattern), GOLDEN[f"{name}/{how}"]
    np.testing.assert_array_equal(found == 0, want == 0)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_the_scale_of_inputs_changes_nothing():
    """Also if some inputs are never active, as they do not count in the damping."""
    weights, hessian = golden("dead")
    found = [sparse.sparsegpt(weights, hessian * size, HALF) for size in (1, 2.0**-20)]
    np.testing.assert_array_equal(*found)


def test_white_inputs_make_sparsegpt_magnitude():
    """With H = I each block of 128 loses its smallest weights; others do not change."""
    weights = np.random.default_rng(0).standard_normal((256, 6)).astype(np.float32)
    found = sparse.sparsegpt(weights, np.eye(256), HALF)
    for part in (slice(0, 128), slice(128, 256)):
        want = sparse.magnitude(weights[part], HALF)
        np.testing.assert_allclose(found[part], want, atol=1e-6)
        assert (found[part] == 0).sum() == 128 * 6 // 2


@pytest.mark.parametrize("share", [0.3, 0.5, 0.71])
@pytest.mark.parametrize("equal", [False, True])
def test_shares_are_exact(share, equal):
    """The share is exact, also if all weights are equal."""
    weights, hessian = golden("wide")
    if equal:
        weights = np.ones_like(weights)
    pattern = read_pattern(str(share))
    rows = len(weights)
    assert (sparse.magnitude(weights, pattern) == 0).sum() == round(share * rows * 8)
    by_output = (sparse.wanda(weights, hessian, pattern) == 0).sum(axis=0)
    assert (by_output == round(share * rows)).all()
    found = sparse.sparsegpt(weights, hessian, pattern) == 0
    for first in range(0, rows, 128):
        part = found[first : first + 128]
        assert part.sum() == round(share * part.size)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_two_of_four(name, method):
    weights, hessian = golden(name)
    given = (weights,) if method == "magnitude" else (weights, hessian)
    found = getattr(sparse, method)(*given, PAIRS)
    kept = (found.T.reshape(-1, 4) != 0).sum(axis=1)
    if name == "dead" and method == "sparsegpt":  # drops weights of dead inputs too
        assert kept.max() == 2 and (kept < 2).mean() < 0.1
    else:
        assert (kept == 2).all()


def test_outputs_change_least_by_sparsegpt():
    weights, hessian = golden("blocks")
    lost = [
        output_error(weights, found, hessian)
        for found in (
            sparse.sparsegpt(weights, hessian, HALF),
            sparse.wanda(weights, hessian, HALF),
            sparse.magnitude(weights, HALF),
        )
    ]
    assert lost[0] < 0.7 * lost[1] < 0.7 * lost[2]


def test_wanda_by_hand():
    """By |w| ||x||, the larger weight is removed if its input is small."""
    weights = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)
    norms = np.diag([1.0, 16.0])  # squares of 1 and 4
    found = sparse.wanda(weights, norms, HALF)
    np.testing.assert_array_equal(found, [[0, 0], [1, 2]])


def test_removing_one_input_is_the_closed_form():
    """Optimal brain surgeon: w - w_0 H^-1[:, 0] / H^-1[0, 0], with any blocks."""
    weights, hessian = golden("blocks")
    weights = weights[:, :3]
    h = hessian.astype(np.float64)
    h += 0.01 * np.diag(h).mean() * np.eye(len(h))
    inverse = np.linalg.inv(h)
    want = weights - np.outer(inverse[:, 0] / inverse[0, 0], weights[0])
    for edges in ([0], [0, 40, 120]):

        def begin(current, first, last):
            return lambda i: np.zeros(3) if i == 0 else current[i]

        found = weights.copy()
        sweep(found, inverse_factor(hessian), begin, edges)
        np.testing.assert_allclose(found, want, atol=1e-5)


def test_no_hessian_that_is_not_one():
    with pytest.raises(np.linalg.LinAlgError):
        inverse_factor(np.full((4, 4), np.nan))


@pytest.mark.parametrize("text", ["0", "1", "half", "4:2", "-0.5", "nan"])
def test_patterns_that_are_none(text):
    with pytest.raises(UserError, match=f"--sparsity={text}: give a share"):
        read_pattern(text)

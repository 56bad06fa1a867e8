# SPDX-License-Identifier: Apache-2.0
"""Quantization: grids, the published GPTQ, AWQ's search."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertjax.compression import quantize
from bertjax.compression.quantize import dequantize, output_error

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/compression_golden.npz")
LAYERS = ("blocks", "dead", "wide")


def golden(name):
    """Return the weights [in, out] of a layer and the Hessian of its inputs."""
    x = GOLDEN[f"{name}/x"].astype(np.float32)
    return GOLDEN[f"{name}/weights"], x.T @ x / len(x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_is_the_official_one(name, bits):
    """It equals IST-DASLab/gptq (tests/testdata/make_compression_golden.py)."""
    found = dequantize(quantize.gptq(*golden(name), bits, 32))
    np.testing.assert_allclose(found, GOLDEN[f"{name}/bits{bits}"], atol=1e-4)


weights_of_any_size = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 9), st.integers(1, 4)),
    elements=st.floats(-4, 4, width=32),
)


@given(weights_of_any_size, st.sampled_from([8, 4, 3]), st.integers(1, 9))
def test_rounding_is_within_half_a_step(weights, bits, group_size):
    """Inside the range it is; at the ends the rounding of zero and scale may add half a
    step. 0 stays 0."""
    q = quantize.rtn(weights, bits, group_size)
    found = dequantize(q)
    assert q.codes.max() < 2**bits
    steps = q.scales.astype(np.float32)[np.arange(len(weights)) // group_size]
    far = np.abs(found - weights)
    # Rounding of the float16 scale, over the range; small scales have steps of 2**-24.
    off_by_scale = 2**bits * (steps * 2.0**-10 + 2.0**-24)
    assert (far <= steps + off_by_scale).all()
    inside = (q.codes > 0) & (q.codes < 2**bits - 1)
    assert (far <= steps * 0.5001)[inside].all()
    assert (found[weights == 0] == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_change_less_than_by_rounding(name):
    weights, hessian = golden(name)
    plain = output_error(weights, dequantize(quantize.rtn(weights, 3, 32)), hessian)
    for method, share in ((quantize.gptq, 0.8), (quantize.awq, 0.9)):
        found = dequantize(method(weights, hessian, 3, 32))
        assert output_error(weights, found, hessian) < share * plain


def test_white_inputs_make_gptq_rounding():
    weights = np.random.default_rng(1).standard_normal((70, 5)).astype(np.float32)
    found, want = (
        quantize.gptq(weights, np.eye(70), 4, 32),
        quantize.rtn(weights, 4, 32),
    )
    for one, other in zip(found[:3], want[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_awq_never_does_worse_than_rounding():
    """Its search includes the power 0, and the share 1 of a range."""
    draw = np.random.default_rng(2)
    weights = draw.standard_normal((64, 4)).astype(np.float32)
    x = draw.standard_normal((9, 64)) + 3  # groups' errors are far from independent
    for hessian in (np.eye(64), x.T @ x / 9):
        found = quantize.awq(weights, hessian, 3, 32), quantize.rtn(weights, 3, 32)
        error, plain = (output_error(weights, dequantize(q), hessian) for q in found)
        assert error < plain
    assert quantize.awq(weights, np.eye(64), 3, 32).inputs is None


@given(weights_of_any_size, st.integers(1, 9), st.booleans())
def test_each_range_is_clipped_where_its_outputs_change_least(weights, size, scaled):
    """Compare with each share of the range, an output and a group at a time."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((20, len(weights))).astype(np.float32)
    hessian = x.T @ x / 20
    q = quantize.rtn(weights, 3, size)
    if scaled:
        factors = draw.uniform(0.5, 2, len(weights)).astype(np.float32)
        q = quantize.rtn(weights * factors[:, None], 3, size)._replace(inputs=factors)
    f = np.ones(len(weights), np.float32) if q.inputs is None else q.inputs
    found = dequantize(quantize.clip_ranges(weights, hessian, q))
    for first in range(0, len(weights), size):
        part = slice(first, first + size)
        for i in range(weights.shape[1]):
            column = (weights * f[:, None])[part, i : i + 1]
            errors = []
            for share in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55):
                scale, zero = quantize.make_grid(column * np.float32(share), 3)
                code = quantize.to_codes(column, scale, zero, 3)
                off = (code - zero) * scale - column
                errors.append(np.sum((x[:, part] @ (off[:, 0] / f[part])) ** 2) / 20)
            off = (found - weights)[part, i]
            error = np.sum((x[:, part] @ off) ** 2) / 20
            assert error == pytest.approx(min(errors), rel=1e-3, abs=1e-6)


def test_output_error_is_that_of_the_outputs():
    draw = np.random.default_rng(3)
    x, w, v = (draw.standard_normal(s) for s in ((50, 6), (6, 4), (6, 4)))
    want = ((x @ w - x @ v) ** 2).sum() / 50
    assert output_error(w, v, x.T @ x / 50) == pytest.approx(want, rel=1e-5)

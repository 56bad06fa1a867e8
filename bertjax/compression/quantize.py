# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8, 4 or 3 bits: GPTQ, AWQ's scaling, rounding to nearest.

These are pure functions of weights [in, out] and of the Hessian [in, in] of their
inputs. Each output has its own grid for every group of inputs: scale (q - zero), q =
0 ... 2^bits - 1.
"""

from typing import NamedTuple

import numpy as np

from bertjax.compression.columns import (
    BLOCK,
    Round,
    inverse_factor,
    sweep,
    without_dead,
)

ALPHAS = 20  # the number of exponents of the inputs' size in AWQ's search
SHARES = np.arange(20, 10, -1, dtype=np.float32) / 20  # of a range, in its clipping


class Quantized(NamedTuple):
    """A quantized matrix.

    codes: u8 [in, out]; scales: f16 [groups, out]; zeros: u8 [groups, out]; inputs: f32
    [in], the factors by which the weights of each input were multiplied before
    rounding, or None; group_size, bits: ints.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    inputs: np.ndarray | None
    group_size: int
    bits: int


def dequantize(q: Quantized) -> np.ndarray:
    """Return the weights scale (q - zero) / inputs, f32 [in, out].

    The result has the same bits on every machine, because each operation is a basic one
    of IEEE 754.
    """
    weights = q.codes.astype(np.float32)
    for group, (scale, zero) in enumerate(zip(q.scales, q.zeros, strict=True)):
        part = weights[group * q.group_size : (group + 1) * q.group_size]
        part -= zero.astype(np.float32)
        part *= scale.astype(np.float32)
    if q.inputs is not None:
        weights /= q.inputs[:, None]
    return weights


def make_grid(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and zeros, f32 [out] each, of a group [n, out].

    The range of the weights, extended to include 0, is divided into 2^bits - 1 steps
    (IST-DASLab/gptq, quant.py, asymmetric). Scales are rounded to float16, as they are
    stored.
    """
    levels = 2**bits - 1
    low = np.minimum(weights.min(axis=0), 0)
    high = np.maximum(weights.max(axis=0), 0)
    empty = (low == 0) & (high == 0)
    low, high = np.where(empty, -1, low), np.where(empty, 1, high)
    least = np.finfo(np.float16).smallest_subnormal  # to avoid division by 0
    scales = np.clip((high - low) / levels, least, np.finfo(np.float16).max)
    scales = scales.astype(np.float16).astype(np.float32)
    return scales, np.clip(np.round(-low / scales), 0, levels)


def to_codes(
    weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int
) -> np.ndarray:
    """Return the nearest codes of a grid: whole numbers, f32, 0 ... 2^bits - 1."""
    return np.clip(np.round(weights / scales) + zeros, 0, 2**bits - 1)


def rtn(weights: np.ndarray, bits: int, group_size: int) -> Quantized:
    """Round each weight to the nearest value of its group's grid."""
    codes = np.empty(weights.shape, np.uint8)
    scales, zeros = [], []
    for first in range(0, len(weights), group_size):
        part = np.asarray(weights[first : first + group_size], np.float32)
        scale, zero = make_grid(part, bits)
        codes[first : first + group_size] = to_codes(part, scale, zero, bits)
        scales.append(scale.astype(np.float16))
        zeros.append(zero.astype(np.uint8))
    return Quantized(codes, np.stack(scales), np.stack(zeros), None, group_size, bits)


def gptq(
    weights: np.ndarray, hessian: np.ndarray, bits: int, group_size: int
) -> Quantized:
    """Round input by input, and compensate for the errors with later inputs' weights.

    (GPTQ: Frantar et al. 2023, arXiv 2210.17323, algorithm 1.) A group's grid is
    computed from its weights when the sweep arrives there. (The official code updates
    later weights only every 128 inputs, so that with smaller groups most grids are
    computed from outdated weights.)
    """
    current, factor = without_dead(weights, hessian), inverse_factor(hessian)
    n = len(current)
    codes = np.empty(current.shape, np.uint8)
    groups = -(-n // group_size)
    scales = np.empty((groups, current.shape[1]), np.float32)
    zeros = np.empty_like(scales)

    def begin(current: np.ndarray, first: int, last: int) -> Round:
        group = first // group_size
        if first % group_size == 0:
            part = current[first : first + group_size]
            scales[group], zeros[group] = make_grid(part, bits)
        grid = scales[group], zeros[group]

        def round_input(i: int) -> np.ndarray:
            code = to_codes(current[i], *grid, bits)
            codes[i] = code
            return (code - grid[1]) * grid[0]

        return round_input

    # A block must not contain inputs of two groups.
    edges = sorted({*range(0, n, BLOCK), *range(0, n, group_size)})
    sweep(current, factor, begin, edges)
    halves, whole = scales.astype(np.float16), zeros.astype(np.uint8)
    return Quantized(codes, halves, whole, None, group_size, bits)


def awq(
    weights: np.ndarray, hessian: np.ndarray, bits: int, group_size: int
) -> Quantized:
    """Scale the weights of each input by a power of the input's size before rounding.

    The exponent is the one with the smallest error (AWQ: Lin et al. 2024, arXiv
    2306.00978, section 3.2). Then weights are clipped (`clip_ranges`), unless that
    increases the error of the whole matrix. There are differences from AWQ: the size of
    an input is its root mean square over tokens, not the mean of |x|; errors are
    tr(E^T H E) of the outputs, while AWQ runs the layer; and every matrix has its own
    factors, which are stored with it, while AWQ merges them into the layer that
    computes the inputs.
    """
    weights = np.asarray(weights, np.float32)
    size = np.sqrt(np.diag(hessian)).astype(np.float32)
    size = np.maximum(size, 1e-4 * max(float(size.max()), 1e-30))
    best, lowest = rtn(weights, bits, group_size), np.inf
    for power in range(ALPHAS):
        factors = size ** np.float32(power / ALPHAS)
        factors /= np.sqrt(factors.max() * factors.min())
        tried = rtn(weights * factors[:, None], bits, group_size)
        tried = tried._replace(inputs=factors) if power else best
        error = output_error(weights, dequantize(tried), hessian)
        if error < lowest:
            best, lowest = tried, error
    clipped = clip_ranges(weights, hessian, best)
    error = output_error(weights, dequantize(clipped), hessian)
    return clipped if error < lowest else best


def clip_ranges(weights: np.ndarray, hessian: np.ndarray, q: Quantized) -> Quantized:
    """Shrink each group's range, per output, to the share with the smallest error.

    weights: f32 [in, out]; q: its inputs, group_size and bits stay, the rest is new.
    The error is that of the outputs if all other groups were exact. A smaller range
    has finer steps, and clips the weights beyond it. (As in mit-han-lab/llm-awq,
    auto_clip.py, which shrinks a symmetric range and leaves out queries and keys.)
    """
    scaled = weights if q.inputs is None else weights * q.inputs[:, None]
    codes, scales, zeros = q.codes.copy(), q.scales.copy(), q.zeros.copy()
    for group in range(len(scales)):
        part = slice(group * q.group_size, (group + 1) * q.group_size)
        h = np.asarray(hessian[part, part], np.float32)
        if q.inputs is not None:  # the inputs of scaled weights are divided by these
            h = h / np.outer(q.inputs[part], q.inputs[part])
        lowest = np.full(weights.shape[1], np.inf, np.float32)
        for share in SHARES:
            grid = make_grid(scaled[part] * share, q.bits)
            code = to_codes(scaled[part], *grid, q.bits)
            off = (code - grid[1]) * grid[0] - scaled[part]
            error = np.einsum("io,io->o", off, h @ off)
            better = error < lowest
            lowest[better] = error[better]
            codes[part, better] = code[:, better]
            scales[group, better], zeros[group, better] = (g[better] for g in grid)
    return q._replace(codes=codes, scales=scales, zeros=zeros)


def output_error(
    weights: np.ndarray, changed: np.ndarray, hessian: np.ndarray
) -> float:
    """Return the mean over tokens of the squared error of all outputs, tr(E^T H E)."""
    off = np.asarray(changed, np.float32) - np.asarray(weights, np.float32)
    return float(np.vdot(off, np.asarray(hessian, np.float32) @ off))

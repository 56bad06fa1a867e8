# SPDX-License-Identifier: Apache-2.0
"""Quantisation to 8, 4 or 3 bits: GPTQ, AWQ's scaling, rounding to the nearest.

Pure functions of weights [in, out] and of the Hessian [in, in] of their inputs. Each
output has a grid of its own for every group of inputs: scale (q - zero), q = 0 ...
2^bits - 1.
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

ALPHAS = 20  # powers of the inputs' size that AWQ's search tries


class Quantized(NamedTuple):
    """A quantised matrix.

    codes: u8 [in, out]; scales: f16 [groups, out]; zeros: u8 [groups, out]; inputs: f32
    [in], what the weights of each input were multiplied by before they were rounded, or
    None; group_size, bits: ints.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    inputs: np.ndarray | None
    group_size: int
    bits: int


def dequantize(q: Quantized) -> np.ndarray:
    """Return the weights that are meant: scale (q - zero) / inputs, f32 [in, out].

    The same bits wherever it is computed: each operation is one of IEEE 754's.
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
    """Return the scales, f32, and zeros, f32, [out] each, of a group [n, out].

    The range of the weights, made to hold 0, in 2^bits - 1 steps (IST-DASLab/gptq,
    quant.py, asymmetric); scales are rounded to float16, as they are stored.
    """
    levels = 2**bits - 1
    low = np.minimum(weights.min(axis=0), 0)
    high = np.maximum(weights.max(axis=0), 0)
    empty = (low == 0) & (high == 0)
    low, high = np.where(empty, -1, low), np.where(empty, 1, high)
    least = np.finfo(np.float16).smallest_subnormal  # 0 would divide
    scales = np.clip((high - low) / levels, least, np.finfo(np.float16).max)
    scales = scales.astype(np.float16).astype(np.float32)
    return scales, np.clip(np.round(-low / scales), 0, levels)


def to_codes(
    weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int
) -> np.ndarray:
    """Return the nearest steps of a grid: whole numbers, f32, 0 ... 2^bits - 1."""
    return np.clip(np.round(weights / scales) + zeros, 0, 2**bits - 1)


def rtn(weights: np.ndarray, bits: int, group_size: int) -> Quantized:
    """Round each weight to the nearest step of its group's grid."""
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
    """Round input by input, and let the later ones make good for the errors (Frantar et
    al. 2023, arXiv 2210.17323, algorithm 1).

    A group's grid is that of its weights when the sweep arrives there. (The official
    code brings them up to date only each 128 inputs, so that with smaller groups most
    grids are of older weights.)
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

    # No block has inputs of two groups.
    edges = sorted({*range(0, n, BLOCK), *range(0, n, group_size)})
    sweep(current, factor, begin, edges)
    halves, whole = scales.astype(np.float16), zeros.astype(np.uint8)
    return Quantized(codes, halves, whole, None, group_size, bits)


def awq(
    weights: np.ndarray, hessian: np.ndarray, bits: int, group_size: int
) -> Quantized:
    """Multiply the weights of inputs by their size to some power before rounding (Lin
    et al. 2024, arXiv 2306.00978, section 3.2), the power that leaves least error.

    The size of an input is its root mean square over tokens, where AWQ has the mean of
    |x|; the error is that of the outputs, tr(E^T H E), where AWQ runs the layer; and
    every matrix has factors of its own, which are stored with it, where AWQ puts them
    into what computes the inputs. Weights are not clipped.
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
    return best


def output_error(
    weights: np.ndarray, changed: np.ndarray, hessian: np.ndarray
) -> float:
    """Return the mean over tokens of the squared change of all outputs, tr(E^T H E)."""
    off = np.asarray(changed, np.float32) - np.asarray(weights, np.float32)
    return float(np.vdot(off, np.asarray(hessian, np.float32) @ off))

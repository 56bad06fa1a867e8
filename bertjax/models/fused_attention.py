# SPDX-License-Identifier: Apache-2.0
"""Attention of short rows as one TPU kernel, which never stores scores or dropout.

A masked LM's rows are short (128, 512): all keys of a row fit into a core's vector
memory. So the softmax is computed at once, and the backward pass recomputes it from
queries, keys and values. Heads stay side by side as the projections write them, [B, L,
H K]: 128 lanes hold 128 / K heads. The kernel separates them by zeroing the lanes of
the other heads, at no cost to a matrix unit of 128 x 128. So nothing is transposed or
copied, which at 128 tokens costs more than the attention itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.models.attention_mask import is_visible
from bertjax.models.layers import dot_f32, mix

LANES = 128
# The longest rows per device kind: the scores of a head must fit into vector memory.
# LONGEST_ELSEWHERE is for a v4 with its 16 MiB, and for a CPU that interprets.
LONGEST = dict.fromkeys(
    ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x"), 1024
)
LONGEST_ELSEWHERE = 512
NOTHING = float(np.finfo(np.float32).min)


def longest(device_kind: str) -> int:
    """Return the longest rows that the kernel supports on such a device."""
    return LONGEST.get(device_kind, LONGEST_ELSEWHERE)


def fits(length: int, heads: int, width: int, device_kind: str) -> bool:
    """Return whether the kernel supports such rows and heads of this width."""
    group = max(LANES, width)
    return (
        length % LANES == 0
        and length <= longest(device_kind)
        and (LANES % width == 0 or width % LANES == 0)
        and heads * width % group == 0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9, 10, 11))
def fused_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    queries: jax.Array | None,
    steps: jax.Array | None,
    seeds: jax.Array,
    heads: int,
    rate: float,
    window: int,
    causal: bool,
    interpret: bool,
) -> jax.Array:
    """Attend within each row; the arrays are the part of one device.

    q, k, v: [B, L, H K] with `heads` = H on this device. keys: i32 [B, L]; a key with 0
    is hidden. queries: None, or i32 [B, L], segments: a query attends only to keys with
    its number. steps: None, or i32 [B, L] as in attention_mask.is_visible. seeds: u32
    [5], the dropout key (two numbers), the first row and the first head of this device,
    and the number of heads on all devices. rate: of dropout. window: 0, or a query
    attends to keys at most window // 2 away, and to itself. causal: a query attends to
    no key after it; all scores are computed nevertheless, because a row is one block.
    Returns [B, L, H K].
    """
    inputs = q, k, v, keys, queries, steps, seeds
    return _forward_rule(*inputs, heads, rate, window, causal, interpret)[0]


def _forward_rule(q, k, v, *inputs):
    (y,) = _call(_forward, (q, k, v), 1, *inputs)
    return y, (q, k, v, *inputs[:4])


def _backward_rule(heads, rate, window, causal, interpret, saved, dy):
    q, k, v, *others = saved
    inputs = *others, heads, rate, window, causal, interpret
    return *_call(_backward, (q, k, v, dy), 3, *inputs), None, None, None, None


fused_attention.defvjp(_forward_rule, _backward_rule)


def _call(
    attend, arrays, results, keys, queries, steps, seeds, heads, rate, window, causal,
    interpret,
):  # fmt: skip
    """Run a kernel over rows and groups of heads; return `results` arrays like q."""
    b, length, d = arrays[0].shape
    width = d // heads
    group = max(LANES, width)
    # Groups of heads per grid step: few enough that the step's blocks, which the
    # pipeline holds twice, stay small.
    most = max(1, 2**18 // (length * group))
    groups = d // group
    a_step = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
    wide = pl.BlockSpec((1, length, a_step * group), lambda i, j: (i, 0, j))
    across = pl.BlockSpec((1, 1, length), lambda i, j: (i, 0, 0))
    down = pl.BlockSpec((1, length, 1), lambda i, j: (i, 0, 0))
    specs = [pl.BlockSpec(memory_space=pltpu.SMEM), across]
    given = [seeds.astype(jnp.int32), keys[:, None, :]]
    if queries is not None:
        specs.append(down)
        given.append(queries[:, :, None])
    if steps is not None:
        specs += [across, down]
        given += [steps[:, None, :], steps[:, :, None]]
    size = arrays[0].dtype.itemsize
    return pl.pallas_call(
        functools.partial(
            _for_groups,
            attend,
            width=width,
            packed=queries is not None,
            stepped=steps is not None,
            groups=a_step,
            rate=rate,
            window=window,
            causal=causal,
            results=results,
        ),
        grid=(b, groups // a_step),
        in_specs=[*specs, *[wide] * len(arrays)],
        out_specs=[wide] * results,
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * results,
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=(4 if results == 1 else 10) * b * length * length * d,
            transcendentals=b * length * length * heads,
            bytes_accessed=(len(arrays) + results) * b * length * d * size,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=48 * 2**20
        ),
        name="fused_attention" if results == 1 else "fused_attention_backward",
    )(*given, *arrays)


class _Row:
    """What the heads of a row share: mask, dropout key and the score computation."""

    def __init__(self, seeds, keys, queries, steps, width, rate, window, causal):
        self.seeds, self.width, self.rate = seeds, width, rate
        self.each = max(1, LANES // width)  # heads per group
        length = keys.shape[-1]
        visible = keys[0] if queries is None else queries[0] == keys[0]
        visible = visible > 0 if queries is None else visible
        if steps is not None:
            visible = visible & is_visible(query=steps[1][0], key=steps[0][0])
        self.lane = jax.lax.broadcasted_iota(jnp.int32, (length, max(LANES, width)), 1)
        self.at_q = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
        self.at_k = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
        if causal:
            visible = visible & (self.at_k <= self.at_q)
        if window:
            away = jnp.abs(self.at_q - self.at_k)
            visible = (visible & (away <= window // 2)) | (away == 0)
        self.visible = visible
        self.row, self.step = pl.program_id(0), pl.program_id(1)

    def own(self, x: jax.Array, head: int) -> jax.Array:
        """Zero the lanes of other heads."""
        if self.width >= LANES:
            return x
        return jnp.where(self.lane // self.width == head, x, 0).astype(x.dtype)

    def weights(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return exp(scores - their maximum) f32 [L, L], and its sum [L, 1]."""
        scores = dot_f32(q, k, 1, 1) * self.width**-0.5
        scores = jnp.where(self.visible, scores, NOTHING)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        return weights, jnp.sum(weights, axis=-1, keepdims=True)

    def first(self, here: int) -> jax.Array:
        """Return the index of the first of the `here` heads of this grid step."""
        return self.seeds[3] + self.step * here

    def is_kept(self, head: jax.Array) -> jax.Array:
        """Return which weights are kept, as layers.dropout does on [B, H, L, L]."""
        length = self.at_q.shape[0]
        row = self.row + self.seeds[2]
        row = (row * self.seeds[4] + head) * length + self.at_q[:, :1]
        key = self.seeds[0].astype(jnp.uint32), self.seeds[1].astype(jnp.uint32)
        row = mix(row.astype(jnp.uint32) ^ key[0])
        column = mix(self.at_k[:1].astype(jnp.uint32) + key[1])
        bits = mix((row + key[1]) ^ column)
        return bits >= np.uint32(round(self.rate * 2**32))


def _for_groups(
    attend, *refs, width, packed, stepped, groups, rate, window, causal, results
):
    """Run attend(row, arrays, first head) -> results for each group of heads of a row.

    It is a loop because unrolled code compiles slowly.
    """
    seeds, keys, *rest = refs
    queries = rest.pop(0)[...] if packed else None
    steps = (rest.pop(0)[...], rest.pop(0)[...]) if stepped else None
    group = max(LANES, width)
    row = _Row(seeds, keys[...], queries, steps, width, rate, window, causal)

    def one(g: jax.Array, _: None) -> None:
        lanes = pl.ds(pl.multiple_of(g * group, group), group)
        arrays = [ref[0, :, lanes] for ref in rest[:-results]]
        first = row.first(groups * row.each) + g * row.each
        values = attend(row, arrays, first)
        for ref, value in zip(rest[-results:], values, strict=True):
            ref[0, :, lanes] = value.astype(ref.dtype)

    jax.lax.fori_loop(0, groups, one, None)


def _forward(row, arrays, first):
    q, k, v = arrays
    y = 0.0
    for h in range(row.each):
        weights, total = row.weights(row.own(q, h), k)
        if row.rate:
            weights = jnp.where(
                row.is_kept(first + h), weights * (1 / (1 - row.rate)), 0
            )
        y = y + row.own(dot_f32(weights.astype(v.dtype), v, 1, 0) / total, h)
    return [y]


def _backward(row, arrays, first):
    q, k, v, dy = arrays
    sums = [0.0, 0.0, 0.0]
    for h in range(row.each):
        own_q, own_dy = row.own(q, h), row.own(dy, h)
        weights, total = row.weights(own_q, k)
        weights = weights / total
        dropped, d_weights = weights, dot_f32(own_dy, v, 1, 1)
        if row.rate:
            scale = jnp.where(row.is_kept(first + h), 1 / (1 - row.rate), 0.0)
            dropped, d_weights = weights * scale, d_weights * scale
        inner = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
        d_scores = weights * (d_weights - inner) * row.width**-0.5
        d_scores = d_scores.astype(q.dtype)
        parts = (
            row.own(dot_f32(d_scores, k, 1, 0), h),
            dot_f32(d_scores, own_q, 0, 0),
            dot_f32(dropped.astype(dy.dtype), own_dy, 0, 0),
        )
        sums = [a + b for a, b in zip(sums, parts, strict=True)]
    return sums

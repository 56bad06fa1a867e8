# SPDX-License-Identifier: Apache-2.0
"""What encoder and heads share: initialization, dense layers, norms, dropout."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from bertjax.parallel.sharding import keep_gradient

Params = dict[str, Any]
Rng = jax.Array | None  # a key of jax.random; None: an evaluation
# A leaf's shape and initial value: a number fills it, a key of CUTS draws it.
Spec = tuple[tuple[int, ...], float | str]
# Where a normal is truncated, in standard deviations: "normal" at 2, as TensorFlow's
# truncated_normal, which leaves 0.88 of the deviation; "uncut" nowhere.
CUTS = {"normal": 2.0, "uncut": math.inf}


def draw(rng: jax.Array, specs: Mapping[str, Any], stddev: float) -> Params:
    """Create f32 parameters from a nested dict of (shape, key of CUTS | fill value).

    A "normal" is truncated at two standard deviations, as in google-research/bert. A
    number is a function of the key, its leaf and its index in the leaf, so each device
    creates only its own part, and the parameters are the same on any mesh.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.key_data(jax.random.split(rng, len(leaves)))
    return jax.tree.unflatten(
        tree,
        [
            stddev * normal(key, shape, CUTS[how])
            if how in CUTS
            else jnp.full(shape, how, jnp.float32)
            for (shape, how), key in zip(leaves, keys, strict=True)
        ],
    )


# jit compiles this as one program when a model is initialized outside of jit: running
# it op by op takes far longer.
@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def normal(key: jax.Array, shape: tuple[int, ...], cut: float) -> jax.Array:
    """Draw f32 [*shape] from a normal truncated at -cut and cut.

    This is inverse transform sampling. The uniform number is the middle of one of 2^23
    bins, so it is never 0 or 1.
    """
    uniform = ((random_bits(key, shape) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    edge = math.erf(cut / math.sqrt(2.0))
    return math.sqrt(2.0) * jax.lax.erf_inv((2 * uniform - 1) * edge)


def linear_specs(
    into: tuple[int, ...], out: tuple[int, ...], bias: bool = True
) -> dict[str, Spec]:
    """Describe a dense layer: kernel [*into, *out] and bias [*out]."""
    kernel = {"kernel": ((*into, *out), "normal")}
    return {**kernel, "bias": (out, 0.0)} if bias else kernel


def norm_specs(width: int, bias: bool = True) -> dict[str, Spec]:
    """Describe a norm: scale and bias [width]."""
    scale = {"scale": ((width,), 1.0)}
    return {**scale, "bias": ((width,), 0.0)} if bias else scale


def stack_specs(specs: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Add a leading axis of size `layers` to every leaf."""
    return jax.tree.map(
        lambda s: ((layers, *s[0]), s[1]), specs, is_leaf=lambda x: isinstance(x, tuple)
    )


def linear(params: Params, x: jax.Array, axes: str = "") -> jax.Array:
    """Return x @ kernel + bias (if there is one) for x [..., in], in x's dtype.

    Kernels of three axes ([D, H, K] or [H, K, D]) are reshaped to [in, out], because
    every backend is fastest at plain products of matrices. axes: the kernel's logical
    axes, if its gradient is to be sharded like the kernel.
    """
    bias = params["bias"].reshape(-1) if "bias" in params else None
    flat = x.reshape(-1, x.shape[-1])
    y = affine(flat, params["kernel"].astype(x.dtype), bias, axes)
    return y.reshape(*x.shape[:-1], -1)


def dot_f32(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    """Contract axis i of a with axis j of b, both of any dtype; sums and result f32."""
    axes = (((i,), (j,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_f32(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
    """Return the product of x [..., D] with a matrix of x's dtype, f32 [..., V].

    axis: the axis of D in kernel: 0 for [D, V], 1 for [V, D]. The gradient of the
    result is rounded to x's dtype before the two products of the backward pass, as a
    TPU does with operands of products in any case. Then half as many bytes are stored,
    and a CPU does not multiply in f32.
    """
    return dot_f32(x, kernel, x.ndim - 1, axis)


def _product_f32_backward(axis, saved, dy):
    x, kernel = saved
    dy = dy.astype(x.dtype)
    dx = jax.lax.dot_general(dy, kernel, (((dy.ndim - 1,), (1 - axis,)), ((), ())))
    dw = sum_products(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
    return dx, (dw if axis == 0 else dw.T).astype(kernel.dtype)


product_f32.defvjp(lambda *args: (product_f32(*args), args[:2]), _product_f32_backward)


@jax.custom_vjp
def product_f32_transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the transpose of product_f32(x, kernel, 1), f32 [V, T], for x [T, D].

    Its gradients are those of product_f32.
    """
    return dot_f32(kernel, x, 1, 1)


def _product_f32_transposed_backward(saved, dy):
    x, kernel = saved
    dy = dy.astype(x.dtype)
    rows = store_rows(dy.T) if dy.dtype == jnp.bfloat16 else dy.T
    return rows @ kernel, dot_f32(dy, x, 1, 0).astype(kernel.dtype)


product_f32_transposed.defvjp(
    lambda *args: (product_f32_transposed(*args), args),
    _product_f32_transposed_backward,
)


def sum_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x^T y, f32 [M, N], for x [T, M] and y [T, N] of one dtype."""
    if x.dtype != jnp.bfloat16:
        return dot_f32(x, y, 0, 0)
    return store_rows(dot_f32(store_rows(x.T), y, 1, 0))


def store_rows(x: jax.Array) -> jax.Array:
    """Return x; on a CPU with its last axis innermost in memory, even if transposed.

    XLA's CPU compiler uses the processor's instructions for products of bfloat16 only
    if the summed axis of the left operand is innermost, and so is the result's last
    one. Otherwise it multiplies in f32, which takes five times as long with AMX.
    """
    rows = Layout(tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, cpu=lambda x: with_layout_constraint(x, rows), default=lambda x: x
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def affine(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, axes: str
) -> jax.Array:
    """Return x @ kernel + bias; gradients of both are summed over tokens in f32.

    The sums over devices, which the compiler merges with them, are in f32 too. The
    kernel's gradient is then rounded to its dtype once.
    """
    y = x @ kernel.reshape(x.shape[-1], -1)
    return y if bias is None else y + bias.astype(x.dtype)


def _affine_backward(axes, saved, dy):
    x, kernel, bias = saved
    flat = kernel.reshape(x.shape[-1], -1)
    dx = jax.lax.dot_general(dy, flat, (((1,), (1,)), ((), ())))
    dw = sum_products(x, dy)
    # Sum a [D, H, K] kernel's gradient over devices while it is a matrix, so that each
    # device sums its own rows. With three axes the TPU compiler sums all of it on every
    # device, and in bfloat16.
    flat_axes = axes.removesuffix(" head")
    dw = keep_gradient(dw, flat_axes) if flat_axes != axes else dw
    dw = dw.reshape(kernel.shape)
    dw = keep_gradient(dw, axes, summed=flat_axes == axes) if axes else dw
    db = None
    if bias is not None:
        db = jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype)
    return dx, dw.astype(kernel.dtype), db


affine.defvjp(lambda *args: (affine(*args), args[:3]), _affine_backward)


def count_up(size: Any) -> Any:
    """Return 0, 1, ..., size - 1: a numpy array, or a traced one for a symbolic size.

    numpy cannot count to a symbolic size (jax.export).
    """
    return np.arange(size) if isinstance(size, int) else jnp.arange(size)


@jax.custom_vjp
def reverse_gradient(x: jax.Array, alpha: jax.Array) -> jax.Array:
    """Return x, and multiply its gradient by -alpha.

    x [B, ...]; alpha: f32 [] or [B], one per row, which gets no gradient. (Ganin and
    Lempitsky 2015, arXiv 1409.7495, section 3.)
    """
    return x


def _reverse_backward(alpha: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = alpha.reshape(*alpha.shape, *(1,) * (dy.ndim - alpha.ndim))
    return (-scale * dy).astype(dy.dtype), jnp.zeros_like(alpha)


reverse_gradient.defvjp(lambda x, alpha: (x, alpha), _reverse_backward)


def take_at(x: jax.Array, at: jax.Array) -> jax.Array:
    """Gather positions `at` i32 [B, P] of x [B, L, ...]: [B, P, ...]."""
    at = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, at, axis=1, mode="clip")


@jax.custom_vjp
def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up rows of a table [V, E] by ids [...]: f32 [..., E].

    The gradient of a row is summed over its tokens in f32: a frequent token occurs
    thousands of times, too often for sums in bfloat16.
    """
    return jnp.take(table, ids, axis=0, mode="clip").astype(jnp.float32)


def _lookup_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    sums = jnp.zeros(table.shape, jnp.float32).at[ids].add(dy, mode="clip")
    return sums.astype(table.dtype), None


lookup.defvjp(lambda *args: (lookup(*args), args), _lookup_backward)


def layer_norm(
    params: Params, x: jax.Array, eps: float, kind: str = "layer_norm"
) -> jax.Array:
    """Normalize the last axis; statistics in f32, result in the dtype of x.

    "rms_norm" does not subtract the mean (Zhang & Sennrich 2019, equation 4). params
    may lack the bias, or be {} for a norm without a scale.
    """
    y = x.astype(jnp.float32)
    if kind == "layer_norm":
        mean = jnp.mean(y, axis=-1, keepdims=True)
        y = y - mean
    var = jnp.mean(y * y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(var + eps)
    if "scale" in params:
        y = y * params["scale"]
    if "bias" in params:
        y = y + params["bias"]
    return y.astype(x.dtype)


def activate(x: jax.Array, kind: str) -> jax.Array:
    """Apply an activation of EncoderConfig; "gelu" uses the error function.

    erf is computed in f32. The erfc of jax.nn.gelu is more exact in the tail, where it
    makes no difference to any sum, but takes twice the time and stores one array more
    for the backward pass.
    """
    if kind in ("gelu_tanh", "gelu_new", "gelu_pytorch_tanh"):
        return jax.nn.gelu(x, approximate=True)
    if kind != "gelu":
        known = {"relu": jax.nn.relu, "silu": jax.nn.silu, "relu2": relu_squared}
        return known[kind](x)
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def relu_squared(x: jax.Array) -> jax.Array:
    """Return max(x, 0)^2 (So et al. 2021, arXiv 2109.08668, section 3)."""
    return jnp.square(jax.nn.relu(x))


def dropout(
    x: jax.Array, rate: float, rng: Rng, rows: jax.Array | None = None
) -> jax.Array:
    """Zero elements of x at `rate` and scale the rest; without rng return x.

    The rate is exact to 2^-32. Whether an element is dropped is a hash of the key and
    of its index in the whole array, however that is sharded. So it costs a dozen
    integer operations, is fused with the operations around it and need not be stored
    for the backward pass. jax.random's threefry costs ten times as many operations, and
    its rbg has to be stored. rows: if x was gathered from a larger array, the numbers
    of its rows there.
    """
    if rng is None or rate == 0.0:
        return x
    drop = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    keep = random_bits(jax.random.key_data(rng), x.shape, rows) >= drop
    # A bfloat16 constant would scale by 1.109375 at a rate of 0.1, not by 1.1111.
    scaled = x.astype(jnp.float32) * (1 / (1 - rate))
    return jnp.where(keep, scaled, 0).astype(x.dtype)


def fold_in(rng: Rng, index: int | jax.Array) -> Rng:
    """Derive a key for a layer; None stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def random_bits(
    key: jax.Array, shape: tuple[int, ...], rows: jax.Array | None = None
) -> jax.Array:
    """Hash a key, u32 [2], and each index to u32 [*shape]; not for cryptography.

    Dropout and initial parameters come from this hash, whatever the mesh. Derived keys
    and the tokens that ELECTRA samples come from jax.random's threefry; nothing else
    draws random numbers on a device. Rows (all axes but the last) and columns are
    numbered separately, so that arrays of more than 2^32 elements do not repeat. The
    mixing is the final step of MurmurHash3 (Appleby 2011, fmix32), once for rows and
    once for elements.
    """
    row = mix((number_rows(shape) if rows is None else rows) ^ key[0])
    column = jax.lax.broadcasted_iota(jnp.uint32, (shape[-1],), 0)
    return mix((row + key[-1]) ^ mix(column + key[-1]))


def number_rows(shape: tuple[int, ...]) -> jax.Array:
    """Number the rows (all axes but the last) of an array: u32 [*shape[:-1], 1]."""
    row = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape) - 1)):
        at = jax.lax.broadcasted_iota(jnp.uint32, row.shape, axis)
        row, stride = row + at * np.uint32(stride), stride * shape[axis]
    return row


def mix(x: jax.Array) -> jax.Array:
    """Mix the bits of u32 numbers, one to one."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

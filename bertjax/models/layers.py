# SPDX-License-Identifier: Apache-2.0
"""The pieces that encoder and heads share: initialisation, linear, norm, dropout."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
# What a leaf begins as: a number fills it; "normal" draws it (truncated normal).
Spec = tuple[tuple[int, ...], float | str]


def draw(rng: jax.Array, specs: Mapping[str, Any], stddev: float) -> Params:
    """Make f32 parameters from a nested dict of (shape, "normal" | fill value).

    Normals are cut at two standard deviations, as TensorFlow's truncated_normal of
    google-research/bert does. One draw serves all leaves and is sliced: compiling a
    dozen draws takes seconds, one takes a fifth of a second.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, tuple))
    total = sum(math.prod(shape) for shape, how in leaves if how == "normal")
    noise = stddev * jax.random.truncated_normal(rng, -2.0, 2.0, (total,))
    out, at = [], 0
    for shape, how in leaves:
        if how == "normal":
            size = math.prod(shape)
            out.append(noise[at : at + size].reshape(shape))
            at += size
        else:
            out.append(jnp.full(shape, how, jnp.float32))
    return jax.tree.unflatten(tree, out)


def linear_specs(
    *, into: tuple[int, ...], out: tuple[int, ...], bias: bool = True
) -> dict[str, Spec]:
    """Describe a dense layer: kernel [*into, *out] and bias [*out]."""
    kernel = {"kernel": ((*into, *out), "normal")}
    return {**kernel, "bias": (out, 0.0)} if bias else kernel


def norm_specs(width: int, bias: bool = True) -> dict[str, Spec]:
    """Describe a norm: scale and bias [width]."""
    scale = {"scale": ((width,), 1.0)}
    return {**scale, "bias": ((width,), 0.0)} if bias else scale


def stack_specs(specs: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Put a leading axis of `layers` on every leaf."""
    return jax.tree.map(
        lambda s: ((layers, *s[0]), s[1]), specs, is_leaf=lambda x: isinstance(x, tuple)
    )


def linear(params: Params, x: jax.Array) -> jax.Array:
    """Return x @ kernel + bias (where there is one) for x [T, in], in x's dtype.

    Kernels of more axes ([D, H, K] or [H, K, D]) are taken as [in, out]: a plain
    product of two axes is what every backend does best.
    """
    kernel = params["kernel"].astype(x.dtype).reshape(x.shape[-1], -1)
    y = x @ kernel
    return y + params["bias"].astype(x.dtype).reshape(-1) if "bias" in params else y


def layer_norm(
    params: Params, x: jax.Array, eps: float, kind: str = "layer_norm"
) -> jax.Array:
    """Normalise the last axis; statistics in f32, result in the dtype of x.

    "rms_norm" leaves the mean where it is (Zhang & Sennrich 2019, equation 4).
    """
    y = x.astype(jnp.float32)
    if kind == "layer_norm":
        mean = jnp.mean(y, axis=-1, keepdims=True)
        y = y - mean
    var = jnp.mean(y * y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(var + eps) * params["scale"]
    if "bias" in params:
        y = y + params["bias"]
    return y.astype(x.dtype)


def activate(x: jax.Array, kind: str) -> jax.Array:
    """Apply an activation: "gelu" by the error function; see EncoderConfig.

    erf in f32: jax.nn.gelu's erfc, exact in a tail that no sum can see, costs twice
    the time and keeps one array more for the backward pass.
    """
    if kind in ("gelu_tanh", "gelu_new", "gelu_pytorch_tanh"):
        return jax.nn.gelu(x, approximate=True)
    if kind != "gelu":
        return {"relu": jax.nn.relu, "silu": jax.nn.silu}[kind](x)
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Zero elements of x at `rate` and scale the rest; nothing at all without rng.

    16 random bits decide an element, so a 32-bit draw serves two, at half the cost;
    the rate is met to 1/65536 and the scale is that of the rate as met.
    """
    if rng is None or rate == 0.0:
        return x
    drop = min(round(rate * 65536), 65535)
    half = (*x.shape[:-1], (x.shape[-1] + 1) // 2)
    bits = jax.random.bits(rng, half, jnp.uint32)
    low = (bits & 0xFFFF) >= drop
    high = (bits >> 16) >= drop
    keep = jnp.concatenate([low, high], axis=-1)[..., : x.shape[-1]]
    return jnp.where(keep, x * (65536 / (65536 - drop)), 0).astype(x.dtype)

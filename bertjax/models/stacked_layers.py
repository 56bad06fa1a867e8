# SPDX-License-Identifier: Apache-2.0
"""All layers: a loop over parameters stacked on axis 0, or one after the other."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.cache import LayerCache
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, fold_in, take_at
from bertjax.models.skips import Earlier, result_for
from bertjax.models.transformer_layer import (
    AttentionInputs,
    MemoryInputs,
    apply_layer,
    first_values,
)
from bertjax.parallel.sharding import constrain


class Run(NamedTuple):
    """What a pass through the layers makes.

    hidden: [B, L, D]; kept: what keep(x) made of each layer's result; caches: those
    that were given, with the tokens of this pass.
    """

    hidden: jax.Array
    kept: Any
    caches: tuple[LayerCache, ...] | None = None


def run_layers(
    layers: Params | tuple[Params, ...],
    cfg: EncoderConfig,
    x: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: jax.Array | None,
    keep: Callable[[jax.Array], Any] = lambda x: None,
    positions: jax.Array | None = None,
    memory: MemoryInputs | None = None,
    caches: tuple[LayerCache, ...] | None = None,
) -> Run:
    """Run the layers on x [B, L, D]; also return what keep(x) makes of each result.

    layers: stacked, or of `unstack`. With positions, i32 [B, P], the last layer's
    result is of these, [B, P, D], and it is computed there alone where layers are no
    loop (cfg.unroll). memory: what a decoder's layers read of an encoder. caches: of
    unstacked layers, keys and values of earlier tokens.
    """

    def layer(x, scanned, inputs=inputs, positions=None):
        return step(x, scanned, inputs, positions)[:2]

    def step(x, scanned, inputs, positions, cache=None):
        params, index, depth = scanned
        if params is None:
            group = depth["group"]  # of numpy arrays too, which no tracer indexes
            params = jax.tree.map(lambda p: jnp.asarray(p)[group], layers)
        own = earlier._replace(result=depth.get("result"))
        key = fold_in(rng, index)
        x, cache = apply_layer(
            params, cfg, x, inputs, key, depth, positions, own, memory, cache
        )
        x = constrain(x, "batch length embed")
        return x, keep(x), cache

    def inputs_of(index: int) -> tuple[AttentionInputs, ...]:
        return inputs[:1] if cfg.is_global[index] else inputs[-1:]

    n = cfg.num_hidden_layers
    earlier = Earlier(x if cfg.embedding_skip else None)
    if cfg.value_skip:
        first = layers[0] if isinstance(layers, tuple) else take_layer(layers, 0, n)
        earlier = earlier._replace(values=first_values(first, cfg, x))
    if isinstance(layers, tuple):
        xs, results, written = [], [], []
        for i, group in enumerate(cfg.groups):
            last = positions if i == n - 1 else None
            depth = {"result": result_for(cfg, i, xs)}
            cache = caches[i] if caches else None
            scanned = layers[group], i, depth
            x, result, cache = step(x, scanned, inputs_of(i), last, cache)
            xs.append(x)
            results.append(result)
            written.append(cache)
        return Run(x, results, tuple(written) if caches else None)
    scanned, early = scan_inputs(layers, cfg), None
    if cfg.unet_skips:
        x, early, scanned = run_first_half(remat(emit(layer), cfg), cfg, x, scanned)
    # A loop would have to copy its stack, and its gradients', to leave a layer out.
    apart = positions is not None and (cfg.unroll or n) >= n
    rest = jax.tree.map(lambda leaf: leaf[:-1], scanned) if apart else scanned
    # An unrolled scan with its single body is what costs least memory and time.
    x, results = jax.lax.scan(remat(layer, cfg), x, rest, unroll=cfg.unroll or n)
    if apart:
        last = functools.partial(layer, inputs=inputs_of(-1), positions=positions)
        x, _ = remat(last, cfg)(x, jax.tree.map(lambda leaf: leaf[-1], scanned))
    elif positions is not None:
        x = take_at(x, positions)
    if early is not None:
        results = jax.tree.map(lambda *parts: jnp.concatenate(parts), early, results)
    return Run(x, results)


def emit(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer's step also return its result."""

    def run(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
        x, kept = layer(x, scanned)
        return x, (x, kept)

    return run


def run_first_half(
    step: Callable[..., Any], cfg: EncoderConfig, x: jax.Array, scanned: Any
) -> tuple[jax.Array, Any, Any]:
    """Run the layers that no earlier result goes to; of an odd number the middle too.

    step: a layer's, of `emit`; scanned: of scan_inputs. Returns x, what is kept of
    these, and what the others scan, depth["result"] being what each of them reads.
    """
    n = cfg.num_hidden_layers
    half = n // 2
    params, index, depth = scanned
    skips = {"unet_skips": params["unet_skips"]}
    params = {name: part for name, part in params.items() if name not in skips}
    early, late = (
        jax.tree.map(lambda leaf, part=part: leaf[part], (params, index, depth))
        for part in (slice(n - half), slice(n - half, n))
    )
    x, (xs, kept) = jax.lax.scan(step, x, early, unroll=cfg.unroll or n)
    params, index, depth = late
    depth = {**depth, "result": xs[:half][::-1]}
    return x, kept, ({**params, **skips}, index, depth)


def remat(layer: Callable[..., Any], cfg: EncoderConfig) -> Callable[..., Any]:
    """Let the backward pass compute a layer again, as cfg.remat says."""
    if cfg.remat == "none":
        return layer
    names = ["product"] if cfg.remat == "dots" else []
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def unstack(params: Params, cfg: EncoderConfig) -> Params:
    """Give each layer arrays of its own, for `apply` without gradients.

    A compiled program copies what it takes out of a stack, in every call: two thirds of
    the time of a single short text at base size.
    """
    n = cfg.groups[-1] + 1
    layers = tuple(take_layer(params["layers"], i, n) for i in range(n))
    return {**params, "layers": layers}


def take_layer(stack: Mapping[str, Any], index: int, depth: int) -> Params:
    """Take the parameters of a layer, of `depth`, without those that it lacks.

    A leaf that the first layers lack is stacked over the others.
    """
    taken: Params = {}
    for name, part in stack.items():
        if isinstance(part, Mapping):
            if inner := take_layer(part, index, depth):
                taken[name] = inner
        elif (at := index - depth + len(part)) >= 0:
            taken[name] = part[at]
    return taken


def scan_inputs(
    layers: Params, cfg: EncoderConfig
) -> tuple[Params | None, jax.Array, dict[str, jax.Array]]:
    """Return what the loop over the layers scans, axis 0 being the depth.

    That is the layers' own parameters (None where some share theirs), their index,
    and what differs between them: "group", whose parameters; "is_global", whether it
    sees all; "is_normed", whether its attention has a norm.
    """
    n = cfg.num_hidden_layers
    depth = {}
    if len(set(cfg.is_global)) > 1:
        depth["is_global"] = jnp.array(cfg.is_global)
    if not cfg.first_attention_norm and n > 1:
        # The body is one for all layers, so the first is given the second's norm,
        # which it does not use.
        depth["is_normed"] = jnp.arange(n) > 0
        norm = jax.tree.map(
            lambda leaf: jnp.concatenate([leaf[:1], leaf]), layers["attention"]["norm"]
        )
        layers = {**layers, "attention": {**layers["attention"], "norm": norm}}
    if "value_skip" in layers:
        # The first layer's own values, which are mixed with themselves.
        begin = {"own": 1.0, "first": 0.0}
        skip = {k: jnp.r_[begin[k], leaf] for k, leaf in layers["value_skip"].items()}
        layers = {**layers, "value_skip": skip}
    if len(set(cfg.groups)) < n:
        depth["group"] = jnp.array(cfg.groups)
        return None, jnp.arange(n), depth
    return layers, jnp.arange(n), depth

# SPDX-License-Identifier: Apache-2.0
"""All layers, as a loop over parameters stacked on axis 0, or one after the other."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.cache import LayerCache
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, Rng, fold_in, take_at
from bertjax.models.skips import Earlier, result_for
from bertjax.models.transformer_layer import (
    AttentionInputs,
    MemoryInputs,
    apply_layer,
    first_values,
)
from bertjax.parallel.sharding import constrain


class Run(NamedTuple):
    """The results of a pass through the layers.

    hidden: [B, L, D]; kept: keep(x) of each layer's result; caches: the given caches,
    extended by the tokens of this pass.
    """

    hidden: jax.Array
    kept: Any
    caches: tuple[LayerCache, ...] | None = None


def run_layers(
    layers: Params | tuple[Params, ...],
    cfg: EncoderConfig,
    x: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: Rng,
    keep: Callable[[jax.Array], Any] = lambda x: None,
    positions: jax.Array | None = None,
    memory: MemoryInputs | None = None,
    caches: tuple[LayerCache, ...] | None = None,
) -> Run:
    """Run the layers on x [B, L, D]; also return keep(x) of each layer's result.

    layers: stacked, or from `unstack`. positions: i32 [B, P], the positions at which
    the last layer's result is returned, [B, P, D]; if the layers are unrolled
    (cfg.unroll), it is computed only there. memory: the encoder's output that a
    decoder's layers attend to. caches: keys and values of earlier tokens, for unstacked
    layers only.
    """

    def layer(x, scanned, inputs=inputs, positions=None):
        return step(x, scanned, inputs, positions)[:2]

    def step(x, scanned, inputs, positions, cache=None):
        params, index, depth = scanned
        if params is None:
            group = depth["group"]
            # The leaves may be numpy arrays, which a tracer cannot index.
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
    # Run the last layer separately only if the others are unrolled: a loop would have
    # to copy the stack of parameters, and that of gradients, to leave a layer out.
    apart = positions is not None and (cfg.unroll or n) >= n
    rest = jax.tree.map(lambda leaf: leaf[:-1], scanned) if apart else scanned
    # An unrolled scan, with its single body, costs the least memory and time.
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
    """Wrap a layer's step so that it also returns the layer's result."""

    def run(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
        x, kept = layer(x, scanned)
        return x, (x, kept)

    return run


def run_first_half(
    step: Callable[..., Any], cfg: EncoderConfig, x: jax.Array, scanned: Any
) -> tuple[jax.Array, Any, Any]:
    """Run the layers that read no earlier result: the first half, and a middle layer.

    step: from `emit`; scanned: from scan_inputs. Returns x, keep(x) of these layers,
    and the scan inputs of the others, where depth["result"] is the earlier result that
    each of them reads.
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
    """Make the backward pass recompute a layer as cfg.remat says."""
    if cfg.remat == "none":
        return layer
    names = ["product"] if cfg.remat == "dots" else []
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def unstack(params: Params, cfg: EncoderConfig) -> Params:
    """Give each layer its own arrays, for `apply` without gradients.

    A compiled program copies each layer's parameters out of a stack in every call,
    which is two thirds of the time for a single short text at base size.
    """
    n = cfg.groups[-1] + 1
    layers = tuple(take_layer(params["layers"], i, n) for i in range(n))
    return {**params, "layers": layers}


def take_layer(stack: Mapping[str, Any], index: int, depth: int) -> Params:
    """Return the parameters of layer `index` of `depth` layers.

    A leaf that the first layers lack is stacked over the others; it is left out for the
    layers that lack it.
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
    """Return what the loop over the layers scans, with the layers on axis 0.

    That is the layers' parameters (None if layers share them), their index, and what
    differs between layers: "group", the set of parameters that a layer uses;
    "is_global", whether its attention has no window; "is_normed", whether its attention
    has a norm.
    """
    n = cfg.num_hidden_layers
    depth = {}
    if len(set(cfg.is_global)) > 1:
        depth["is_global"] = jnp.array(cfg.is_global)
    if not cfg.first_attention_norm and n > 1:
        # All layers run the same body, so the first one gets the second's norm, which
        # it does not use.
        depth["is_normed"] = jnp.arange(n) > 0
        norm = jax.tree.map(
            lambda leaf: jnp.concatenate([leaf[:1], leaf]), layers["attention"]["norm"]
        )
        layers = {**layers, "attention": {**layers["attention"], "norm": norm}}
    if "value_skip" in layers:
        # The first layer has no scalars: with 1 and 0 its values stay its own.
        begin = {"own": 1.0, "first": 0.0}
        skip = {k: jnp.r_[begin[k], leaf] for k, leaf in layers["value_skip"].items()}
        layers = {**layers, "value_skip": skip}
    if len(set(cfg.groups)) < n:
        depth["group"] = jnp.array(cfg.groups)
        return None, jnp.arange(n), depth
    return layers, jnp.arange(n), depth

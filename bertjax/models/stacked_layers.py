# SPDX-License-Identifier: Apache-2.0
"""All layers: a loop over parameters stacked on axis 0, or one after the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, fold_in, take_at
from bertjax.models.transformer_layer import AttentionInputs, apply_layer
from bertjax.parallel.sharding import constrain


def run_layers(
    layers: Params | tuple[Params, ...],
    cfg: EncoderConfig,
    x: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: jax.Array | None,
    keep: Callable[[jax.Array], Any],
    positions: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Run the layers on x [B, L, D]; also return what keep(x) makes of each result.

    layers: stacked, or of `unstack`. With positions, i32 [B, P], the last layer's
    result is of these, [B, P, D], and it is computed there alone where layers are no
    loop (cfg.unroll).
    """

    def layer(x, scanned, inputs=inputs, positions=None):
        params, index, depth = scanned
        if params is None:
            group = depth["group"]  # of numpy arrays too, which no tracer indexes
            params = jax.tree.map(lambda p: jnp.asarray(p)[group], layers)
        x = apply_layer(params, cfg, x, inputs, fold_in(rng, index), depth, positions)
        x = constrain(x, "batch length embed")
        return x, keep(x)

    def inputs_of(index: int) -> tuple[AttentionInputs, ...]:
        return inputs[:1] if cfg.is_global[index] else inputs[-1:]

    n = cfg.num_hidden_layers
    if isinstance(layers, tuple):
        results = []
        for i, group in enumerate(cfg.groups):
            last = positions if i == n - 1 else None
            x, result = layer(x, (layers[group], i, {}), inputs_of(i), last)
            results.append(result)
        return x, results
    scanned = scan_inputs(layers, cfg)
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
    return x, results


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

    attention = dict(params["layers"]["attention"])
    late_norm = {} if cfg.first_attention_norm else attention.pop("norm", {})
    stack = {**params["layers"], "attention": attention}

    def take(tree: Any, i: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[i], tree)

    layers = [take(stack, i) for i in range(cfg.groups[-1] + 1)]
    for i, layer in enumerate(layers[1:]):
        if late_norm:
            layer["attention"]["norm"] = take(late_norm, i)
    return {**params, "layers": tuple(layers)}


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
    if len(set(cfg.groups)) < n:
        depth["group"] = jnp.array(cfg.groups)
        return None, jnp.arange(n), depth
    return layers, jnp.arange(n), depth

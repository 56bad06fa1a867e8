# SPDX-License-Identifier: Apache-2.0
"""The layers' parameters, stacked on axis 0 as they are kept, or each apart."""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params
from bertjax.parallel.sharding import path_name


def unstack(params: Params, cfg: EncoderConfig) -> Params:
    """Give each layer arrays of its own, for `apply` without gradients.

    A compiled program copies what it takes out of a stack, in every call: two thirds of
    the time of a single short text at base size.
    """

    def one(i: int) -> Params:
        def take(path: Any, leaf: jax.Array) -> jax.Array | None:
            lacks = not cfg.first_attention_norm and path_name(path).startswith(
                "attention/norm/"
            )
            return (leaf[i - 1] if i else None) if lacks else leaf[i]

        layer = jax.tree_util.tree_map_with_path(take, params["layers"])
        if not i and not cfg.first_attention_norm:
            layer["attention"].pop("norm", None)
        return layer

    return {**params, "layers": tuple(map(one, range(cfg.groups[-1] + 1)))}


def depths(
    layers: Params, cfg: EncoderConfig
) -> tuple[Params | None, jax.Array, dict[str, jax.Array]]:
    """Return what the loop over the layers goes through, axis 0 being the depth.

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

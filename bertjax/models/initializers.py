# SPDX-License-Identifier: Apache-2.0
"""Initializers for the parameters of encoders, decoders and their heads."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, draw
from bertjax.parallel.sharding import is_stacked, path_name

# The standard deviation of a standard normal that is truncated at -2 and 2.
CUT = 0.8796256610342398


def draw_params(rng: jax.Array, specs: Mapping[str, Any], cfg: EncoderConfig) -> Params:
    """Create f32 parameters from a nested dict of specs, as `layers.draw` does.

    Their standard deviation is cfg.initializer_range before truncation, or, with
    cfg.fan_in_init, that of `deviation` after truncation.
    """
    if not cfg.fan_in_init:
        return draw(rng, specs, cfg.initializer_range)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * deviation(path, leaf.shape, cfg),
        draw(rng, specs, 1 / CUT),
    )


def deviation(path: Any, shape: tuple[int, ...], cfg: EncoderConfig) -> float:
    """Return a leaf's standard deviation by the fan-in of its product.

    path: of the leaf in its part of the tree; shape: of the leaf, layers on axis 0.
    Matrices have fan_in^-0.5, biases of distances hidden_size^-0.5, other leaves 1.
    Queries have less if scores are not scaled down as usual (T5). See Raffel et al.
    2020, as in mesh_tensorflow and T5X.
    """
    name = path_name(path)
    if name.endswith("embeddings/relative"):
        return cfg.hidden_size**-0.5
    if name == "decoder":  # a head's output matrix, [V, E]
        return shape[-1] ** -0.5
    if not name.endswith("kernel"):
        return 1.0
    shape = shape[1:] if is_stacked(path) else shape
    joins = name.endswith("output/kernel")  # it joins the heads: [H, K, D]
    found = math.prod(shape[:-1] if joins else shape[:1]) ** -0.5
    if name.endswith("query/kernel") and cfg.attention_scale:
        found /= cfg.attention_scale * math.sqrt(cfg.head_dim)
    return found

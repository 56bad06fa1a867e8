# SPDX-License-Identifier: Apache-2.0
"""What the parameters of encoders, decoders and their heads begin as."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, draw
from bertjax.parallel.sharding import is_stacked, path_name

CUT = 0.8796256610342398  # the deviation of a normal that is cut at 2 of its own


def draw_params(rng: jax.Array, specs: Mapping[str, Any], cfg: EncoderConfig) -> Params:
    """Make f32 parameters from a nested dict of specs, as `layers.draw` does.

    What is drawn has a deviation of cfg.initializer_range before it is cut, or with
    cfg.fan_in_init `deviation`'s after it.
    """
    if not cfg.fan_in_init:
        return draw(rng, specs, cfg.initializer_range)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * deviation(path, leaf.shape, cfg),
        draw(rng, specs, 1 / CUT),
    )


def deviation(path: Any, shape: tuple[int, ...], cfg: EncoderConfig) -> float:
    """Return the deviation of a leaf by the inputs of its product, 1 of others.

    path: of the leaf in its part of the tree; shape: its own, layers on axis 0.
    Embeddings have 1; a matrix, and a bias of distances, 1 over the root of its inputs.
    Queries have less where scores are not scaled down as usual (T5's). Raffel et al.
    2020, as mesh_tensorflow and T5X make it.
    """
    name = path_name(path)
    if name.endswith("embeddings/relative"):
        return cfg.hidden_size**-0.5
    if name == "decoder":  # of a head, [V, E]
        return shape[-1] ** -0.5
    if not name.endswith("kernel"):
        return 1.0
    shape = shape[1:] if is_stacked(path) else shape
    joins = name.endswith("output/kernel")  # heads: [H, K, D]
    found = math.prod(shape[:-1] if joins else shape[:1]) ** -0.5
    if name.endswith("query/kernel") and cfg.attention_scale:
        found /= cfg.attention_scale * math.sqrt(cfg.head_dim)
    return found

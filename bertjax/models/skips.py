# SPDX-License-Identifier: Apache-2.0
"""Skip connections from earlier layers, weighted by learned scalars.

Each kind is a switch of EncoderConfig. Let x_l be the input of layer l (from 0), y_l
its result, x_0 the embeddings and u_l the values of its attention. A layer begins with

    x_l = y_(l-1) + w_l y_(N-1-l)        unet_skips, of the layers l >= N - floor(N/2)
    x_l = a_l x_l + b_l x_0              embedding_skip
    u_l = c_l u_l + d_l u_0              value_skip, of the layers l > 0

in this order. w, a and b are initialized to 1, 1 and 0, c and d to 1/2, as in
modded-nanogpt (where c is 1 - d). Mixed values are from Zhou et al. 2024 (ResFormer,
arXiv 2410.17897, learned scalars).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, Spec


class Earlier(NamedTuple):
    """What a layer reads from earlier layers; None for what it does not read.

    embeddings: x_0 [B, L, D]; values: u_0 [B L, H K]; result: y_(N-1-l) [B, L, D].
    """

    embeddings: jax.Array | None = None
    values: jax.Array | None = None
    result: jax.Array | None = None


NOTHING = Earlier()


def skip_specs(cfg: EncoderConfig) -> dict[str, dict[str, Spec]]:
    """Describe the scalars, stacked over the layers that have them."""
    n = cfg.num_hidden_layers
    specs: dict[str, dict[str, Spec]] = {}
    if cfg.embedding_skip:
        specs["embedding_skip"] = {"own": ((n,), 1.0), "first": ((n,), 0.0)}
    if cfg.value_skip:
        specs["value_skip"] = {"own": ((n - 1,), 0.5), "first": ((n - 1,), 0.5)}
    if cfg.unet_skips:
        specs["unet_skips"] = {"early": ((n // 2,), 1.0)}
    return specs


def read_earlier(params: Params, x: jax.Array, earlier: Earlier) -> jax.Array:
    """Return a layer's input: x [B, L, D] mixed with results of earlier layers."""
    if earlier.result is not None:
        x = mix(x, earlier.result, 1.0, params["unet_skips"]["early"])
    if earlier.embeddings is not None:
        own, first = (params["embedding_skip"][name] for name in ("own", "first"))
        x = mix(x, earlier.embeddings, own, first)
    return x


def mix_values(params: Params, values: jax.Array, earlier: Earlier) -> jax.Array:
    """Mix a layer's attention values [T, H K] with those of the first layer."""
    if earlier.values is None or "value_skip" not in params:
        return values
    own, first = (params["value_skip"][name] for name in ("own", "first"))
    return mix(values, earlier.values, own, first)


def mix(
    x: jax.Array, y: jax.Array, own: jax.Array | float, other: jax.Array
) -> jax.Array:
    """Return own x + other y in the dtype of x, computed in f32, gradients too."""
    x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
    return (own * x32 + other * y32).astype(x.dtype)


def result_for(
    cfg: EncoderConfig, index: int, results: Sequence[jax.Array]
) -> jax.Array | None:
    """Return the earlier result that layer `index` reads; results: of all before it."""
    n = cfg.num_hidden_layers
    return results[n - 1 - index] if cfg.unet_skips and index >= n - n // 2 else None

# SPDX-License-Identifier: Apache-2.0
"""One layer of the encoder: attention and MLP, each with a residual sum and a norm."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bertjax.models.attention import attend, choose_backend
from bertjax.models.attention_mask import (
    AttentionMask,
    make_attention_mask,
    mask_kind,
)
from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import (
    Rope,
    apply_rope,
    relative_bias,
    rope_angles,
    take_rope,
)
from bertjax.models.layers import Params, activate, dropout, layer_norm, linear, take_at
from bertjax.models.skips import NOTHING, Earlier, mix_values, read_earlier


class AttentionInputs(NamedTuple):
    """What the attention reads beside hidden states; rope: None without rotary ones."""

    mask: AttentionMask
    rope: Rope | None


def make_attention_inputs(
    embeddings: Params, cfg: EncoderConfig, batch: dict[str, jax.Array]
) -> tuple[AttentionInputs, ...]:
    """Make the inputs of global layers, of local ones, or both in this order.

    embeddings: the encoder's, which have a table of relative positions or none.
    """
    bias = None
    if cfg.relative_attention_num_buckets:
        length = make_attention_mask(batch, causal=cfg.is_decoder).keys.shape[1]
        bias = relative_bias(embeddings["relative"], cfg, batch, length)

    def make(window: int, theta: float) -> AttentionInputs:
        mask = make_attention_mask(batch, window, cfg.is_decoder)._replace(bias=bias)
        if cfg.position_embedding_type != "rope":
            return AttentionInputs(mask, None)
        positions = batch.get("position_ids", np.arange(mask.keys.shape[1]))
        return AttentionInputs(mask, rope_angles(positions, cfg.head_dim, theta))

    inputs = []
    if any(cfg.is_global):
        inputs.append(make(0, cfg.rope_theta))
    if not all(cfg.is_global):
        inputs.append(make(cfg.local_attention, cfg.local_rope_theta or cfg.rope_theta))
    return tuple(inputs)


def normalise(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Normalise the last axis of x as the config says."""
    return layer_norm(params, x, cfg.layer_norm_eps, cfg.norm_type)


def apply_layer(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: jax.Array | None,
    depth: dict[str, jax.Array],
    positions: jax.Array | None = None,
    earlier: Earlier = NOTHING,
) -> jax.Array:
    """Run one layer on x [B, L, D]; with positions i32 [B, P] return [B, P, D], theirs.

    Post-LN as in Vaswani et al. 2017, or pre-LN (Xiong et al. 2020, figure 1).
    inputs: of make_attention_inputs; where there are two, depth["is_global"] chooses
    (stacked_layers.scan_inputs). earlier: what it reads of layers before the last one
    (skips.py), by scalars among its parameters. Matrix products see [B*L, D]: on a CPU
    gradients of products of three axes run slower.
    """
    b, length, d = x.shape
    heads = (b, -1, cfg.num_attention_heads, cfg.head_dim)
    rate = 0.0 if rng is None else cfg.attention_probs_dropout_prob
    kind = mask_kind(cfg, inputs[0].mask.steps is not None)
    shape = (b, length, *heads[2:])
    backend, _ = choose_backend(cfg.attention, shape, rate, x.dtype, kind)
    # Kernels take a query for each key; "xla" takes those at the positions alone.
    query_positions = positions if backend == "xla" else None
    rngs = (None, None, None) if rng is None else jax.random.split(rng, 3)
    pre = cfg.norm_position == "pre"
    x = read_earlier(params, x, earlier)
    residual = (x if positions is None else take_at(x, positions)).reshape(-1, d)
    p = params["attention"]
    x_of_queries = None if query_positions is None else residual
    q, k, v = queries_keys_values(p, cfg, x.reshape(-1, d), depth, x_of_queries)
    v = mix_values(params, v, earlier)
    q, k, v = (y.reshape(heads) for y in (q, k, v))

    def attend_with(own: AttentionInputs) -> Callable[..., jax.Array]:
        def run(q, k, v):
            if own.rope is not None:
                q = apply_rope(q, take_rope(own.rope, query_positions))
                k = apply_rope(k, own.rope)
            mask = own.mask._replace(query_positions=query_positions)
            return attend(q, k, v, mask, rate, rngs[0], backend)

        return run

    with jax.named_scope("attention"):
        if len(inputs) == 1:
            y = attend_with(inputs[0])(q, k, v)
        else:
            y = jax.lax.cond(depth["is_global"], *map(attend_with, inputs), q, k, v)
    with jax.named_scope("attention_out"):
        if positions is not None and query_positions is None:
            y = take_at(y, positions)
        y = linear(p["output"], y.reshape(-1, d), "heads head embed")
        x = residual + dropout(y, cfg.hidden_dropout_prob, rngs[1])
        x = x if pre else normalise(p["norm"], cfg, x)
    p = params["mlp"]
    with jax.named_scope("mlp"):
        y = normalise(p["norm"], cfg, x) if pre else x
        y = mlp(p, cfg, y)
        x = x + dropout(y, cfg.hidden_dropout_prob, rngs[2])
        x = x if pre else normalise(p["norm"], cfg, x)
    return x.reshape(b, -1, d)


def queries_keys_values(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    depth: dict[str, jax.Array],
    x_of_queries: jax.Array | None = None,
) -> list[jax.Array]:
    """Project x [T, D] for the attention, [T, H K] each; pre-LN normalises it first.

    x_of_queries: [S, D], of which queries are made, [S, H K]; None for x. With
    cfg.qk_norm each head of queries and keys has a root mean square of 1.
    """

    def prepare(x: jax.Array) -> jax.Array:
        if cfg.norm_position != "pre" or "norm" not in params:
            return x
        y = normalise(params["norm"], cfg, x)
        return jnp.where(depth["is_normed"], y, x) if "is_normed" in depth else y

    y = prepare(x)
    query = y if x_of_queries is None else prepare(x_of_queries)
    inputs = {"query": query, "key": y, "value": y}
    with jax.named_scope("qkv"):
        axes = "embed heads head"
        q, k, v = (product(params[name], x, axes) for name, x in inputs.items())
        if cfg.qk_norm:
            q, k = normalise_heads(cfg, q), normalise_heads(cfg, k)
        return [q, k, v]


def first_values(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Return the values [B L, H K] of the first layer, of its parameters; x [B, L, D].

    It makes them again: as what all layers read they are kept once for the backward
    pass, where a loop would keep what it carries once a layer.
    """
    x = read_earlier(params, x, Earlier(x if cfg.embedding_skip else None))
    p, y = params["attention"], x.reshape(-1, x.shape[-1])
    if cfg.norm_position == "pre" and "norm" in p:
        y = normalise(p["norm"], cfg, y)
    with jax.named_scope("first_values"):
        return product(p["value"], y, "embed heads head")


def normalise_heads(cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Divide each head of x [T, H K] by its root mean square."""
    each = x.reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    return layer_norm({}, each, cfg.layer_norm_eps, "rms_norm").reshape(x.shape)


def mlp(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Run the MLP on x [T, D], gated (Shazeer 2020, equation 5) or plain."""
    y = activate(product(params["up"], x, "embed mlp"), cfg.hidden_act)
    if cfg.mlp_type == "glu":
        y = y * product(params["gate"], x, "embed mlp")
    return product(params["down"], y, "mlp embed")


def product(params: Params, x: jax.Array, axes: str) -> jax.Array:
    """Return linear(params, x, axes), which remat="dots" keeps for the backward pass.

    The attention is not kept: from queries, keys and values a kernel makes it again in
    the time that storing it takes.
    """
    y = linear(params, x, axes)
    if axes != "embed mlp":
        return checkpoint_name(y, "product")
    # As [1, T, M]: ELECTRA has two encoders, and M of one may be D of the other. XLA
    # leaves out the zeros that stacks begin with, unless two loops share their shape.
    return checkpoint_name(y[None], "product")[0]

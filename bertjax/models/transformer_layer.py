# SPDX-License-Identifier: Apache-2.0
"""One layer: attention, in a decoder cross-attention, MLP.

Each of them has a residual sum and a norm.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.models.attention import TPU_KERNELS, attend, choose_backend
from bertjax.models.attention_mask import (
    AttentionMask,
    make_attention_mask,
    mask_kind,
)
from bertjax.models.cache import LayerCache, write
from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import (
    Rope,
    apply_rope,
    relative_bias,
    rope_angles,
    take_rope,
)
from bertjax.models.layers import (
    Params,
    activate,
    count_up,
    dropout,
    fold_in,
    layer_norm,
    linear,
    take_at,
)
from bertjax.models.skips import NOTHING, Earlier, mix_values, read_earlier

# Sees what a matrix of a layer is about to be multiplied with, [T, in], by the path of
# its parameters in the layer. Queries, keys and values share theirs, and so do the
# gate and "mlp/up".
Tap = Callable[[str, jax.Array], None]


class AttentionInputs(NamedTuple):
    """What the attention reads beside hidden states; rope: None without rotary ones."""

    mask: AttentionMask
    rope: Rope | None


class MemoryInputs(NamedTuple):
    """What the cross-attention reads beside hidden states.

    hidden: [B, S, D] of the encoder; None where all layers have its keys in a cache.
    """

    mask: AttentionMask
    hidden: jax.Array | None


def make_attention_inputs(
    embeddings: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    slots: jax.Array | None = None,
) -> tuple[AttentionInputs, ...]:
    """Make the inputs of global layers, of local ones, or both in this order.

    embeddings: the encoder's, which have a table of relative positions or none. slots:
    i32 [B, n], the places that the tokens have among those that the batch describes,
    which are the slots of a cache; None: the tokens are the batch's.
    """
    bias = None
    if cfg.relative_attention_num_buckets:
        length = make_attention_mask(batch, causal=cfg.is_decoder).keys.shape[1]
        bias = relative_bias(embeddings["relative"], cfg, batch, length, slots)

    def make(window: int, theta: float) -> AttentionInputs:
        mask = make_attention_mask(batch, window, cfg.is_decoder)
        mask = mask._replace(bias=bias, query_positions=slots)
        if cfg.position_embedding_type != "rope":
            return AttentionInputs(mask, None)
        positions = batch.get("position_ids", count_up(mask.keys.shape[1]))
        positions = positions if slots is None else slots
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
    memory: MemoryInputs | None = None,
    cache: LayerCache | None = None,
    tap: Tap | None = None,
) -> tuple[jax.Array, LayerCache | None]:
    """Run one layer on x [B, L, D]; with positions i32 [B, P] return [B, P, D], theirs.

    Post-LN as in Vaswani et al. 2017, or pre-LN (Xiong et al. 2020, figure 1).
    inputs: of make_attention_inputs; where there are two, depth["is_global"] chooses
    (stacked_layers.scan_inputs). earlier: what it reads of layers before the last one
    (skips.py), by scalars among its parameters. memory: what its cross-attention reads
    (Vaswani et al. 2017, section 3.2.3). cache: where keys and values are kept, and
    with query positions of `inputs` those of earlier tokens are; it is returned as it
    is then. tap: sees what the layer's matrices are multiplied with, those of a
    cross-attention aside. Matrix products see [B*L, D]: on a CPU gradients of products
    of three axes run slower.
    """
    b, _, d = x.shape
    rngs = (None, None, None) if rng is None else jax.random.split(rng, 3)
    x = read_earlier(params, x, earlier)
    residual = (x if positions is None else take_at(x, positions)).reshape(-1, d)
    y, cache = self_attention(
        params, cfg, x, residual, inputs, rngs[0], depth, positions, earlier, cache, tap
    )
    if tap is not None:
        tap("attention/output", y)
    x = add_attended(params["attention"], cfg, residual, y, rngs[1])
    if memory is not None:
        keys = (None, None) if rng is None else jax.random.split(fold_in(rng, 3))
        y, cache = cross_attention(params["cross"], cfg, x, b, memory, keys[0], cache)
        x = add_attended(params["cross"], cfg, x, y, keys[1])
    pre = cfg.norm_position == "pre"
    p = params["mlp"]
    with jax.named_scope("mlp"):
        y = normalise(p["norm"], cfg, x) if pre else x
        y = mlp(p, cfg, y, tap)
        x = x + dropout(y, cfg.hidden_dropout_prob, rngs[2])
        x = x if pre else normalise(p["norm"], cfg, x)
    return x.reshape(b, -1, d), cache


def self_attention(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    residual: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: jax.Array | None,
    depth: dict[str, jax.Array],
    positions: jax.Array | None,
    earlier: Earlier,
    cache: LayerCache | None,
    tap: Tap | None,
) -> tuple[jax.Array, LayerCache | None]:
    """Mix the values of x [B, L, D] for each query: [B P, D]; residual: theirs.

    Arguments are those of apply_layer, and so is what is returned of the cache.
    """
    b, length, d = x.shape
    heads = (b, -1, cfg.num_attention_heads, cfg.head_dim)
    rate = 0.0 if rng is None else cfg.attention_probs_dropout_prob
    if inputs[0].mask.query_positions is not None:
        backend = "xla"  # of few queries, which see the keys of a cache
    else:
        seen = inputs[0].mask
        kind = mask_kind(cfg, seen.steps is not None, seen.edges is not None)
        shape = (b, length, *heads[2:])
        backend, _ = choose_backend(cfg.attention, shape, rate, x.dtype, kind)
    # Kernels take a query for each key; "xla" takes those at the positions alone.
    query_positions = positions if backend == "xla" else None
    x_of_queries = None if query_positions is None else residual
    p = params["attention"]
    q, k, v = queries_keys_values(p, cfg, x.reshape(-1, d), depth, x_of_queries, tap)
    v = mix_values(params, v, earlier)
    q, k, v = (y.reshape(heads) for y in (q, k, v))

    def attend_with(own: AttentionInputs) -> Callable[..., Any]:
        def run(q, k, v):
            mask, kept = own.mask, cache
            if own.rope is not None:
                on_tpu = backend in TPU_KERNELS
                q = apply_rope(q, take_rope(own.rope, query_positions), on_tpu)
                k = apply_rope(k, own.rope, on_tpu)
            if kept is not None:
                kept = write(kept, k, v, mask.query_positions)
                if mask.query_positions is not None:
                    k, v = kept.key.swapaxes(1, 2), kept.value.swapaxes(1, 2)
            if query_positions is not None:
                mask = mask._replace(query_positions=query_positions)
            return attend(q, k, v, mask, rate, rng, backend), kept

        return run

    with jax.named_scope("attention"):
        if len(inputs) == 1:
            y, cache = attend_with(inputs[0])(q, k, v)
        else:
            runs = map(attend_with, inputs)
            y, cache = jax.lax.cond(depth["is_global"], *runs, q, k, v)
    if positions is not None and query_positions is None:
        y = take_at(y, positions)
    return y.reshape(-1, d), cache


def cross_attention(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    rows: int,
    memory: MemoryInputs,
    rng: jax.Array | None,
    cache: LayerCache | None,
) -> tuple[jax.Array, LayerCache | None]:
    """Mix values of the memory for x [B T, D], of so many rows: [B T, D].

    Without rotary or relative positions, and whatever cfg.attention is by "xla":
    kernels take a query for each key. Keys and values that the cache lacks are made of
    the memory, and are in it then.
    """
    heads = (rows, -1, cfg.num_attention_heads, cfg.head_dim)
    y = normalise(params["norm"], cfg, x) if cfg.norm_position == "pre" else x
    q = project(params, "query", cfg, y).reshape(heads)
    if cache is not None and cache.memory_key is not None:
        k, v = cache.memory_key.swapaxes(1, 2), cache.memory_value.swapaxes(1, 2)
    else:
        y = memory.hidden.reshape(-1, memory.hidden.shape[-1])
        k, v = (project(params, n, cfg, y).reshape(heads) for n in ("key", "value"))
        if cache is not None:
            kept = {"memory_key": k.swapaxes(1, 2), "memory_value": v.swapaxes(1, 2)}
            cache = cache._replace(**kept)
    with jax.named_scope("cross_attention"):
        rate = cfg.attention_probs_dropout_prob
        y = attend(q, k, v, memory.mask, rate, rng)
    return y.reshape(x.shape), cache


def add_attended(
    params: Params,
    cfg: EncoderConfig,
    residual: jax.Array,
    y: jax.Array,
    rng: jax.Array | None,
) -> jax.Array:
    """Project what an attention mixed, [T, D], and add it to the residual stream."""
    with jax.named_scope("attention_out"):
        y = linear(params["output"], y, "heads head embed")
        x = residual + dropout(y, cfg.hidden_dropout_prob, rng)
        return x if cfg.norm_position == "pre" else normalise(params["norm"], cfg, x)


def queries_keys_values(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    depth: dict[str, jax.Array],
    x_of_queries: jax.Array | None = None,
    tap: Tap | None = None,
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
    if tap is not None:
        tap("attention/query", y)
    with jax.named_scope("qkv"):
        return [project(params, name, cfg, x) for name, x in inputs.items()]


def layer_vectors(
    layer: Params, cfg: EncoderConfig, x: jax.Array, earlier: Earlier = NOTHING
) -> dict[str, jax.Array]:
    """Return what a layer's attention makes of its input x [B, L, D], all heads side by
    side: {"query", "key", "value"}, [B, L, H K] each, before rotary positions.

    earlier: what it reads of layers before the last one, as apply_layer has it.
    """
    b, length, d = x.shape
    x = read_earlier(layer, x, earlier).reshape(-1, d)
    q, k, v = queries_keys_values(layer["attention"], cfg, x, {})
    each = {"query": q, "key": k, "value": mix_values(layer, v, earlier)}
    return {name: y.reshape(b, length, -1) for name, y in each.items()}


def project(params: Params, name: str, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Make queries, keys or values [T, H K] of x [T, D], as `name` says.

    Backends divide scores by the root of a head's width, so that queries carry what
    cfg.attention_scale differs from that.
    """
    y = product(params[name], x, "embed heads head")
    if cfg.qk_norm and name != "value":
        y = normalise_heads(cfg, y)
    if cfg.attention_scale and name == "query":
        y = y * (cfg.attention_scale * math.sqrt(cfg.head_dim))
    return y


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


def mlp(
    params: Params, cfg: EncoderConfig, x: jax.Array, tap: Tap | None = None
) -> jax.Array:
    """Run the MLP on x [T, D], gated (Shazeer 2020, equation 5) or plain."""
    if tap is not None:
        tap("mlp/up", x)
    y = activate(product(params["up"], x, "embed mlp"), cfg.hidden_act)
    if cfg.mlp_type == "glu":
        y = y * product(params["gate"], x, "embed mlp")
    if tap is not None:
        tap("mlp/down", y)
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

# SPDX-License-Identifier: Apache-2.0
"""One layer: attention, cross-attention (in a decoder only), MLP.

Each of these has a residual sum and a norm.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.models.attention import TPU_KERNELS, attend, choose_backend
from bertjax.models.attention_mask import AttentionMask, make_attention_mask, mask_kind
from bertjax.models.cache import LayerCache, keep_memory, write
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
    Rng,
    activate,
    count_up,
    dropout,
    fold_in,
    layer_norm,
    linear,
    take_at,
)
from bertjax.models.skips import NOTHING, Earlier, mix_values, read_earlier

# A function that observes the input [T, in] of each matrix product of a layer; its
# first argument is the path of the matrix in the layer. Queries, keys and values share
# one input ("attention/query"), and so do the gate and "mlp/up".
Tap = Callable[[str, jax.Array], None]


class AttentionInputs(NamedTuple):
    """What attention reads besides hidden states; rope: None if it is not rotary."""

    mask: AttentionMask
    rope: Rope | None


class MemoryInputs(NamedTuple):
    """What the cross-attention reads besides hidden states.

    hidden: [B, S, D] of the encoder; None if all layers have its keys in a cache.
    rope: rotary positions of the queries and of the memory, which has S = T tokens
    then; None if there are none.
    """

    mask: AttentionMask
    hidden: jax.Array | None
    rope: Rope | None = None


def make_attention_inputs(
    embeddings: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    slots: jax.Array | None = None,
) -> tuple[AttentionInputs, ...]:
    """Build the attention inputs of global layers, local layers, or both in this order.

    embeddings: the encoder's, with a table of relative positions if the config has it.
    slots: i32 [B, n], for decoding with a cache: the batch describes the cache's slots,
    and the tokens are in these. None: the tokens are those of the batch.
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


def normalize(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Normalize the last axis of x as the config says."""
    return layer_norm(params, x, cfg.layer_norm_eps, cfg.norm_type)


def apply_layer(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: Rng,
    depth: dict[str, jax.Array],
    positions: jax.Array | None = None,
    earlier: Earlier = NOTHING,
    memory: MemoryInputs | None = None,
    cache: LayerCache | None = None,
    tap: Tap | None = None,
) -> tuple[jax.Array, LayerCache | None]:
    """Run one layer on x [B, L, D]; return [B, L, D], or [B, P, D] with positions.

    Post-LN as in Vaswani et al. 2017, or pre-LN (Xiong et al. 2020, figure 1).
    inputs: from make_attention_inputs; if there are two, depth["is_global"] chooses
    (stacked_layers.scan_inputs). positions: i32 [B, P], the positions of the result.
    earlier: results of layers before the previous one (skips.py), mixed in by scalars
    among the parameters. memory: what the cross-attention reads (Vaswani et al. 2017,
    section 3.2.3). cache: keys and values are written there, and if the masks of
    `inputs` have query positions, those of earlier tokens are read from it; the new
    cache is returned. tap: observes the inputs of the layer's matrices, except those of
    a cross-attention. Matrix products are of [B*L, D], because on a CPU the gradients
    of products with three axes are slower.
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
    return add_mlp(params["mlp"], cfg, x, rngs[2], tap).reshape(b, -1, d), cache


def self_attention(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    residual: jax.Array,
    inputs: tuple[AttentionInputs, ...],
    rng: Rng,
    depth: dict[str, jax.Array],
    positions: jax.Array | None,
    earlier: Earlier,
    cache: LayerCache | None,
    tap: Tap | None,
) -> tuple[jax.Array, LayerCache | None]:
    """Attend within x [B, L, D]; return the mixed values of the queries, [B P, D].

    residual: [B P, D], the rows of x at the queries. The other arguments, and the cache
    that is returned, are as in apply_layer.
    """
    b, length, d = x.shape
    heads = (b, -1, cfg.num_attention_heads, cfg.head_dim)
    rate = 0.0 if rng is None else cfg.attention_probs_dropout_prob
    if inputs[0].mask.query_positions is not None:
        backend = "xla"  # The queries are few, and attend to the keys of a cache.
    else:
        seen = inputs[0].mask
        kind = mask_kind(cfg, seen.steps is not None, seen.edges is not None)
        shape = (b, length, *heads[2:])
        backend, _ = choose_backend(cfg.attention, shape, rate, x.dtype, kind)
    # Kernels need a query for each key; "xla" can compute only those at `positions`.
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
    rng: Rng,
    cache: LayerCache | None,
) -> tuple[jax.Array, LayerCache | None]:
    """Attend from x [B T, D], which has `rows` rows, to the memory: [B T, D].

    There are no relative positions, and rotary ones only if the memory has them. The
    backend is "xla" whatever cfg.attention says, because kernels need a query for each
    key. If the cache has no keys and values of the memory, they are computed from it
    and added to the cache.
    """
    heads = (rows, -1, cfg.num_attention_heads, cfg.head_dim)
    y = normalize(params["norm"], cfg, x) if cfg.norm_position == "pre" else x
    q = project(params, "query", cfg, y).reshape(heads)
    if cache is not None and cache.memory_key is not None:
        k, v = cache.memory_key.swapaxes(1, 2), cache.memory_value.swapaxes(1, 2)
    else:
        y = memory.hidden.reshape(-1, memory.hidden.shape[-1])
        k, v = (project(params, n, cfg, y).reshape(heads) for n in ("key", "value"))
        if cache is not None:
            cache = keep_memory(cache, k, v)
    if memory.rope is not None:
        q, k = (apply_rope(y, memory.rope) for y in (q, k))
    with jax.named_scope("cross_attention"):
        rate = cfg.attention_probs_dropout_prob
        y = attend(q, k, v, memory.mask, rate, rng)
    return y.reshape(x.shape), cache


def add_attended(
    params: Params, cfg: EncoderConfig, residual: jax.Array, y: jax.Array, rng: Rng
) -> jax.Array:
    """Project an attention's result [T, D] and add it to the residual stream."""
    with jax.named_scope("attention_out"):
        y = linear(params["output"], y, "heads head embed")
        x = residual + dropout(y, cfg.hidden_dropout_prob, rng)
        return x if cfg.norm_position == "pre" else normalize(params["norm"], cfg, x)


def queries_keys_values(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    depth: dict[str, jax.Array],
    x_of_queries: jax.Array | None = None,
    tap: Tap | None = None,
) -> list[jax.Array]:
    """Project x [T, D] to queries, keys and values, [T, H K] each.

    Pre-LN normalizes x first. x_of_queries: [S, D], from which the queries [S, H K] are
    computed instead; None for x. With cfg.qk_norm each head of queries and keys has a
    root mean square of 1.
    """

    def prepare(x: jax.Array) -> jax.Array:
        if cfg.norm_position != "pre" or "norm" not in params:
            return x
        y = normalize(params["norm"], cfg, x)
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
    """Return a layer's queries, keys and values for its input x [B, L, D].

    The result is {"query", "key", "value"}, [B, L, H K] each, before rotary positions.
    earlier: as in apply_layer.
    """
    b, length, d = x.shape
    x = read_earlier(layer, x, earlier).reshape(-1, d)
    q, k, v = queries_keys_values(layer["attention"], cfg, x, {})
    each = {"query": q, "key": k, "value": mix_values(layer, v, earlier)}
    return {name: y.reshape(b, length, -1) for name, y in each.items()}


def project(params: Params, name: str, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Project x [T, D] to queries, keys or values [T, H K], as `name` says.

    Backends divide scores by the root of a head's width, so a different
    cfg.attention_scale is multiplied into the queries.
    """
    y = product(params[name], x, "embed heads head")
    if cfg.qk_norm and name != "value":
        each = y.reshape(-1, cfg.num_attention_heads, cfg.head_dim)
        y = layer_norm({}, each, cfg.layer_norm_eps, "rms_norm").reshape(y.shape)
    if cfg.attention_scale and name == "query":
        y = y * (cfg.attention_scale * math.sqrt(cfg.head_dim))
    return y


def first_values(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Return the values [B L, H K] of the first layer; params: its own; x [B, L, D].

    The first layer computes them again. They are computed here because then the
    backward pass stores them once; as a value that a loop carries they would be stored
    once per layer.
    """
    x = read_earlier(params, x, Earlier(x if cfg.embedding_skip else None))
    p, y = params["attention"], x.reshape(-1, x.shape[-1])
    if cfg.norm_position == "pre" and "norm" in p:
        y = normalize(p["norm"], cfg, y)
    with jax.named_scope("first_values"):
        return product(p["value"], y, "embed heads head")


def add_mlp(
    params: Params, cfg: EncoderConfig, x: jax.Array, rng: Rng, tap: Tap | None = None
) -> jax.Array:
    """Run the MLP on the residual stream x [T, D], and add its result to it."""
    with jax.named_scope("mlp"):
        pre = cfg.norm_position == "pre"
        y = mlp(params, cfg, normalize(params["norm"], cfg, x) if pre else x, tap)
        x = x + dropout(y, cfg.hidden_dropout_prob, rng)
        return x if pre else normalize(params["norm"], cfg, x)


def mlp(params: Params, cfg: EncoderConfig, x: jax.Array, tap: Tap | None) -> jax.Array:
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
    """Return linear(params, x, axes), which remat="dots" stores for the backward pass.

    The attention's result is not stored: recomputing it from queries, keys and values
    takes a kernel no longer than storing it would.
    """
    y = linear(params, x, axes)
    if axes != "embed mlp":
        return checkpoint_name(y, "product")
    # Name it as [1, T, M]: ELECTRA has two encoders, and M of one may equal D of the
    # other. XLA omits the zeros that initialize a loop's stacks, but not if two loops
    # share the shape.
    return checkpoint_name(y[None], "product")[0]

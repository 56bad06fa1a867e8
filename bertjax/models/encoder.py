# SPDX-License-Identifier: Apache-2.0
"""The encoder of BERT (Devlin et al. 2019, section 3) and of its relatives.

What sets the relatives apart are switches of EncoderConfig; bertjax/models/families.py
lists which family uses which.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bertjax.models.attention import (
    AttentionMask,
    Rotation,
    attend,
    choose_backend,
    make_attention_mask,
    rotate,
    rotation,
    rotation_at,
    take_at,
)
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import (
    Params,
    activate,
    draw,
    dropout,
    layer_norm,
    linear,
    linear_specs,
    lookup,
    norm_specs,
    stack_specs,
)
from bertjax.models.pooling import first_positions, lead, pool
from bertjax.models.stacked_layers import depths
from bertjax.parallel.sharding import constrain


class Encoded(NamedTuple):
    """What heads see: hidden [B, L, D]; pooled [B, D], packed [B, S, D], or None."""

    hidden: jax.Array
    pooled: jax.Array | None


class View(NamedTuple):
    """What a layer sees of the batch: where, and its turn of queries and keys."""

    mask: AttentionMask
    turn: Rotation | None


def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the parameters: truncated normal 0.02, biases 0, norm scales 1, all f32.

    Leaves of the layers are stacked on axis 0, [N, ...]; where layers share, each set
    is there once, and a leaf that the first layer lacks is stacked over the others.
    """
    d, m, e = cfg.hidden_size, cfg.intermediate_size, cfg.embedding_width
    heads = (cfg.num_attention_heads, cfg.head_dim)

    def norm(width: int) -> dict[str, Any]:
        return norm_specs(width, cfg.norm_bias)

    def dense(into: tuple[int, ...], out: tuple[int, ...], bias: bool) -> Any:
        return linear_specs(into=into, out=out, bias=bias)

    embeddings: dict[str, Any] = {"word": ((cfg.vocab_size, e), "normal")}
    if cfg.position_embedding_type == "absolute":
        embeddings["position"] = ((cfg.max_position_embeddings, e), "normal")
    if cfg.type_vocab_size:
        embeddings["token_type"] = ((cfg.type_vocab_size, e), "normal")
    if cfg.embedding_norm:
        embeddings["norm"] = norm(e)
    if cfg.embedding_size:
        embeddings["projection"] = dense((e,), (d,), True)
    mlp = {
        "up": dense((d,), (m,), cfg.mlp_bias),
        "down": dense((m,), (d,), cfg.mlp_bias),
        "norm": norm(d),
    }
    if cfg.mlp_type == "glu":
        mlp["gate"] = dense((d,), (m,), cfg.mlp_bias)
    attention = {
        "query": dense((d,), heads, cfg.attention_bias),
        "key": dense((d,), heads, cfg.attention_bias),
        "value": dense((d,), heads, cfg.attention_bias),
        "output": dense(heads, (d,), cfg.attention_bias),
    }
    depth = cfg.groups[-1] + 1
    layers = stack_specs({"attention": attention, "mlp": mlp}, depth)
    if normed := depth if cfg.first_attention_norm else depth - 1:
        layers["attention"]["norm"] = stack_specs(norm(d), normed)
    specs = {"embeddings": embeddings, "layers": layers}
    if cfg.final_norm:
        specs["final_norm"] = norm(d)
    if cfg.pooler and cfg.pooler_activation:
        specs["pooler"] = dense((d,), (d,), True)
    return draw(rng, specs, cfg.initializer_range)


def apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None = None,
    at: jax.Array | None = None,
) -> Encoded:
    """Encode a batch; `rng=None` means evaluation (no dropout).

    batch: input_ids, attention_mask (1 = real) i32 [B, L]; optional token_type_ids
    and position_ids i32 [B, L]. Packed rows have segment_ids i32 [B, L] (0 = padding)
    and cls_positions i32 [B, S]. Returns hidden [B, L, D] in cfg.dtype and, with a
    pooler, pooled [B, D], or [B, S, D] of packed rows. Ids must be below the table
    sizes: the host sees to it.

    at: i32 [B, P], the positions where alone hidden is wanted, [B, P, D]. The last
    layer is computed there (and where the pooler looks), but for its keys and values:
    what else it makes nobody reads. In a loop over the layers (cfg.unroll) it is
    computed everywhere.
    """
    return _apply(params, cfg, batch, rng, lambda x: None, at)[0]


def apply_layers(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    keep: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Evaluate a batch as `apply` does and return what is kept of every depth.

    keep: a function of the embeddings, as the first layer gets them, and of each
    layer's result, all [B, L, D]. Returns [N + 1, ...]; the last is of `hidden`, behind
    the final norm where there is one, as transformers' output_hidden_states has it.
    """
    encoded, (first, between) = _apply(params, cfg, batch, None, keep)
    return jnp.stack([first, *between[:-1], keep(encoded.hidden)])


def _apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None,
    keep: Callable[[jax.Array], Any],
    at: jax.Array | None = None,
) -> tuple[Encoded, tuple[Any, Any]]:
    """Run the encoder; also returns what is kept of the embeddings and the layers."""
    dtype = jnp.dtype(cfg.dtype)
    with jax.named_scope("embeddings"):
        x = embed(params["embeddings"], cfg, batch)
        x = dropout(x, cfg.hidden_dropout_prob, fold(rng, cfg.num_hidden_layers))
        x = x.astype(dtype)
        if cfg.embedding_size:
            x = linear(params["embeddings"]["projection"], x)
        x = constrain(x, "batch length embed")
    views = make_views(cfg, batch)
    wanted = last_positions(cfg, batch, at)
    first = keep(x)

    def layer(
        x: jax.Array,
        inputs: Any,
        seen: tuple[View, ...] = views,
        at: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        layer_params, index, depth = inputs
        if layer_params is None:
            group = depth["group"]  # of numpy arrays too, which no tracer indexes
            layer_params = jax.tree.map(
                lambda p: jnp.asarray(p)[group], params["layers"]
            )
        x = apply_layer(layer_params, cfg, x, seen, fold(rng, index), depth, at)
        x = constrain(x, "batch length embed")
        return x, keep(x)

    def forgetful(layer: Any) -> Any:
        if cfg.remat == "none":
            return layer
        policy = (
            jax.checkpoint_policies.save_only_these_names("product")
            if cfg.remat == "dots"
            else jax.checkpoint_policies.nothing_saveable
        )
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    n = cfg.num_hidden_layers
    if isinstance(params["layers"], tuple):  # unstacked
        kept = []
        for i, (group, every) in enumerate(zip(cfg.groups, cfg.is_global, strict=True)):
            seen = views[:1] if every else views[-1:]
            only = wanted if i == n - 1 else None
            x, held = layer(x, (params["layers"][group], i, {}), seen, only)
            kept.append(held)
    else:
        along = depths(params["layers"], cfg)
        # A loop would have to copy its stack, and its gradients', to leave a layer out.
        apart = wanted is not None and (cfg.unroll or n) >= n
        rest = jax.tree.map(lambda leaf: leaf[:-1], along) if apart else along
        # An unrolled scan with its single body is what costs least memory and time.
        x, kept = jax.lax.scan(forgetful(layer), x, rest, unroll=cfg.unroll or n)
        if apart:
            seen = views[:1] if cfg.is_global[-1] else views[-1:]
            last = forgetful(functools.partial(layer, seen=seen, at=wanted))
            x, _ = last(x, jax.tree.map(lambda leaf: leaf[-1], along))
        elif wanted is not None:
            x = take_at(x, wanted)
    if cfg.final_norm:
        with jax.named_scope("final_norm"):
            x = normalise(params["final_norm"], cfg, x)
    pooled = None
    if cfg.pooler:
        with jax.named_scope("pooler"):
            pooled = pool(params, cfg, x, batch if wanted is None else lead(batch))
    if at is not None:
        x = x[:, x.shape[1] - at.shape[1] :]
    return Encoded(x, pooled), (first, kept)


def last_positions(
    cfg: EncoderConfig, batch: dict[str, jax.Array], at: jax.Array | None
) -> jax.Array | None:
    """Return where the last layer is wanted, i32 [B, S + P], None for everywhere.

    That is `at`, i32 [B, P], behind the first token of each sequence if these are
    pooled. Raises ValueError where all tokens are.
    """
    if at is None or not cfg.pooler:
        return at
    if cfg.classifier_pooling == "mean":
        raise ValueError("a mean is of all tokens: at does not go with it")
    return jnp.concatenate([first_positions(batch), at], axis=1)


def make_views(cfg: EncoderConfig, batch: dict[str, jax.Array]) -> tuple[View, ...]:
    """Make what layers see: of global ones, of local ones, or both in this order."""
    at = batch.get("position_ids", np.arange(batch["input_ids"].shape[1]))

    def view(window: int, theta: float) -> View:
        mask = make_attention_mask(batch, window)
        if cfg.position_embedding_type != "rope":
            return View(mask, None)
        return View(mask, rotation(at, cfg.head_dim, theta))

    near = cfg.local_rope_theta or cfg.rope_theta
    whole = [view(0, cfg.rope_theta)] if any(cfg.is_global) else []
    local = [] if all(cfg.is_global) else [view(cfg.local_attention, near)]
    return (*whole, *local)


def normalise(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Normalise the last axis of x as the config says."""
    return layer_norm(params, x, cfg.layer_norm_eps, cfg.norm_type)


def embed(params: Params, cfg: EncoderConfig, batch: dict[str, jax.Array]) -> jax.Array:
    """Sum word, position and token type embeddings, normalised: f32 [B, L, E]."""
    ids = batch["input_ids"]
    x = lookup(params["word"], ids)
    if cfg.position_embedding_type == "absolute":
        offset = cfg.position_offset
        table = params["position"][offset:] if offset else params["position"]
        if "position_ids" in batch:
            x = x + lookup(table, batch["position_ids"])
        else:
            x = x + table[: ids.shape[1]].astype(jnp.float32)
    if cfg.type_vocab_size:
        # Without token types in the batch everything is of type 0.
        x = x + (
            lookup(params["token_type"], batch["token_type_ids"])
            if "token_type_ids" in batch
            else params["token_type"][0].astype(jnp.float32)
        )
    return normalise(params["norm"], cfg, x) if cfg.embedding_norm else x


def apply_layer(
    params: Params,
    cfg: EncoderConfig,
    x: jax.Array,
    views: tuple[View, ...],
    rng: jax.Array | None,
    depth: dict[str, jax.Array],
    at: jax.Array | None = None,
) -> jax.Array:
    """Run one layer on x [B, L, D], or for positions `at` i32 [B, P] alone: [B, P, D].

    Post-LN as in Vaswani et al. 2017, or pre-LN (Xiong et al. 2020, figure 1).
    views, depth: see make_views and depths. Matrix products see [B*L, D]: on a CPU
    gradients of products of three axes run slower.
    """
    b, length, d = x.shape
    heads = (b, -1, cfg.num_attention_heads, cfg.head_dim)
    rate = 0.0 if rng is None else cfg.attention_probs_dropout_prob
    backend = choose_backend(cfg.attention, (b, length, *heads[2:]), rate, x.dtype)
    # Kernels take a query for each key; "xla" takes those that are wanted.
    asking = at if backend == "xla" else None
    rngs = (None, None, None) if rng is None else jax.random.split(rng, 3)
    pre = cfg.norm_position == "pre"
    own = (x if at is None else take_at(x, at)).reshape(-1, d)
    x = x.reshape(-1, d)
    p = params["attention"]
    made = queries_keys_values(p, cfg, x, depth, None if asking is None else own)
    q, k, v = (y.reshape(heads) for y in made)
    x = own

    def look(view: View) -> Callable[..., jax.Array]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if view.turn is not None:
                q = rotate(q, rotation_at(view.turn, asking))
                k = rotate(k, view.turn)
            mask = view.mask._replace(query_positions=asking)
            return attend(q, k, v, mask, rate, rngs[0], backend)

        return run

    with jax.named_scope("attention"):
        if len(views) == 1:
            y = look(views[0])(q, k, v)
        else:
            y = jax.lax.cond(depth["is_global"], *map(look, views), q, k, v)
    with jax.named_scope("attention_out"):
        if at is not None and asking is None:
            y = take_at(y, at)
        y = linear(p["output"], y.reshape(-1, d), "heads head embed")
        x = x + dropout(y, cfg.hidden_dropout_prob, rngs[1])
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
    own: jax.Array | None = None,
) -> list[jax.Array]:
    """Project x [T, D] for the attention, [T, H K] each; pre-LN normalises it first.

    own: [S, D], of which queries are made, [S, H K]; None for x.
    """

    def prepare(x: jax.Array) -> jax.Array:
        if cfg.norm_position != "pre" or "norm" not in params:
            return x
        y = normalise(params["norm"], cfg, x)
        return jnp.where(depth["is_normed"], y, x) if "is_normed" in depth else y

    y = prepare(x)
    inputs = {"query": y if own is None else prepare(own), "key": y, "value": y}
    with jax.named_scope("qkv"):
        return [product(params[n], x, "embed heads head") for n, x in inputs.items()]


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


def fold(rng: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive a key for a layer; None stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def count_params(params: Params) -> int:
    """Count the numbers in a tree of arrays or of shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def without_pooler(cfg: EncoderConfig) -> EncoderConfig:
    """Return the same encoder, whose pooled vector nobody wants."""
    return dataclasses.replace(cfg, pooler=False)

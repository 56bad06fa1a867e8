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

from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import embed
from bertjax.models.layers import Params, draw, linear_specs, norm_specs, stack_specs
from bertjax.models.pooling import last_positions, pool
from bertjax.models.skips import skip_specs
from bertjax.models.stacked_layers import run_layers
from bertjax.models.transformer_layer import make_attention_inputs, normalise


class Encoded(NamedTuple):
    """What heads see: hidden [B, L, D]; pooled [B, D], packed [B, S, D], or None."""

    hidden: jax.Array
    pooled: jax.Array | None


def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Make the parameters: truncated normal 0.02, biases 0, norm scales 1, all f32.

    cfg.zero_init_outputs: what each block adds to the residual stream begins as 0, as
    in modded-nanogpt and, by a factor, in Goyal et al. 2017 (arXiv 1706.02677), 5.1.

    Leaves of the layers are stacked on axis 0, [N, ...]; where layers share, each set
    is there once, and a leaf that the first layer lacks is stacked over the others.
    """
    d, m, e = cfg.hidden_size, cfg.intermediate_size, cfg.embedding_width
    heads = (cfg.num_attention_heads, cfg.head_dim)

    norm = functools.partial(norm_specs, bias=cfg.norm_bias)
    embeddings: dict[str, Any] = {"word": ((cfg.vocab_size, e), "normal")}
    if cfg.position_embedding_type == "absolute":
        embeddings["position"] = ((cfg.max_position_embeddings, e), "normal")
    if cfg.relative_attention_num_buckets:
        shape = (cfg.relative_attention_num_buckets, cfg.num_attention_heads)
        embeddings["relative"] = (shape, "normal")
    if cfg.type_vocab_size:
        embeddings["token_type"] = ((cfg.type_vocab_size, e), "normal")
    if cfg.embedding_norm:
        embeddings["norm"] = norm(e)
    if cfg.embedding_size:
        embeddings["projection"] = linear_specs((e,), (d,))
    mlp = {
        "up": linear_specs((d,), (m,), cfg.mlp_bias),
        "down": linear_specs((m,), (d,), cfg.mlp_bias),
        "norm": norm(d),
    }
    if cfg.mlp_type == "glu":
        mlp["gate"] = linear_specs((d,), (m,), cfg.mlp_bias)
    attention = {
        name: linear_specs((d,), heads, cfg.attention_bias)
        for name in ("query", "key", "value")
    }
    attention["output"] = linear_specs(heads, (d,), cfg.attention_bias)
    if cfg.zero_init_outputs:
        for into in (attention["output"], mlp["down"]):
            into["kernel"] = (into["kernel"][0], 0.0)
    depth = cfg.groups[-1] + 1
    layers = stack_specs({"attention": attention, "mlp": mlp}, depth)
    if normed := depth if cfg.first_attention_norm else depth - 1:
        layers["attention"]["norm"] = stack_specs(norm(d), normed)
    layers |= skip_specs(cfg)
    specs = {"embeddings": embeddings, "layers": layers}
    if cfg.final_norm:
        specs["final_norm"] = norm(d)
    if cfg.pooler and cfg.pooler_activation:
        specs["pooler"] = linear_specs((d,), (d,))
    return draw(rng, specs, cfg.initializer_range)


def apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None = None,
    at: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> Encoded:
    """Encode a batch; `rng=None` means evaluation (no dropout).

    batch: input_ids, attention_mask (1 = real) i32 [B, L]; optional token_type_ids
    and position_ids i32 [B, L]. Packed rows have segment_ids i32 [B, L] (0 = padding)
    and cls_positions i32 [B, S]. Returns hidden [B, L, D] in cfg.dtype and, with a
    pooler, pooled [B, D], or [B, S, D] of packed rows. Ids must be below the table
    sizes: the host sees to it. attention_steps i32 [B, L] say who sees whom
    (attention_mask.py); in a decoder each token sees those before it.

    at: i32 [B, P], the positions where alone hidden is wanted, [B, P, D]. The last
    layer is computed there (and where the pooler looks), but for its keys and values:
    what else it makes nobody reads. In a loop over the layers (cfg.unroll) it is
    computed everywhere. Raises ValueError where the pooler takes the mean of all.

    inputs: [B, L, E] in the place of word embeddings (transformers' inputs_embeds);
    positions and types are added to them, and input_ids are not read.
    """
    return _apply(params, cfg, batch, rng, lambda x: None, at, inputs)[0]


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
    encoded, (first, results) = _apply(params, cfg, batch, None, keep)
    return jnp.stack([first, *results[:-1], keep(encoded.hidden)])


def _apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: jax.Array | None,
    keep: Callable[[jax.Array], Any],
    at: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> tuple[Encoded, tuple[Any, Any]]:
    """Run the encoder; also returns what is kept of the embeddings and the layers."""
    with jax.named_scope("embeddings"):
        x = embed(params["embeddings"], cfg, batch, rng, inputs)
    first = keep(x)
    seen = make_attention_inputs(params["embeddings"], cfg, batch)
    positions, pooling = at, ""
    if at is not None and cfg.pooler:
        if cfg.classifier_pooling == "mean":
            raise ValueError("a mean is of all tokens: at does not go with it")
        if cfg.classifier_pooling == "last":
            pooled_at = last_positions(batch)
        else:
            one = jnp.zeros((len(x), 1), jnp.int32)
            pooled_at = batch.get("cls_positions", one)
        positions = jnp.concatenate([pooled_at, at], axis=1)
        pooling = "cls"  # what x begins with then
    x, results = run_layers(params["layers"], cfg, x, seen, rng, keep, positions)
    if cfg.final_norm:
        with jax.named_scope("final_norm"):
            x = normalise(params["final_norm"], cfg, x)
    pooled = None
    if cfg.pooler:
        with jax.named_scope("pooler"):
            if positions is not None and "cls_positions" in batch:
                b, s = batch["cls_positions"].shape
                batch = {**batch, "cls_positions": jnp.tile(jnp.arange(s), (b, 1))}
            pooled = pool(params, cfg, x, batch, pooling)
    if at is not None:
        x = x[:, x.shape[1] - at.shape[1] :]
    return Encoded(x, pooled), (first, results)


def count_params(params: Params) -> int:
    """Count the numbers in a tree of arrays or of shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def without_pooler(cfg: EncoderConfig) -> EncoderConfig:
    """Return the same encoder, whose pooled vector nobody wants."""
    return dataclasses.replace(cfg, pooler=False)

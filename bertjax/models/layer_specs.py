# SPDX-License-Identifier: Apache-2.0
"""The shapes of the parameters that encoders and decoders have in common."""

from typing import Any

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Spec, linear_specs, norm_specs, stack_specs
from bertjax.models.skips import skip_specs


def position_specs(cfg: EncoderConfig) -> dict[str, Any]:
    """Describe the parameters of positions, and of the embeddings' norm."""
    e = cfg.embedding_width
    specs: dict[str, Any] = {}
    if cfg.position_embedding_type == "absolute":
        specs["position"] = ((cfg.max_position_embeddings, e), "normal")
    if cfg.relative_attention_num_buckets:
        shape = (cfg.relative_attention_num_buckets, cfg.num_attention_heads)
        specs["relative"] = (shape, "normal")
    if cfg.embedding_norm:
        specs["norm"] = norm_specs(e, cfg.norm_bias)
    return specs


def layer_specs(cfg: EncoderConfig, cross: bool = False) -> dict[str, Any]:
    """Describe the layers, stacked on axis 0; cross: with a cross-attention."""
    d, m = cfg.hidden_size, cfg.intermediate_size
    mlp = {
        "up": linear_specs((d,), (m,), cfg.mlp_bias),
        "down": linear_specs((m,), (d,), cfg.mlp_bias),
        "norm": norm_specs(d, cfg.norm_bias),
    }
    if cfg.mlp_type == "glu":
        mlp["gate"] = linear_specs((d,), (m,), cfg.mlp_bias)
    if cfg.zero_init_outputs:
        mlp["down"] |= begin_as_zero(mlp["down"])
    depth = cfg.groups[-1] + 1
    layers = stack_specs({"attention": attention_specs(cfg), "mlp": mlp}, depth)
    norm = norm_specs(d, cfg.norm_bias)
    if normed := depth if cfg.first_attention_norm else depth - 1:
        layers["attention"]["norm"] = stack_specs(norm, normed)
    if cross:
        layers["cross"] = stack_specs({**attention_specs(cfg), "norm": norm}, depth)
    return layers | skip_specs(cfg)


def attention_specs(cfg: EncoderConfig) -> dict[str, dict[str, Spec]]:
    """Describe the projections of an attention block, without its norm."""
    d, heads = (cfg.hidden_size,), (cfg.num_attention_heads, cfg.head_dim)
    specs = {
        name: linear_specs(d, heads, cfg.attention_bias)
        for name in ("query", "key", "value")
    }
    specs["output"] = linear_specs(heads, d, cfg.attention_bias)
    if cfg.zero_init_outputs:
        specs["output"] |= begin_as_zero(specs["output"])
    return specs


def begin_as_zero(dense: dict[str, Spec]) -> dict[str, Spec]:
    """Return a dense layer's kernel spec with 0 as its initial value."""
    return {"kernel": (dense["kernel"][0], 0.0)}

# SPDX-License-Identifier: Apache-2.0
"""The families of encoders: what each fixes in an EncoderConfig, and published sizes.

Names are the `model_type` of Hugging Face's config.json.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bertjax.models.config import RUNTIME, EncoderConfig

Shape = Mapping[str, Any]


def shape(layers: int, width: int, heads: int, **more: Any) -> Shape:
    return dict(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, **more
    )


def encoder_decoder(layers: int, width: int, heads: int, **more: Any) -> Shape:
    """Return the shape of an encoder and a decoder of so many layers each."""
    return shape(layers, width, heads, num_decoder_layers=layers, **more)


def t5_shape(layers: int, width: int, heads: int, mlp: int = 0) -> Shape:
    """Return a shape of T5's first version, whose words are the head's matrix too.

    Hidden states are scaled before it (t5/models/mesh_transformer.py).
    """
    scale = {"intermediate_size": mlp or 4 * width, "logit_scale": width**-0.5}
    return encoder_decoder(layers, width, heads, **scale)


def t5_v1_1_shape(layers: int, width: int, heads: int, mlp: int) -> Shape:
    """Return a shape of T5 1.1: a gated MLP, a matrix of its own for the head."""
    return encoder_decoder(
        layers,
        width,
        heads,
        intermediate_size=mlp,
        mlp_type="glu",
        hidden_act="gelu_new",
        tie_word_embeddings=False,
    )


# Turc et al. 2019 (arXiv 1908.08962); Devlin et al. 2019 for base and large. The MLP
# is four times as wide where nothing else is said, heads are 64 wide.
SIZES: Mapping[str, Shape] = {
    "tiny": shape(2, 128, 2),
    "mini": shape(4, 256, 4),
    "small": shape(4, 512, 8),
    "medium": shape(8, 512, 8),
    "base": shape(12, 768, 12),
    "large": shape(24, 1024, 16),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart from BERT, and the sizes it was published in."""

    fixed: Shape
    sizes: Mapping[str, Shape]


# Liu et al. 2019: positions begin after the padding id's row (fairseq), type 0 only.
ROBERTA = dict(
    position_offset=2,
    max_position_embeddings=514,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
    classifier_activation="gelu",
)
FAMILIES: Mapping[str, Family] = {
    "bert": Family({}, SIZES),
    "roberta": Family(ROBERTA, SIZES),
    "xlm-roberta": Family(ROBERTA, SIZES),
    "camembert": Family(ROBERTA, SIZES),  # Martin et al. 2020
    # Lan et al. 2020, table 1. tiny, mini: ours, for tests and small machines.
    "albert": Family(
        dict(embedding_size=128, num_hidden_groups=1),
        {
            "tiny": SIZES["tiny"],
            "mini": SIZES["mini"],
            "base": SIZES["base"],
            "large": SIZES["large"],
            "xlarge": shape(24, 2048, 16),
            "xxlarge": shape(12, 4096, 64),
        },
    ),
    # Clark et al. 2020, table 6: the discriminators. Their generators are these with
    # hidden_size, heads and MLP times 1/4 (base: 1/3), embeddings shared. The dense
    # layer before a task's classes is transformers'; google-research/electra has none.
    "electra": Family(
        dict(pooler=False, classifier_activation="gelu", pooler_activation="gelu"),
        {
            "tiny": SIZES["tiny"],
            "mini": SIZES["mini"],
            "small": shape(12, 256, 4, embedding_size=128),
            "base": SIZES["base"],
            "large": SIZES["large"],
        },
    ),
    # Sanh et al. 2019, section 3; a task's head as in their code, transformers.
    "distilbert": Family(
        dict(type_vocab_size=0, pooler=False, pooler_activation="relu"),
        {"base": shape(6, 768, 12)},
    ),
    # Warner et al. 2024 (arXiv 2412.13663), section 2.1 and table 4.
    "modernbert": Family(
        dict(
            max_position_embeddings=8192,
            type_vocab_size=0,
            pooler=False,
            layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            position_embedding_type="rope",
            rope_theta=160_000.0,
            local_rope_theta=10_000.0,
            norm_position="pre",
            norm_bias=False,
            first_attention_norm=False,
            final_norm=True,
            attention_bias=False,
            local_attention=128,
            global_attn_every_n_layers=3,
            mlp_type="glu",
            mlp_bias=False,
            classifier_bias=False,
            pooler_activation="",
            task_transform=True,
        ),
        {
            "tiny": shape(4, 128, 2, intermediate_size=192),
            "base": shape(22, 768, 12, intermediate_size=1152),
            "large": shape(28, 1024, 16, intermediate_size=2624),
        },
    ),
    # Radford et al. 2019, table 2; gpt1: Radford et al. 2018, section 4.1 (post-LN).
    "gpt2": Family(
        dict(
            is_decoder=True,
            max_position_embeddings=1024,
            type_vocab_size=0,
            layer_norm_eps=1e-5,
            hidden_act="gelu_new",
            embedding_norm=False,
            norm_position="pre",
            final_norm=True,
            classifier_transform=False,
            decoder_bias=False,
            classifier_pooling="last",
            pooler_activation="",
        ),
        {
            "tiny": SIZES["tiny"],
            "mini": SIZES["mini"],
            "base": SIZES["base"],
            "gpt1": shape(
                12,
                768,
                12,
                norm_position="post",
                final_norm=False,
                max_position_embeddings=512,
            ),
            "medium": shape(24, 1024, 16),
            "large": shape(36, 1280, 20),
            "xl": shape(48, 1600, 25),
        },
    ),
    # Raffel et al. 2020, section 3.1.1 and 2.1; 1.1: released_checkpoints.md of
    # google-research/text-to-text-transfer-transformer, whose small one has six heads
    # of 64 in a width of 512: here it has eight.
    "t5": Family(
        dict(
            max_position_embeddings=2**24,  # there are none
            position_embedding_type="none",
            relative_attention_num_buckets=32,
            attention_scale=1.0,
            type_vocab_size=0,
            layer_norm_eps=1e-6,
            hidden_act="relu",
            embedding_norm=False,
            norm_position="pre",
            norm_type="rms_norm",
            norm_bias=False,
            final_norm=True,
            attention_bias=False,
            mlp_bias=False,
            classifier_transform=False,
            decoder_bias=False,
            classifier_pooling="mean",
            pooler_activation="",
        ),
        {
            "tiny": t5_shape(2, 128, 2),
            "mini": t5_shape(4, 256, 4),
            "small": t5_shape(6, 512, 8),
            "base": t5_shape(12, 768, 12),
            "large": t5_shape(24, 1024, 16),
            "v1_1_mini": t5_v1_1_shape(4, 256, 4, 512),
            "v1_1_small": t5_v1_1_shape(8, 512, 8, 1024),
            "v1_1_base": t5_v1_1_shape(12, 768, 12, 2048),
            "v1_1_large": t5_v1_1_shape(24, 1024, 16, 2816),
        },
    ),
    # Lewis et al. 2020, section 2.1; positions begin after two rows (fairseq).
    "bart": Family(
        dict(
            position_offset=2,
            max_position_embeddings=1026,
            type_vocab_size=0,
            layer_norm_eps=1e-5,
            classifier_transform=False,
            classifier_pooling="mean",
            pooler_activation="",
        ),
        {
            "tiny": encoder_decoder(2, 128, 2),
            "mini": encoder_decoder(4, 256, 4),
            "base": encoder_decoder(6, 768, 12),
            "large": encoder_decoder(12, 1024, 16),
        },
    ),
}


def size_name(family: str, model: Mapping[str, Any]) -> str:
    """Return which of a family's sizes a model has; "" where it has none of them.

    model: its layers, widths and heads by name.

    >>> shape = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    >>> size_name("bert", {**shape, "intermediate_size": 1024})
    'mini'
    """
    for name, size in FAMILIES[family].sizes.items():
        whole = {"intermediate_size": 4 * size["hidden_size"], **size}
        if all(model.get(key) == value for key, value in whole.items()):
            return name
    return ""


def in_effect(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.model with the values that its empty keys stand for.

    `size` is what the shape is called, whatever was recorded; "" where it has no name.
    Empty stays what follows the tokenizer or the device. A model of an unknown family
    is returned as it is.
    """
    given = {key: value for key, value in model.items() if value is not None}
    family = FAMILIES.get(given.get("family", ""))
    if family is None:
        return dict(model)
    fields = dataclasses.fields(EncoderConfig)
    usual = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    usual = {key: value for key, value in usual.items() if key not in RUNTIME}
    sized = family.sizes.get(given.get("size", ""), {})
    effective = {**dict.fromkeys(model), **usual, **family.fixed, **sized, **given}
    if effective.get("hidden_size") and effective.get("intermediate_size") is None:
        effective["intermediate_size"] = 4 * effective["hidden_size"]
    effective["size"] = size_name(given["family"], effective)
    return {key: effective[key] for key in model}

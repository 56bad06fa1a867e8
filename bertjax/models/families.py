# SPDX-License-Identifier: Apache-2.0
"""The families of models: the options each fixes in EncoderConfig, and its sizes.

Names are those of `model_type` in Hugging Face's config.json.
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


# Turc et al. 2019 (arXiv 1908.08962); Devlin et al. 2019 for base and large. Unless a
# size says otherwise the MLP is four times as wide as the hidden size. Heads are 64
# wide.
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
    """The options by which a family differs from BERT, and its sizes."""

    fixed: Shape
    sizes: Mapping[str, Shape]


# Liu et al. 2019: positions begin after the padding id's row (fairseq), and there is
# only type 0.
ROBERTA = dict(
    position_offset=2,
    max_position_embeddings=514,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
    classifier_activation="gelu",
)
T5 = dict(
    max_position_embeddings=2**24,  # no limit: scores are biased by distance
    type_vocab_size=0,
    pooler=False,
    layer_norm_eps=1e-6,
    hidden_act="relu",
    position_embedding_type="none",
    relative_attention_num_buckets=32,
    embedding_norm=False,
    norm_position="pre",
    norm_type="rms_norm",
    norm_bias=False,
    final_norm=True,
    attention_bias=False,
    attention_scale=1.0,
    fan_in_init=True,
    mlp_bias=False,
    classifier_transform=False,
    decoder_bias=False,
)
T5_1_1 = dict(
    hidden_act="gelu_new", mlp_type="glu", tie_word_embeddings=False, logit_scale=0.0
)


def t5(layers: int, width: int, heads: int, inner: int, **more: Any) -> Shape:
    """Return a size of T5, with as many decoder layers as encoder layers."""
    own = dict(num_decoder_layers=layers, intermediate_size=inner)
    return shape(layers, width, heads, **own, **{"logit_scale": width**-0.5, **more})


# Bao et al. 2021 (arXiv 2109.09519), section 3.1, and PaddlePaddle/Knover's
# projects/PLATO-XL/11B.json: pre-LN, a token type for knowledge, a table of 128 roles.
PLATO = dict(
    pooler=False,
    max_position_embeddings=1024,
    type_vocab_size=3,
    id_streams="role:128",
    embedding_norm=False,
    norm_position="pre",
    final_norm=True,
    layer_norm_eps=1e-5,
    initializer_range=0.01,
)

FAMILIES: Mapping[str, Family] = {
    "bert": Family({}, SIZES),
    "roberta": Family(ROBERTA, SIZES),
    "xlm-roberta": Family(ROBERTA, SIZES),
    "camembert": Family(ROBERTA, SIZES),  # Martin et al. 2020
    # Song et al. 2020 (arXiv 2004.09297), with T5's biases of distance.
    "mpnet": Family(
        {**ROBERTA, "type_vocab_size": 0, "relative_attention_num_buckets": 32}, SIZES
    ),
    # Lan et al. 2020, table 1. tiny and mini are ours, for tests and small machines.
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
    # Clark et al. 2020, table 6: the discriminators. Their generators have the same
    # shapes with hidden_size, heads and MLP times 1/4 (base: 1/3) and share the
    # embeddings. The dense layer before a task's classes follows transformers;
    # google-research/electra has none.
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
    # Sanh et al. 2019, section 3; a task's head is that of their code in transformers.
    "distilbert": Family(
        dict(type_vocab_size=0, pooler=False, pooler_activation="relu"),
        {
            # Half the layers of BERT's sizes of these names; only base is published.
            "tiny": shape(1, 128, 2),
            "mini": shape(2, 256, 4),
            "medium": shape(4, 512, 8),
            "base": shape(6, 768, 12),
            "large": shape(12, 1024, 16),
        },
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
    # Raffel et al. 2020, section 2.1 and table 14. v1.1 follows Shazeer 2020 and has an
    # untied output matrix (google-research/text-to-text-transfer-transformer,
    # released_checkpoints.md). The other published sizes are missing because the width
    # of their heads is not hidden_size / heads.
    "t5": Family(
        T5,
        {
            "tiny": t5(2, 128, 2, 512),
            "mini": t5(4, 256, 4, 1024),
            "small": t5(6, 512, 8, 2048),
            "base": t5(12, 768, 12, 3072),
            "large": t5(24, 1024, 16, 4096),
            "v1_1_mini": t5(4, 256, 4, 512, **T5_1_1),
            "v1_1_base": t5(12, 768, 12, 2048, **T5_1_1),
            "v1_1_large": t5(24, 1024, 16, 2816, **T5_1_1),
            "v1_1_xl": t5(24, 2048, 32, 5120, **T5_1_1),
            "v1_1_xxl": t5(24, 4096, 64, 10_240, **T5_1_1),
        },
    ),
    # Lewis et al. 2020, section 2.1: as many layers in the decoder as in the encoder.
    "bart": Family(
        dict(
            max_position_embeddings=1026,
            position_offset=2,
            type_vocab_size=0,
            pooler=False,
            layer_norm_eps=1e-5,
            classifier_transform=False,
        ),
        {
            "tiny": shape(2, 128, 2, num_decoder_layers=2),
            "mini": shape(4, 256, 4, num_decoder_layers=4),
            "base": shape(6, 768, 12, num_decoder_layers=6),
            "large": shape(12, 1024, 16, num_decoder_layers=12),
        },
    ),
    # xl is the 11B model of the paper; the others are ours, with BERT's widths.
    "plato": Family(
        PLATO, {**SIZES, "xl": shape(72, 3072, 32, intermediate_size=18_432)}
    ),
}


def size_name(family: str, model: Mapping[str, Any]) -> str:
    """Return the name of the family's size that a model has; "" if it has none.

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


def scale_of_width(model: Mapping[str, Any]) -> float | None:
    """Return the logit_scale of a model whose hidden_size is not that of its size.

    None if the width is that of the size, if the size's logit_scale does not depend on
    the width (T5 v1.0's does), or if config.model sets logit_scale itself.

    >>> t5 = {"family": "t5", "size": "mini", "hidden_size": 64, "logit_scale": None}
    >>> scale_of_width(t5), scale_of_width({**t5, "size": "v1_1_mini"})
    (0.125, None)
    """
    family, width = FAMILIES.get(model["family"]), model["hidden_size"]
    size = family.sizes.get(model["size"], {}) if family else {}
    follows = size.get("logit_scale") and model["logit_scale"] is None
    if not follows or not width or width < 0 or width == size["hidden_size"]:
        return None
    return width**-0.5


def in_effect(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.model with its empty keys filled with the values in effect.

    `size` becomes the name of the actual shape, whatever was recorded; "" if the shape
    has no name. Keys that depend on the tokenizer or the device stay empty. A model of
    an unknown family is returned unchanged.
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

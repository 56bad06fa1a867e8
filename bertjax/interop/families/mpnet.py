# SPDX-License-Identifier: Apache-2.0
"""MPNet (Song et al. 2020, arXiv 2004.09297): RoBERTa with biases by distance.

Attention scores get T5's biases beside the learned positions. Whatever config.json has,
transformers computes 32 buckets that end at 128, and positions after a padding id of 1.
"""

import dataclasses

from bertjax.interop.families.roberta import FAMILY as ROBERTA
from bertjax.interop.family import DEFAULTS, REFUSED, tensors

BUCKETS = "relative_attention_num_buckets"
FAMILY = dataclasses.replace(
    ROBERTA,
    model_type="mpnet",
    prefix="mpnet.",
    names={
        **ROBERTA.names,
        **tensors(
            """
            encoder/embeddings/relative     encoder.relative_attention_bias.weight
            encoder/layers/attention/query  encoder.layer.{}.attention.attn.q
            encoder/layers/attention/key    encoder.layer.{}.attention.attn.k
            encoder/layers/attention/value  encoder.layer.{}.attention.attn.v
            encoder/layers/attention/output encoder.layer.{}.attention.attn.o
            encoder/layers/attention/norm   encoder.layer.{}.attention.LayerNorm
            """
        ),
    },
    defaults={**DEFAULTS, BUCKETS: 32},
    fixed={
        **ROBERTA.fixed,
        "type_vocab_size": 0,
        "relative_attention_max_distance": 128,
        "position_offset": 2,
    },
    read=lambda raw: {},
    refused={**REFUSED, BUCKETS: (None, 32)},
    class_prefix="MPNet",
)

# SPDX-License-Identifier: Apache-2.0
"""MPNet (Song et al. 2020, arXiv 2004.09297): RoBERTa with biases by distance.

Attention scores get T5's biases beside the learned positions. transformers computes 32
buckets that end at 128, whatever config.json has.
"""

from bertjax.interop.families.bert import EMBEDDINGS, POOLED
from bertjax.interop.families.roberta import FAMILY as ROBERTA
from bertjax.interop.family import DEFAULTS, REFUSED, Family, tensors

BUCKETS = {"relative_attention_num_buckets": 32}
FAMILY = Family(
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
    aliases=ROBERTA.aliases,
    defaults={k: v for k, v in DEFAULTS.items() if k != "type_vocab_size"} | BUCKETS,
    fixed={
        **ROBERTA.fixed,
        "type_vocab_size": 0,
        "relative_attention_max_distance": 128,
        # The padding's id is 1 in MPNet's code, not read from config.json.
        "position_offset": 2,
    },
    after_padding=True,
    special_ids=ROBERTA.special_ids,
    refused={**REFUSED, **{key: (None, value) for key, value in BUCKETS.items()}},
    class_prefix="MPNet",
    classes=ROBERTA.classes,
    task_heads={**ROBERTA.task_heads},
)

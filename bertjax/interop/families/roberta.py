# SPDX-License-Identifier: Apache-2.0
"""RoBERTa: BERT with positions that begin after the padding's id, and its own head."""

import dataclasses

from bertjax.interop.families.bert import EMBEDDINGS, LAYERS, POOLED
from bertjax.interop.family import ENDS, Family, Options, pooled, task_heads, tensors


def read_position_offset(raw: Options) -> Options:
    """Return the first row of positions (fairseq's make_positions)."""
    pad = raw.get("pad_token_id")
    return {"position_offset": (1 if pad is None else pad) + 1}


FAMILY = Family(
    model_type="roberta",
    prefix="roberta.",
    names=tensors(
        f"""
        {EMBEDDINGS.strip()}
        {LAYERS.strip()}
        encoder/pooler  pooler.dense
        mlm/transform   lm_head.dense
        mlm/norm        lm_head.layer_norm
        mlm/bias        lm_head.bias
        mlm/decoder     lm_head.decoder.weight
        """
    ),
    aliases={"lm_head.decoder.bias": "lm_head.bias"},
    fixed={"classifier_activation": "gelu"},
    read=read_position_offset,
    after_padding=True,
    special_ids=ENDS,
    class_prefix="Roberta",
    classes={"mlm": "ForMaskedLM", "": "Model"},
    task_heads=task_heads(pooled("classifier.dense", "classifier.out_proj"), POOLED),
)
# Both use RoBERTa's code.
CAMEMBERT = dataclasses.replace(
    FAMILY, model_type="camembert", class_prefix="Camembert"
)
XLM_ROBERTA = dataclasses.replace(
    FAMILY, model_type="xlm-roberta", class_prefix="XLMRoberta"
)

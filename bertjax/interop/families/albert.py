# SPDX-License-Identifier: Apache-2.0
"""ALBERT: shared parameters of layers, narrow embeddings, sentence order."""

from bertjax.interop import family
from bertjax.interop.families.bert import EMBEDDINGS


def check_groups(raw: family.Options) -> family.Options:
    """Refuse numbers of groups for which transformers assigns other groups to layers.

    It rounds (see EncoderConfig.groups). Raises ValueError.
    """
    n, groups = raw["num_hidden_layers"], raw.get("num_hidden_groups") or 1
    if any(int(i / (n / groups)) != i * groups // n for i in range(n)):
        raise ValueError(f"num_hidden_groups={groups} of {n} layers")
    return {}


GROUP = "encoder.albert_layer_groups.{}.albert_layers.0"
FAMILY = family.Family(
    model_type="albert",
    prefix="albert.",
    names=family.tensors(
        f"""
        {EMBEDDINGS.strip()}
        encoder/embeddings/projection   encoder.embedding_hidden_mapping_in
        encoder/layers/attention/query  {GROUP}.attention.query
        encoder/layers/attention/key    {GROUP}.attention.key
        encoder/layers/attention/value  {GROUP}.attention.value
        encoder/layers/attention/output {GROUP}.attention.dense
        encoder/layers/attention/norm   {GROUP}.attention.LayerNorm
        encoder/layers/mlp/up           {GROUP}.ffn
        encoder/layers/mlp/down         {GROUP}.ffn_output
        encoder/layers/mlp/norm         {GROUP}.full_layer_layer_norm
        encoder/pooler                  pooler
        mlm/transform                   predictions.dense
        mlm/norm                        predictions.LayerNorm
        mlm/bias                        predictions.bias
        mlm/decoder                     predictions.decoder.weight
        sop                             sop_classifier.classifier
        """
    ),
    aliases={"predictions.decoder.bias": "predictions.bias"},
    defaults={
        **family.DEFAULTS,
        "embedding_size": 128,
        "num_hidden_groups": 1,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    read=check_groups,
    special_ids=family.ENDS,
    refused={**family.REFUSED, "inner_group_num": (None, 1)},
    class_prefix="Albert",
    classes={"mlm+sop": "ForPreTraining", "mlm": "ForMaskedLM", "": "Model"},
    task_heads=family.task_heads(family.pooled("pooler"), family.pooled("pooler")),
    tf1_config="albert_config.json",
    tf1_names={
        r"^encoder\.albert_layer_groups\.(\d+)\.albert_layers\.0": (
            r"encoder.transformer.group_\1.inner_group_0"
        ),
        r"attention\.LayerNorm": "LayerNorm",
        r"full_layer_layer_norm\.weight": "LayerNorm_1.gamma",
        r"full_layer_layer_norm\.bias": "LayerNorm_1.beta",
        r"attention\.(query|key|value)": r"attention_1.self.\1",
        r"attention\.dense": "attention_1.output.dense",
        r"\.ffn\.": ".ffn_1.intermediate.dense.",
        r"\.ffn_output\.": ".ffn_1.intermediate.output.dense.",
        r"^pooler\.": "pooler.dense.",
        r"^predictions\.(dense|LayerNorm)": r"cls.predictions.transform.\1",
        r"^predictions\.bias": "cls.predictions.output_bias",
        r"^sop_classifier\.classifier\.bias": "cls.seq_relationship.output_bias",
        r"^sop_classifier\.classifier\.weight": "cls.seq_relationship.output_weights",
    },
)
